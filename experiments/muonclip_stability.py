"""Attention logits explode under Muon, and QK-Clip holds them: one small MLA model under five rules (report 2.1, figure 2).

The model of `configs/stress.py` (4 layers of 8 heads) is trained at a learning rate several times too high and without weight
decay, so that logits grow as they do in the report at 9B active parameters. All runs see the same batches; they differ in the
rule alone: AdamW, Muon, Muon with a soft cap on the logits (tau * tanh(logit / tau)), MuonClip, and the naive clip, which
scales every head of a layer by the layer's worst. Updates match in size by construction (0.2 root mean square). AdamW and
Muon also run at lower rates, since one that suits both does not exist. The claims, as the list of the report's has them:

13  Muon drives the largest logit up faster than AdamW.
14  Without a clip it passes 10 tau (the report: 1000 at tau = 100; its scale stays untested here).
15  After the clip the same batch gives min(S, tau), and so the largest logit stays within 1.3 tau.
16  Few heads need it, and the clip by head leaves the others alone.
17  An eighth of all heads is ever clipped, none in the last part of training.
19  There are no loss spikes with MuonClip.
34  A soft cap bounds what the softmax sees, and the logits below it go on growing.

    python -m experiments.muonclip_stability                  8 minutes on two cores
    python -m experiments.muonclip_stability --preset smoke   1 minute; shows that everything works, not the claims
    python -m experiments.muonclip_stability --preset full    a day on two cores, or an accelerator; three seeds

It writes summary.json, with every claim's measured value and verdict, and figure.png to the folder --out. A claim that is not
borne out is a result: the exit status is 0. A killed experiment goes on where it was when the same command is given again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from configs import stress
from experiments import _figures, _heads
from experiments._study import Claim, Options, Trained, command_line, conclude, placed, study, train
from k2jax.config import RunConfig

ARMS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "softcap": "Muon, soft cap (logit before it)",
    "naive": "MuonClip by layer (naive)",
    "muonclip": "MuonClip",
}
COLOURS = {"adamw": "tab:blue", "muon": "tab:red", "softcap": "tab:orange", "naive": "tab:purple", "muonclip": "tab:green"}
FRACTIONS = {"smoke": (1.0,), "default": (1.0, 0.3, 0.1), "full": (1.0, 0.3, 0.1)}  # of the stress rate, for AdamW and Muon
SEEDS = {"smoke": 1, "default": 1, "full": 2}
FEW = 0.25  # share of the heads; twice the report's 12.7%
SILENT = 0.5  # of the steps, the last ones, in which no head is clipped; the report's are silent for 70%


class Runs(NamedTuple):
    """The runs that have ended."""

    arms: dict[str, list[Trained]]  # under stress, over seeds
    rates: dict[tuple[str, float], list[Trained]]  # (rule, fraction of the stress rate) -> over seeds


def plan(options: Options) -> dict[tuple[str, float, int], RunConfig]:
    """(arm, fraction of the stress rate, seed) -> its run; a seed changes weights and data order alike, an arm neither."""
    runs = {}
    for seed in range(options.seeds or SEEDS[options.preset]):
        base = replace(stress.config(options.preset), seed=seed, data_seed=seed)
        for arm in ARMS:
            for fraction in FRACTIONS[options.preset] if arm in ("adamw", "muon") else (1.0,):
                runs[arm, fraction, seed] = _arm(base, arm, fraction)
    return runs


def _arm(base: RunConfig, arm: str, fraction: float) -> RunConfig:
    rule = arm if arm in ("adamw", "muon") else "muon" if arm == "softcap" else "muonclip"
    scope = "layer" if arm == "naive" else "head"
    optim = replace(base.optim, rule=rule, qk_scope=scope, learning_rate=fraction * base.optim.learning_rate)
    cap = base.optim.qk_tau if arm == "softcap" else 0.0
    return replace(base, optim=optim, model=replace(base.model, attention=replace(base.model.attention, soft_cap=cap)))


def main(options: Options) -> int:
    """Runs the experiment; returns the exit status."""
    opened = study("muonclip_stability", options)
    keys = {}
    for (arm, fraction, seed), config in plan(options).items():
        keys[f"{arm}_rate{config.optim.learning_rate:.2g}_seed{seed}"] = (arm, fraction, seed), config
    trained, corpus, errors = train(opened, [placed(opened, name, config) for name, (_, config) in keys.items()])
    runs = collect({key: trained[name] for name, (key, _) in keys.items() if name in trained})
    by_hand = _heads.clip_by_hand(runs.arms["muon"][0].config) if runs.arms["muon"] else None
    if any(runs.arms.values()):
        _figures.save(draw(runs, f"{options.preset}, corpus {corpus.tier}"), opened.folder / "figure.png")
    return conclude(opened, corpus, claims(runs, by_hand), findings(runs, by_hand), errors)


def collect(trained: dict[tuple[str, float, int], Trained]) -> Runs:
    """Sorts runs by what they are compared for."""
    arms = {arm: [run for (a, f, _), run in trained.items() if a == arm and f == 1] for arm in ARMS}
    rates: dict[tuple[str, float], list[Trained]] = {}
    for (arm, fraction, _), run in trained.items():
        if arm in ("adamw", "muon"):
            rates.setdefault((arm, fraction), []).append(run)
    return Runs(arms, rates)


def claims(runs: Runs, by_hand: _heads.ByHand | None) -> list[Claim]:
    """Every claim with what was measured and its verdict; untested where a run is missing or nothing happened."""
    return [
        _same_rate(runs),
        _best_rate(runs),
        _explodes(runs.arms["muon"]),
        _exact(by_hand),
        _bounded(runs.arms["muonclip"]),
        _innocent(by_hand, runs.arms["naive"]),
        _few(runs.arms["muonclip"]),
        _ends(runs.arms["muonclip"]),
        _spikes(runs),
        _soft_cap(runs.arms["softcap"]),
    ]


def _claim(number: str, text: str, measured: str, holds: bool | None) -> Claim:
    return Claim(number, text, measured, "untested" if holds is None else "pass" if holds else "fail")


def _numbers(values: Iterable[float | int | None], form: str = "{:.0f}") -> str:
    """One value, or one a seed."""
    return ", ".join("never" if v is None else form.format(v) for v in values)


def _tau(run: Trained) -> float:
    return run.config.optim.qk_tau


def _same_rate(runs: Runs) -> Claim:
    """13 at one rate: the step at which the largest logit passes tau."""
    text = "Muon drives the largest logit up faster than AdamW, at one learning rate"
    pairs = list(zip(runs.arms["muon"], runs.arms["adamw"], strict=False))
    if not pairs:
        return _claim("13a", text, "no pair of runs", None)
    passed = [[_heads.first_above(_heads.largest(run.rows), _tau(run)) for run in pair] for pair in pairs]
    losses = [_numbers((_loss(run) for run in arm), "{:.2f}") for arm in (runs.arms["muon"], runs.arms["adamw"])]
    measured = (
        f"tau is passed at step {_numbers(m for m, _ in passed)} (Muon), {_numbers(a for _, a in passed)} (AdamW); "
        f"validation {losses[0]} and {losses[1]} nats"
    )
    if any(m is None and a is None for m, a in passed):
        return _claim("13a", text, measured, None)
    return _claim("13a", text, measured, all(m is not None and (a is None or m < a) for m, a in passed))


def _best_rate(runs: Runs) -> Claim:
    """13 where both rules learn: the largest logit at the end, each rule at its best rate of the grid."""
    text = "the same, each rule at the learning rate where its loss is lowest"
    best = {rule: best_rate(runs, rule) for rule in ("muon", "adamw")}
    grid = {rule: sum(r == rule for r, _ in runs.rates) for rule in best}
    if min(grid.values()) < 2:
        return _claim("13b", text, "one learning rate alone", None)
    ends = {rule: [_heads.settled(_heads.largest(run.rows)) for run in best[rule]] for rule in best}
    measured = "; ".join(
        f"{ARMS[rule]} at {found[0].config.optim.learning_rate:g} ends at {_numbers(ends[rule])}, "
        f"validation {_numbers(map(_loss, found), '{:.2f}')}"
        for rule, found in best.items()
    )
    return _claim("13b", text, measured, min(ends["muon"]) > max(ends["adamw"]))


def best_rate(runs: Runs, rule: str) -> list[Trained]:
    """The runs of a rule at the learning rate whose mean validation loss is lowest."""
    found = [seeds for (r, _), seeds in runs.rates.items() if r == rule]
    return min(found, key=lambda seeds: np.mean([_loss(run) for run in seeds]), default=[])


def _loss(run: Trained) -> float:
    return run.result.val_loss


def _explodes(muon: Sequence[Trained]) -> Claim:
    text = "without a clip the largest logit passes 10 tau (the report's 1000; its scale is not tested)"
    if not muon:
        return _claim("14", text, "no run", None)
    peaks = [np.nanmax(_heads.largest(run.rows)) / _tau(run) for run in muon]
    return _claim("14", text, f"{_numbers(peaks, '{:.1f}')} tau", min(peaks) > 10)


def _exact(by_hand: _heads.ByHand | None) -> Claim:
    text = "after the clip the same batch gives min(S, tau), head by head (1e-5)"
    if by_hand is None or not by_hand.above:
        return _claim("15a", text, "no head above tau", None)
    measured = (
        f"{by_hand.above} of {by_hand.heads} heads above tau, up to {by_hand.largest:.0f}: off by {by_hand.error:.0e} at most, "
        f"a layer at a time; all layers at once {by_hand.together:.1f}"
    )
    return _claim("15a", text, measured, by_hand.error <= 1e-5)


def _bounded(clipped: Sequence[Trained]) -> Claim:
    text = "so the largest logit stays within 1.3 tau after the first clip"
    after = [_heads.largest(run.rows)[first:] / _tau(run) for run in clipped if (first := _first_clip(run))]
    after = [values for values in after if values.size]
    if not after:
        return _claim("15b", text, "the clip never fired", None)
    peaks = [np.max(values) for values in after]  # nan, a logit that is not finite, is no pass
    over = [np.mean(values > 1.3) for values in after]
    measured = f"{_numbers(peaks, '{:.2f}')} tau at most; {_numbers(over, '{:.1%}')} of the steps above 1.3"
    return _claim("15b", text, measured, bool(max(peaks) <= 1.3))


def _first_clip(run: Trained) -> int | None:
    return _heads.first_above(_heads.scaled(run.rows, _tau(run), "head"), 0)


def _innocent(by_hand: _heads.ByHand | None, naive: Sequence[Trained]) -> Claim:
    """16, first half: what the two clips do to heads at or below tau."""
    text = "the clip by head leaves heads at or below tau alone, the naive one does not"
    if by_hand is None or not by_hand.above or by_hand.above == by_hand.heads:
        return _claim("16a", text, "not both kinds of heads", None)
    innocent = by_hand.heads - by_hand.above
    measured = f"by head: {by_hand.untouched} of {innocent} keep their bits"
    shares = [share for run in naive if (share := collateral(run)) is not None]
    if not shares:
        return _claim("16a", text, measured + "; the naive clip never fired", None)
    measured += f"; naive: {_numbers(shares, '{:.0%}')} of the heads it scaled were at or below tau"
    return _claim("16a", text, measured, by_hand.untouched == innocent and min(shares) > 0)


def collateral(naive: Trained) -> float | None:
    """Of the heads that the naive clip scaled, over all steps, the share that was at or below tau; None if it never fired."""
    all_of_them, above = (_heads.scaled(naive.rows, _tau(naive), scope).sum() for scope in ("layer", "head"))
    return 1 - above / all_of_them if all_of_them else None


def _few(clipped: Sequence[Trained]) -> Claim:
    text = f"few heads need it: at most {FEW:.0%} are ever clipped"
    if not any(map(_first_clip, clipped)):
        return _claim("16b", text, "the clip never fired", None)
    shares = [run.rows[-1]["heads_ever_clipped_share"] for run in clipped]
    return _claim("16b", text, f"{_numbers(shares, '{:.0%}')} of {clipped[0].rows[-1]['heads']} heads", max(shares) <= FEW)


def _ends(clipped: Sequence[Trained]) -> Claim:
    text = f"clipping ends by itself: the last {SILENT:.0%} of the steps has none (the report: 12.7% of heads, 70%)"
    if not any(map(_first_clip, clipped)):
        return _claim("17", text, "the clip never fired", None)
    last = [run.rows[-1]["last_clip_step"] or 0 for run in clipped]
    steps = clipped[0].config.steps
    return _claim("17", text, f"first step {_numbers(map(_first_clip, clipped))}, last {_numbers(last)} of {steps}",
                  max(last) <= (1 - SILENT) * steps)  # fmt: skip


def _spikes(runs: Runs) -> Claim:
    text = "no loss spikes with MuonClip"
    if not runs.arms["muonclip"]:
        return _claim("19", text, "no run", None)
    count = {arm: sum(len(run.result.spikes) for run in found) for arm, found in runs.arms.items() if found}
    measured = ", ".join(f"{arm} {n}" for arm, n in count.items())
    skipped = sum(run.result.skipped_steps for run in runs.arms["muonclip"])
    return _claim("19", text, measured, count["muonclip"] == skipped == 0)


def _soft_cap(capped: Sequence[Trained]) -> Claim:
    text = "under a soft cap the logits before it go on growing"
    if not capped:
        return _claim("34", text, "no run", None)
    values = [_heads.largest(run.rows) / _tau(run) for run in capped]
    quarters = [[np.median(q) for q in np.array_split(v, 4)] for v in values]
    measured = f"medians of quarters: {'; '.join(_numbers(q, '{:.1f}') for q in quarters)} tau"
    if any(q[3] <= 1 for q in quarters):
        return _claim("34", text, f"{measured}: the cap was hardly reached", None)
    return _claim("34", text, measured, all(q[1] < q[2] < q[3] for q in quarters))


def findings(runs: Runs, by_hand: _heads.ByHand | None) -> dict:
    """What `summary.json` holds beside the claims."""
    every = {run.config.name: run for found in (*runs.arms.values(), *runs.rates.values()) for run in found}
    return {
        "runs": [_run_as_json(run) for run in every.values()],
        "clip_by_hand": None if by_hand is None else by_hand._asdict(),
        "naive_collateral_share": [collateral(run) for run in runs.arms["naive"]],
    }


def _run_as_json(run: Trained) -> dict:
    values, last = _heads.largest(run.rows), run.rows[-1]
    return {
        "name": run.config.name,
        "rule": run.config.optim.rule,
        "scope": run.config.optim.qk_scope,
        "soft_cap": run.config.model.attention.soft_cap,
        "learning_rate": run.config.optim.learning_rate,
        "seed": run.config.seed,
        "tau": _tau(run),
        "largest_logit": float(np.nanmax(values)),
        "largest_logit_at_end": _heads.settled(values),
        "step_past_tau": _heads.first_above(values, _tau(run)),
        "heads_ever_clipped_share": last["heads_ever_clipped_share"],
        "last_clip_step": last["last_clip_step"],
        "train_loss": run.result.train_loss,
        "val_loss": run.result.val_loss,
        "spikes": run.result.spikes,
        "skipped_steps": run.result.skipped_steps,
        "seconds": run.result.seconds,
    }


def draw(runs: Runs, title: str):
    """The figure: largest logits, heads at the clip, losses, and logits against the learning rate."""
    figure, axes = _figures.panels(2, 2, f"Attention logits under five rules: {title}")
    some = next(run for found in runs.arms.values() for run in found)
    _draw_logits(axes[0, 0], runs, _tau(some))
    _draw_heads(axes[0, 1], runs)
    _draw_losses(axes[1, 0], runs)
    _draw_rates(axes[1, 1], runs, _tau(some))
    return figure


def _draw_logits(ax, runs: Runs, tau: float) -> None:
    for arm, found in runs.arms.items():
        for i, run in enumerate(found):
            values = _heads.largest(run.rows)
            ax.plot(np.arange(len(values)) + 1, values, color=COLOURS[arm], lw=1.1, label=ARMS[arm] if i == 0 else None)
    for level, name in ((tau, f"tau = {tau:g}"), (10 * tau, "10 tau")):
        _figures.mark(ax, level, name)
    ax.set_yscale("log")
    ax.set_ylim(bottom=tau / 100)
    rate = next(run for found in runs.arms.values() for run in found).config.optim.learning_rate
    _figures.dress(ax, f"Largest logit of all heads, learning rate {rate:g}", "step", "largest attention logit (log scale)")
    _figures.legend(ax, "lower right")


def _draw_heads(ax, runs: Runs) -> None:
    for arm, scope, name in (("muonclip", "head", "MuonClip"), ("naive", "layer", "naive")):
        for i, run in enumerate(runs.arms[arm]):
            heads, steps = run.rows[-1]["heads"], np.arange(len(run.rows)) + 1
            share = _figures.smooth(_heads.scaled(run.rows, _tau(run), scope) / heads, 15)
            ax.plot(steps, 100 * share, color=COLOURS[arm], lw=1.1, label=f"{name}: scaled in a step" if i == 0 else None)
            ever = 100 * np.array([r["heads_ever_clipped_share"] for r in run.rows])
            if scope == "head":
                label = f"{name}: ever scaled" if i == 0 else None
                ax.plot(steps, ever, color=COLOURS[arm], lw=1.4, ls="--", label=label)
    _figures.mark(ax, 12.7, "the report: 12.7% ever")
    ax.set_ylim(-2, 102)
    _figures.dress(ax, "Heads that the clip scales (mean of the last 15 steps)", "step", "share of all heads (%)")
    _figures.legend(ax, "upper left")


def _draw_losses(ax, runs: Runs) -> None:
    for arm, found in runs.arms.items():
        for i, run in enumerate(found):
            loss = np.array([np.nan if r["loss"] is None else r["loss"] for r in run.rows])
            name = ARMS[arm].split(" (")[0]
            label = f"{name}: validation {np.mean([_loss(r) for r in found]):.2f}" if i == 0 else None
            ax.plot(np.arange(len(loss)) + 1, _figures.smooth(loss, 15), color=COLOURS[arm], lw=1.1, label=label)
    _figures.dress(ax, "Training loss (mean of the last 15 steps)", "step", "next-token loss (nats a token)")
    _figures.legend(ax, "upper right")


def _draw_rates(ax, runs: Runs, tau: float) -> None:
    for rule in ("adamw", "muon"):
        found = sorted((f, seeds) for (r, f), seeds in runs.rates.items() if r == rule)
        rate = [seeds[0].config.optim.learning_rate for _, seeds in found]
        ends = [np.mean([_heads.settled(_heads.largest(run.rows)) for run in seeds]) for _, seeds in found]
        ax.plot(rate, ends, "o-", color=COLOURS[rule], label=ARMS[rule])
        for x, y, (_, seeds) in zip(rate, ends, found, strict=True):
            text = f"{np.mean([_loss(run) for run in seeds]):.2f}"
            side = (0, 7) if rule == "adamw" else (0, -15)
            ax.annotate(text, (x, y), side, textcoords="offset points", fontsize=8, ha="center", color=COLOURS[rule])
    _figures.mark(ax, tau, f"tau = {tau:g}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.15, 0.2)
    _figures.dress(
        ax, "Logit at the end, with validation loss (nats)", "learning rate (log scale)", "largest logit (log scale)"
    )
    _figures.legend(ax, "upper left")


if __name__ == "__main__":
    command_line(main, "muonclip_stability", __doc__)
