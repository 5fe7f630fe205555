"""What size Muon's update should have, and why it needs weight decay (Moonlight report 2.2, tables 1 and 8, figure 2).

Claims:
  5   10 Newton-Schulz steps train no better than 5.
  6   An orthogonalized matrix has an RMS of sqrt(1 / max(n, m)), and so of 0.2 after scaling, whatever its shape.
  7a  At one learning rate, an RMS of 0.2 and of 0.4 are as good as each other.
  7b  0.05 and 0.8 are worse than both.
  7c  Muon beats AdamW at each of these.
  8a  Scaling by sqrt(max(n, m)) ("adjusted") is as good as bringing every matrix to its RMS ("update_norm").
  8b  Both are better than scaling by sqrt(d_model) ("baseline"), in a model whose feed-forward is 4 times as wide.
  9a  Without weight decay Muon is ahead early in a long run.
  9b  And behind at its end.

    python -m experiments.update_rms                  9 minutes on two cores
    python -m experiments.update_rms --preset smoke   2 minutes; shows that everything works, no claim
    python -m experiments.update_rms --preset full    about 6 hours on two cores

It trains one model of `configs/llama.py`, with a feed-forward of 4 times its width, in each way; the runs of a seed see the
same batches, and gaps are taken seed by seed. "Early" is 36% of the way, where Moonlight's report reads its figure. A killed
run goes on where it was when the same command is given again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from configs import llama
from experiments import _figures, _study
from experiments._study import Claim, Options, Study, Trained
from experiments._updates import Update, random_updates, trained_updates, weight_rms
from k2jax.config import RunConfig
from k2jax.scaling import laws

RMS = (0.05, 0.1, 0.2, 0.4, 0.8)
MUON = tuple(f"rms{rms:g}" for rms in RMS)
CHOSEN = "rms0.2"  # K2's: adjusted, 5 steps
BASE = {
    "adamw": {"rule": "adamw"},
    **{f"rms{rms:g}": {"update_rms": rms} for rms in RMS},
    "update_norm": {"scale": "update_norm"},
    "baseline": {"scale": "baseline"},
    "steps10": {"ns_steps": 10},
}
SMOKE = ("adamw", "rms0.2", "rms0.8", "update_norm", "steps10")  # of BASE, since each takes long to compile
LONG = {"decay": {}, "no_decay": {"weight_decay": 0.0}}
EARLY = 0.36  # of a long run: 24k of the report's 66k steps
POINTS = 25  # validations of a long run
SEEDS = {"smoke": 1, "default": 3, "full": 5}
TIE = 0.011  # nats between the validation losses of 0.2 and 0.4 in the report's table 8, which calls them alike
WITHIN = (0.14, 0.23)  # RMS that 5 steps of Jordan's polynomial leave of 0.2: its singular values lie in 0.68 to 1.13


class Budget(NamedTuple):
    """Model and steps of a preset."""

    d_model: int
    n_layers: int
    steps: int
    long_steps: int
    long_batch: int  # sequences a step
    rate: float  # learning rate of the base runs
    long_rate: float


BUDGETS = {
    "smoke": Budget(24, 2, 10, 25, 4, 1e-2, 2e-2),
    "default": Budget(32, 2, 350, 2000, 4, 1e-2, 5e-3),
    "full": Budget(64, 4, 3000, 20_000, 8, 1e-2, 1e-2),
}


def runs_of(study: Study) -> list[RunConfig]:
    """Every run: the base runs' variants and the long runs', each with every seed."""
    preset = study.options.preset
    budget, n_seeds = BUDGETS[preset], study.options.seeds or SEEDS[preset]
    base = llama.config(0, preset)
    model = replace(llama.model(budget.d_model, budget.n_layers), d_dense=4 * budget.d_model)
    base = replace(base, model=model, steps=budget.steps, optim=replace(base.optim, learning_rate=budget.rate))
    tokens = base.batch * base.eval_batches
    long = replace(
        base,
        steps=budget.long_steps,
        batch=budget.long_batch,
        eval_every=budget.long_steps // POINTS,
        probe_every=budget.long_steps // POINTS,
        eval_batches=max(1, tokens // (2 * budget.long_batch)),
        optim=replace(base.optim, learning_rate=budget.long_rate),
    )
    some = {name: change for name, change in BASE.items() if preset != "smoke" or name in SMOKE}
    found = []
    for config, variants in ((base, some), (long, LONG)):
        for name, change in variants.items():
            for seed in range(n_seeds):
                run = replace(config, seed=seed, data_seed=seed, optim=replace(config.optim, **change))
                found.append(_study.placed(study, f"{name}_seed{seed}", run))
    return found


def losses(trained: Mapping[str, Trained], names: Sequence[str], n_seeds: int) -> np.ndarray:
    """Validation losses at the end, [name, seed]; NaN for a run that is not there, failed or diverged."""
    found = np.full((len(names), n_seeds), np.nan)
    for i, name in enumerate(names):
        for seed in range(n_seeds):
            run = trained.get(f"{name}_seed{seed}")
            if run is not None and run.result.val_loss is not None:
                found[i, seed] = run.result.val_loss
    return found


class Course(NamedTuple):
    """The long runs' validation losses on their way."""

    steps: np.ndarray  # [point]
    loss: np.ndarray  # [decay and no_decay, seed, point], NaN for a failed run


