"""QK-Clip does no harm: MuonClip with a tau so low that it fires, against Muon, on the same weights and batches (appendix D).

The claim, 18 in the list of the report's: clipping at tau = 30, far below K2's 100, changes neither the loss nor what the
model can do; the report shows it with one pair of runs (0.5B active parameters of 3B), whose validation curves coincide
(figure 12). Here the model of `configs/stress.py` is trained at a healthy learning rate with K2's weight decay, several seeds
with each rule; tau is low enough for most heads to meet it. A seed's two runs begin with the same weights and see the same
batches, so their difference is the clip's doing, and it is measured against how much the loss varies from seed to seed.
Claim 17, that clipping ends by itself, is read off the same runs.

    python -m experiments.clip_harmless                  6 minutes on two cores
    python -m experiments.clip_harmless --preset smoke   1 minute; shows that everything works, not the claim
    python -m experiments.clip_harmless --preset full    a day on two cores, or an accelerator
    python -m experiments.clip_harmless --seeds 8        more pairs; those already trained are read

It writes summary.json, with the paired gap, its standard error and the verdicts, and figure.png to the folder --out. A claim
that is not borne out is a result: the exit status is 0. A killed experiment goes on when the same command is given again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs import stress
from experiments import _figures, _heads
from experiments._study import Claim, Gap, Options, Trained, command_line, conclude, gap_of, placed, study, train
from k2jax.config import RunConfig

RULES = {"muon": "Muon", "muonclip": "MuonClip"}
COLOURS = {"muon": "tab:red", "muonclip": "tab:green"}
SEEDS = {"smoke": 2, "default": 5, "full": 5}
SILENT = 0.5  # of the steps, the last ones, in which no head is clipped; the report's are silent for 70%


class Pair(NamedTuple):
    """A seed trained by both rules."""

    muon: Trained
    clipped: Trained

    @property
    def gap(self) -> float:
        """Validation loss with the clip less that without, nats."""
        return self.clipped.result.val_loss - self.muon.result.val_loss


def plan(options: Options) -> dict[tuple[str, int], RunConfig]:
    """(rule, seed) -> its run; a seed changes weights and data order alike, the rule neither."""
    base = stress.healthy(options.preset)
    return {
        (rule, seed): replace(base, seed=seed, data_seed=seed, optim=replace(base.optim, rule=rule))
        for seed in range(options.seeds or SEEDS[options.preset])
        for rule in RULES
    }


def main(options: Options) -> int:
    """Runs the experiment; returns the exit status."""
    opened, runs = study("clip_harmless", options), plan(options)
    names = {key: f"{key[0]}_seed{key[1]}" for key in runs}
    trained, corpus, errors = train(opened, [placed(opened, names[key], config) for key, config in runs.items()])
    seeds = sorted({seed for _, seed in runs})
    found = [[trained.get(names[rule, seed]) for rule in RULES] for seed in seeds]
    pairs = [Pair(*both) for both in found if None not in both]
    if pairs:
        fired = _heads.last_fired(pairs[0].clipped.config)
        _figures.save(draw(pairs, fired, f"{options.preset}, corpus {corpus.tier}"), opened.folder / "figure.png")
    return conclude(opened, corpus, claims(pairs), findings(pairs), errors)


def measure(pairs: Sequence[Pair]) -> Gap:
    """What the clip does to the loss, against what seeds do to Muon's; from two pairs on."""
    return gap_of([pair.gap for pair in pairs], [pair.muon.result.val_loss for pair in pairs])


def claims(pairs: Sequence[Pair]) -> list[Claim]:
    """18 and 17, each with what was measured and its verdict; untested where the clip never fired."""
    return [_harmless(pairs), _ends(pairs)]


def _harmless(pairs: Sequence[Pair]) -> Claim:
    text = "clipping at a low tau leaves the loss where it is: the mean gap is below the spread of seeds"
    if len(pairs) < 2:
        return Claim("18", text, f"{len(pairs)} pairs of runs; a spread needs 2", "untested")
    shares = [pair.clipped.rows[-1]["heads_ever_clipped_share"] for pair in pairs]
    gap = measure(pairs)
    measured = (
        f"gap {gap.mean:+.4f} nats, standard error {gap.error:.4f}, 95%: {gap.low:+.4f} to {gap.high:+.4f}, "
        f"{len(pairs)} pairs; seeds spread by {gap.spread:.4f}; {min(shares):.0%} to {max(shares):.0%} of the heads clipped"
    )
    if min(shares) == 0:
        return Claim("18", text, measured, "untested")
    return Claim("18", text, measured, "pass" if abs(gap.mean) < gap.spread else "fail")