def course(trained: Mapping[str, Trained], n_seeds: int) -> Course | None:
    """None if no long run has ended."""
    runs = {(i, seed): trained.get(f"{name}_seed{seed}") for i, name in enumerate(LONG) for seed in range(n_seeds)}
    known = {key: [r for r in run.rows if r.get("val_loss") is not None] for key, run in runs.items() if run is not None}
    if not known:
        return None
    steps = max(([r["step"] for r in rows] for rows in known.values()), key=len)
    loss = np.full((len(LONG), n_seeds, len(steps)), np.nan)
    for key, rows in known.items():
        loss[key][: len(rows)] = [r["val_loss"] for r in rows]
    return Course(np.array(steps), loss)


Verdict = Literal["pass", "fail", "untested"]


def better(*gaps: laws.Difference) -> Verdict:
    """Whether the second of each pair has the lower loss: "fail" if one of them has a higher one, "untested" if seeds do not
    tell."""
    if any(d.separated and d.value < 0 for d in gaps):
        return "fail"
    return "pass" if all(d.separated for d in gaps) else "untested"


def tie(gap: laws.Difference) -> Verdict:
    """Whether the two are not told apart, or by no more than the report's own ties are; "untested" without an error."""
    if not np.isfinite(gap.error):
        return "untested"
    return "fail" if gap.separated and abs(gap.value) > TIE else "pass"


def no_better(gap: laws.Difference) -> Verdict:
    """Whether the second of the pair does not have the lower loss; "untested" without an error."""
    if not np.isfinite(gap.error):
        return "untested"
    return "fail" if gap.separated and gap.value > 0 else "pass"


def said(*gaps: laws.Difference) -> str:
    """Gaps in words: a loss less another's, with 95% margins."""
    parts = []
    for d in gaps:
        if np.isnan(d.value):
            continue
        margin = f" ± {d.margin:.4f}" if np.isfinite(d.error) else ""
        parts.append(f"{d.sparsity} less {d.sparser}: {d.value:+.4f}{margin}")
    return "; ".join(parts) or "no pair of runs"


@dataclass(frozen=True)
class Found:
    """What the runs came to."""

    loss: np.ndarray  # [base variant, seed]
    course: Course | None
    random: list[Update]
    trained: list[Update]  # empty without the run
    weights: dict[str, list[tuple[int, float]]]  # decay or no_decay -> (step, RMS of the matrices)

    def gap(self, first: str, second: str) -> laws.Difference:
        """Loss of one base variant less another's."""
        return laws.difference(tuple(BASE), self.loss, first, second)

    def long_gap(self, share: float) -> tuple[int, laws.Difference] | None:
        """The step nearest to this share of the long runs, and the loss with decay less that without."""
        if self.course is None:
            return None
        at = int(np.abs(self.course.steps - share * self.course.steps[-1]).argmin())
        return int(self.course.steps[at]), laws.difference(tuple(LONG), self.course.loss[:, :, at], *LONG)


def claims(found: Found, preset: str) -> list[Claim]:
    """The verdicts. A smoke run bears out nothing about training."""
    made = [_steps(found), _size(found), *_sweep(found), *_modes(found), *_decay(found)]
    if preset == "smoke":
        trained = [c._replace(verdict="untested", measured=f"{c.measured} (a smoke run)") for c in made]
        return [c if c.number == "6" else t for c, t in zip(made, trained, strict=True)]
    return made


def _steps(found: Found) -> Claim:
    gap = found.gap(CHOSEN, "steps10")
    return Claim("5", "10 Newton-Schulz steps train no better than 5", said(gap), no_better(gap))


def _size(found: Found) -> Claim:
    text = "the update's RMS is about 0.2 for every shape, here 0.14 to 0.23"
    groups = {"random": found.random, "a trained run's": found.trained}
    spans = {name: (min(u.rms for u in group), max(u.rms for u in group)) for name, group in groups.items() if group}
    measured = "; ".join(f"{name} {low:.3f} to {high:.3f}" for name, (low, high) in spans.items())
    inside = all(WITHIN[0] <= low and high <= WITHIN[1] for low, high in spans.values())
    verdict = "fail" if not inside else "pass" if found.trained else "untested"
    return Claim("6", text, measured, verdict)