def _ends(pairs: Sequence[Pair]) -> Claim:
    text = f"clipping ends by itself: the last {SILENT:.0%} of the steps has none (the report: 70%)"
    last = [pair.clipped.rows[-1]["last_clip_step"] for pair in pairs]
    if None in last or not last:
        return Claim("17", text, "the clip never fired", "untested")
    steps = pairs[0].clipped.config.steps
    per_step = [np.mean([r["heads_clipped"] / r["heads"] for r in pair.clipped.rows[-steps // 10 :]]) for pair in pairs]
    measured = (
        f"last clip in step {', '.join(map(str, last))} of {steps}; {np.mean(per_step):.1%} of the heads a step at the end"
    )
    return Claim("17", text, measured, "pass" if max(last) <= (1 - SILENT) * steps else "fail")


def findings(pairs: Sequence[Pair]) -> dict:
    """What `summary.json` holds beside the claims."""
    gap = measure(pairs) if len(pairs) > 1 else None
    return {
        "gap": None if gap is None else gap._asdict(),
        "pairs": [_pair_as_json(pair) for pair in pairs],
        "learning_rate": pairs[0].muon.config.optim.learning_rate if pairs else None,
        "tau": pairs[0].muon.config.optim.qk_tau if pairs else None,
    }


def _pair_as_json(pair: Pair) -> dict:
    last = pair.clipped.rows[-1]
    return {
        "seed": pair.muon.config.seed,
        "gap": pair.gap,
        "val_loss": {rule: run.result.val_loss for rule, run in zip(RULES, pair, strict=True)},
        "val_loss_by_domain": {rule: run.result.val_loss_by_domain for rule, run in zip(RULES, pair, strict=True)},
        "largest_logit": {rule: float(np.nanmax(_heads.largest(run.rows))) for rule, run in zip(RULES, pair, strict=True)},
        "spikes": {rule: len(run.result.spikes) for rule, run in zip(RULES, pair, strict=True)},
        "seconds": {rule: run.result.seconds for rule, run in zip(RULES, pair, strict=True)},
        "heads": last["heads"],
        "heads_ever_clipped": last["heads_ever_clipped"],
        "last_clip_step": last["last_clip_step"],
    }


def draw(pairs: Sequence[Pair], fired: np.ndarray, title: str) -> Figure:
    """The figure: loss curves, their difference, largest logits, and which heads were clipped."""
    figure, axes = _figures.panels(2, 2, f"Muon with and without QK-Clip at a low tau: {title}")
    _draw_losses(axes[0, 0], pairs)
    _draw_logits(axes[0, 1], pairs)
    _draw_gap(axes[1, 0], pairs)
    _draw_fired(axes[1, 1], fired, pairs[0].clipped.config)
    return figure


def _validations(run: Trained) -> tuple[np.ndarray, np.ndarray]:
    found = [(r["step"], r["val_loss"]) for r in run.rows if r.get("val_loss") is not None]
    return np.array([step for step, _ in found]), np.array([loss for _, loss in found])


def _draw_losses(ax: Axes, pairs: Sequence[Pair]) -> None:
    for rule, runs in zip(RULES, zip(*pairs, strict=True), strict=True):
        style = "-" if rule == "muon" else "--"
        for i, run in enumerate(runs):
            label = f"{RULES[rule]}, {len(pairs)} seeds" if i == 0 else None
            ax.plot(*_validations(run), style, color=COLOURS[rule], lw=1.1, label=label)
    _figures.dress(ax, "Validation loss", "step", "next-token loss (nats a token)")
    _figures.legend(ax, "best")


def _draw_gap(ax: Axes, pairs: Sequence[Pair]) -> None:
    steps = _validations(pairs[0].muon)[0]
    losses = np.array([[_validations(run)[1] for run in pair] for pair in pairs])  # [pair, rule, step]
    gap = losses[:, 1] - losses[:, 0]
    for i, values in enumerate(gap):
        ax.plot(steps, values, color="0.6", lw=0.8, label="a seed" if i == 0 else None)
    ax.plot(steps, gap.mean(0), color="black", lw=1.6, label="mean")
    if len(pairs) > 1:
        spread = losses[:, 0].std(0, ddof=1)
        ax.fill_between(steps, -spread, spread, color="tab:red", alpha=0.15, lw=0, label="spread of Muon's seeds (1 s.d.)")
    ax.axhline(0, color="0.3", lw=0.8)
    _figures.dress(ax, "MuonClip less Muon, same seed", "step", "difference of validation loss (nats a token)")
    _figures.legend(ax, "best")


def _draw_logits(ax: Axes, pairs: Sequence[Pair]) -> None:
    for rule, runs in zip(RULES, zip(*pairs, strict=True), strict=True):
        for i, run in enumerate(runs):
            values = _heads.largest(run.rows)
            ax.plot(np.arange(len(values)) + 1, values, color=COLOURS[rule], lw=0.8, label=RULES[rule] if i == 0 else None)
    tau = pairs[0].muon.config.optim.qk_tau
    _figures.mark(ax, tau, f"tau = {tau:g}")
    ax.set_ylim(bottom=0)
    _figures.dress(ax, "Largest logit of all heads", "step", "largest attention logit")
    _figures.legend(ax, "best")


def _draw_fired(ax: Axes, fired: np.ndarray, config: RunConfig) -> None:
    """A square a head, its colour the step of its last clip, empty if it had none."""
    image = ax.imshow(np.ma.masked_equal(fired, 0), cmap="viridis", vmin=0, vmax=config.steps, aspect="auto")
    layers, heads = fired.shape
    ax.set_xticks(range(heads), range(1, heads + 1))
    ax.set_yticks(range(layers), range(1, layers + 1))
    ax.hlines(np.arange(1, layers) - 0.5, -0.5, heads - 0.5, color="0.85", lw=0.8)
    ax.vlines(np.arange(1, heads) - 0.5, -0.5, layers - 0.5, color="0.85", lw=0.8)
    share = f"{np.count_nonzero(fired)} of {fired.size} heads"
    ax.set_title(f"Step of a head's last clip, seed {config.seed}: {share}", fontsize=10, loc="left")
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    ax.figure.colorbar(image, ax=ax, label="step (white: never clipped)")


if __name__ == "__main__":
    command_line(main, "clip_harmless", __doc__)