def _sweep(found: Found) -> list[Claim]:
    same = found.gap("rms0.2", "rms0.4")
    worse = [found.gap(bad, good) for bad in ("rms0.05", "rms0.8") for good in ("rms0.2", "rms0.4")]
    adamw = [found.gap("adamw", name) for name in MUON]
    return [
        Claim("7a", "an RMS of 0.2 and of 0.4 tie", said(same), tie(same)),
        Claim("7b", "0.05 and 0.8 are worse", said(*worse), better(*worse)),
        Claim("7c", "each beats AdamW at the same learning rate", said(*adamw), better(*adamw)),
    ]


def _modes(found: Found) -> list[Claim]:
    same = found.gap("update_norm", CHOSEN)
    worse = [found.gap("baseline", good) for good in (CHOSEN, "update_norm")]
    return [
        Claim("8a", "scaling by sqrt(max(n, m)) is as good as by the measured RMS", said(same), tie(same)),
        Claim(
            "8b", "scaling by sqrt(d_model) is worse where the feed-forward is 4 times as wide", said(*worse), better(*worse)
        ),
    ]


def _decay(found: Found) -> list[Claim]:
    texts = "without weight decay Muon is ahead early in a long run", "and behind at its end"
    early, late = found.long_gap(EARLY), found.long_gap(1.0)
    if early is None or late is None:
        return [Claim(f"9{x}", text, "no pair of runs", "untested") for x, text in zip("ab", texts, strict=True)]
    (step, ahead), (end, behind) = early, late
    behind = behind._replace(sparsity="no_decay", sparser="decay", value=-behind.value)
    return [
        Claim("9a", texts[0], f"step {step}: {said(ahead)}", better(ahead)),
        Claim("9b", texts[1], f"step {end}: {said(behind)}", better(behind)),
    ]


def main(options: Options) -> int:
    """Runs the study; returns the exit status."""
    study = _study.study("update_rms", options)
    runs = runs_of(study)
    n_seeds = options.seeds or SEEDS[options.preset]
    trained, corpus, errors = _study.train(study, runs)
    chosen = trained.get(f"{CHOSEN}_seed0")
    found = Found(
        losses(trained, tuple(BASE), n_seeds),
        course(trained, n_seeds),
        random_updates(runs[0].optim),
        trained_updates(chosen.config) if chosen else [],
        {name: weight_rms([run for key, run in trained.items() if key.startswith(f"{name}_seed")]) for name in LONG},
    )
    draw(study, found)
    findings = {
        "loss": dict(zip(BASE, found.loss, strict=True)),
        "learning_rate": BUDGETS[options.preset].rate,
        "long_learning_rate": BUDGETS[options.preset].long_rate,
        "long_loss": {} if found.course is None else dict(zip(LONG, found.course.loss, strict=True)),
        "long_steps": None if found.course is None else found.course.steps,
        "update_rms": {"random": [u._asdict() for u in found.random], "trained": [u._asdict() for u in found.trained]},
        "weight_rms": found.weights,
        "compile_share": compile_share(trained),
    }
    return _study.conclude(study, corpus, claims(found, options.preset), findings, errors)


def compile_share(trained: Mapping[str, Trained]) -> float:
    """Of the runs' time, what went into compilation."""
    spent = [run.result.seconds for run in trained.values()]
    return sum(s["compile"] for s in spent) / max(sum(sum(s.values()) for s in spent), 1e-9)


def draw(study: Study, found: Found) -> None:
    """Writes `figure.png`, a panel a claim."""
    preset = study.options.preset
    title = f"Muon's update: {preset}, {study.options.corpus} corpus, {found.loss.shape[1]} seeds"
    figure, axes = _figures.panels(2, 3, title)
    _draw_size(axes[0, 0], found)
    _draw_sweep(axes[0, 1], found, BUDGETS[preset].rate)
    _draw_gaps(axes[0, 2], found)
    _draw_course(axes[1, 0], found)
    _draw_decay(axes[1, 1], found)
    _draw_weights(axes[1, 2], found)
    _figures.save(figure, study.folder / "figure.png")


def mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of what is there; NaN where nothing is."""
    there = np.isfinite(values)
    return np.where(there, values, 0.0).sum(axis) / np.where(there.any(axis), there.sum(axis), np.nan)


def _draw_size(ax: Axes, found: Found) -> None:
    ax.axhspan(*WITHIN, color="0.93", lw=0, label="0.2 times singular values of 0.68 to 1.13")
    for updates, label, style in ((found.random, "random", "o"), (found.trained, "momentum of a trained run", "x")):
        ax.plot([max(u.n, u.m) for u in updates], [u.rms for u in updates], style, ms=6, label=label)
    raw = [u.rms / (0.2 * max(u.n, u.m) ** 0.5) for u in found.random]
    ax.plot([max(u.n, u.m) for u in found.random], raw, "s", color="0.5", ms=4, label="random, before scaling")
    ax.set(xscale="log", yscale="log", ylim=(0.02, 0.6))
    ax.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    ax.set_xticks([32, 128, 512], ["32", "128", "512"])
    ax.minorticks_off()
    _figures.dress(ax, "6: the update's RMS does not depend on shape", "larger side of the matrix", "RMS of the update")
    ax.legend(frameon=False, fontsize=8)


def _draw_sweep(ax: Axes, found: Found, rate: float) -> None:
    names = list(BASE)
    sweep = found.loss[[names.index(name) for name in MUON]]
    ax.plot(RMS, sweep, "o", color="C3", ms=4, alpha=0.5)
    ax.plot(RMS, mean(sweep, axis=1), "-", color="C3", label="Muon, mean over seeds")
    adamw = found.loss[names.index("adamw")]
    for loss in adamw[np.isfinite(adamw)]:
        ax.axhline(loss, color="C0", lw=0.7, alpha=0.5)
    ax.axhline(float(mean(adamw, axis=0)), color="C0", label="AdamW")
    ax.set_xscale("log")
    ax.set_xticks(RMS, [f"{rms:g}" for rms in RMS])
    ax.minorticks_off()
    _figures.dress(ax, f"7: one learning rate, {rate:g}, for all", "RMS of Muon's update", "validation loss (nats per token)")
    ax.legend(frameon=False, fontsize=8)


def _draw_gaps(ax: Axes, found: Found) -> None:
    labels = {"update_norm": "8: by measured RMS", "baseline": "8: by sqrt(d_model)", "steps10": "5: 10 steps"}
    for i, name in enumerate(labels):
        gap = found.gap(name, CHOSEN)
        each = found.loss[list(BASE).index(name)] - found.loss[list(BASE).index(CHOSEN)]
        ax.plot(np.full(len(each), i + 0.12), each, "o", color="C3", ms=4, alpha=0.5)
        ax.errorbar(i, gap.value, gap.margin if np.isfinite(gap.error) else None, fmt="o", color="k", ms=4, capsize=3)
    ax.axhline(0, color="0.6", lw=0.8, ls=":")
    ax.set_xticks(range(len(labels)), labels.values())
    ax.set_xlim(-0.5, len(labels) - 0.5)
    title = "5 and 8: against adjusted scale, 5 steps (95%; dots: seeds)"
    _figures.dress(ax, title, "", "validation loss less adjusted's (nats)")


def _draw_course(ax: Axes, found: Found) -> None:
    if found.course is not None:
        for i, (name, colour) in enumerate((("with decay 0.1", "C2"), ("without decay", "C1"))):
            ax.plot(found.course.steps, found.course.loss[i].T, color=colour, lw=0.8, alpha=0.4)
            ax.plot(found.course.steps, mean(found.course.loss[i], axis=0), color=colour, label=name)
        late = found.course.loss[:, :, len(found.course.steps) // 4 :]
        ax.set_ylim(np.nanmin(late) - 0.05, np.nanmax(late) + 0.1)
        ax.legend(frameon=False, fontsize=8)
    _figures.dress(ax, "9: a long run, every seed and the mean", "step", "validation loss (nats per token)")


def _draw_decay(ax: Axes, found: Found) -> None:
    if found.course is not None:
        gap = found.course.loss[1] - found.course.loss[0]
        ax.plot(found.course.steps, gap.T, color="C1", lw=0.8, alpha=0.4)
        ax.plot(found.course.steps, mean(gap, axis=0), color="C1")
        ax.axvline(EARLY * found.course.steps[-1], color="0.6", lw=0.8, ls="--")
        ax.set_ylim(*_span(gap[:, len(found.course.steps) // 8 :]))
    ax.axhline(0, color="0.6", lw=0.8, ls=":")
    title = "9: below 0 no decay is ahead; dashed: where early is read"
    _figures.dress(ax, title, "step", "loss without decay less with (nats)")


def _span(values: np.ndarray) -> tuple[float, float]:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return min(low, 0) - 0.01, max(high, 0) + 0.01


def _draw_weights(ax: Axes, found: Found) -> None:
    for name, label, colour in (("decay", "with decay 0.1", "C2"), ("no_decay", "without decay", "C1")):
        if points := found.weights.get(name):
            ax.plot(*zip(*points, strict=True), color=colour, label=label)
    ax.set_ylim(bottom=0)
    _figures.dress(ax, "9: the matrices of the long run", "step", "RMS of the weights")
    ax.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    _study.command_line(main, "update_rms", __doc__)
