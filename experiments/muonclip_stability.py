"""Attention logits explode under Muon, and QK-Clip holds them: one small MLA model under five rules (report 2.1, figure 2).

The model of `configs/stress.py` (4 layers of 8 heads) is trained at a learning rate several times too high and without weight
decay, so that logits grow as they do in the report at 9B active parameters. All runs see the same batches; they differ in the
rule alone: AdamW, Muon, Muon with a soft cap on the logits (tau * tanh(logit / tau)), MuonClip, and the naive clip, which
scales every head of a layer by the layer's worst. Updates match in size by construction (0.2 root mean square). AdamW and
Muon also run at a tenth of the rate, at which both learn best. The claims, as the list of the report's has them:

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

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
LOW = 0.1  # of the stress rate, for AdamW and Muon once more
SEEDS = {"smoke": 1, "default": 1, "full": 2}
FEW = 0.25  # share of the heads; twice the report's 12.7%
SILENT = 0.5  # of the steps, the last ones, in which no head is clipped; the report's are silent for 70%


Runs = dict[str, list[Trained]]  # arm -> over seeds; a key of ARMS, or one with "_low" at its end


def plan(options: Options) -> dict[tuple[str, int], RunConfig]:
    """(arm, seed) -> its run; a seed changes weights and data order alike, an arm neither."""
    low = () if options.preset == "smoke" else ("adamw_low", "muon_low")
    return {
        (arm, seed): _arm(replace(stress.config(options.preset), seed=seed, data_seed=seed), arm)
        for seed in range(options.seeds or SEEDS[options.preset])
        for arm in (*ARMS, *low)
    }


def _arm(base: RunConfig, name: str) -> RunConfig:
    arm, rate = name.removesuffix("_low"), base.optim.learning_rate * (LOW if name.endswith("_low") else 1)
    rule = arm if arm in ("adamw", "muon") else "muon" if arm == "softcap" else "muonclip"
    optim = replace(base.optim, rule=rule, qk_scope="layer" if arm == "naive" else "head", learning_rate=rate)
    cap = base.optim.qk_tau if arm == "softcap" else 0.0
    return replace(base, optim=optim, model=replace(base.model, attention=replace(base.model.attention, soft_cap=cap)))


def main(options: Options) -> int:
    """Runs the experiment; returns the exit status."""
    opened, planned = study("muonclip_stability", options), plan(options)
    names = {key: f"{key[0]}_seed{key[1]}" for key in planned}
    trained, corpus, errors = train(opened, [placed(opened, names[key], config) for key, config in planned.items()])
    runs: Runs = {arm: [] for arm in (*ARMS, "adamw_low", "muon_low")}
    for key, name in names.items():
        if name in trained:
            runs[key[0]].append(trained[name])
    by_hand = _heads.clip_by_hand(runs["muon"][0].config) if runs["muon"] else None
    if trained:
        _figures.save(draw(runs, f"{options.preset}, corpus {corpus.tier}"), opened.folder / "figure.png")
    return conclude(opened, corpus, claims(runs, by_hand), findings(runs, by_hand), errors)


def claims(runs: Runs, by_hand: _heads.ByHand | None) -> list[Claim]:
    """Every claim with what was measured and its verdict; untested where a run is missing or nothing happened."""
    return [
        _faster(runs),
        _faster_where_both_learn(runs),
        _explodes(runs["muon"]),
        _exact(by_hand),
        _bounded(runs["muonclip"]),
        _innocent(by_hand, runs["naive"]),
        _few(runs["muonclip"]),
        _ends(runs["muonclip"]),
        _spikes(runs),
        _soft_cap(runs["softcap"]),
    ]


def _claim(number: str, text: str, measured: str, holds: bool | None) -> Claim:
    return Claim(number, text, measured, "untested" if holds is None else "pass" if holds else "fail")


def _numbers(values: Iterable[float | int | None], form: str = "{:.0f}") -> str:
    """One value, or one a seed."""
    return ", ".join("never" if v is None else form.format(v) for v in values)


def _tau(run: Trained) -> float:
    return run.config.optim.qk_tau


def _faster(runs: Runs) -> Claim:
    """13 under stress: the step at which the largest logit passes tau."""
    text = "Muon drives the largest logit up faster than AdamW, at one learning rate"
    pairs = list(zip(runs["muon"], runs["adamw"], strict=False))
    if not pairs:
        return _claim("13a", text, "no pair of runs", None)
    passed = [[_heads.first_above(_heads.largest(run.rows), _tau(run)) for run in pair] for pair in pairs]
    measured = f"tau is passed at step {_numbers(m for m, _ in passed)} (Muon), {_numbers(a for _, a in passed)} (AdamW)"
    measured = f"{measured}; {_losses(pairs)}"
    if any(m is None and a is None for m, a in passed):
        return _claim("13a", text, measured, None)
    return _claim("13a", text, measured, all(m is not None and (a is None or m < a) for m, a in passed))


def _faster_where_both_learn(runs: Runs) -> Claim:
    """13 at the low rate: the largest logit at the end."""
    text = f"the same at {LOW:g} of that rate, where both learn"
    pairs = list(zip(runs["muon_low"], runs["adamw_low"], strict=False))
    if not pairs:
        return _claim("13b", text, "no pair of runs", None)
    ends = [[_heads.settled(_heads.largest(run.rows)) for run in pair] for pair in pairs]
    measured = f"at the end {_numbers(m for m, _ in ends)} (Muon), {_numbers(a for _, a in ends)} (AdamW); {_losses(pairs)}"
    return _claim("13b", text, measured, all(m > a for m, a in ends))


def _losses(pairs: Sequence[tuple[Trained, Trained]]) -> str:
    losses = [_numbers((run.result.val_loss for run in arm), "{:.2f}") for arm in zip(*pairs, strict=True)]
    return f"validation {losses[0]} and {losses[1]} nats"


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
    if not runs["muonclip"]:
        return _claim("19", text, "no run", None)
    count = {arm: sum(len(run.result.spikes) for run in found) for arm, found in runs.items() if found}
    measured = ", ".join(f"{arm} {n}" for arm, n in count.items())
    skipped = sum(run.result.skipped_steps for run in runs["muonclip"])
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
    return {
        "runs": [_run_as_json(run) for found in runs.values() for run in found],
        "clip_by_hand": None if by_hand is None else by_hand._asdict(),
        "naive_collateral_share": [collateral(run) for run in runs["naive"]],
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


def draw(runs: Runs, title: str) -> Figure:
    """The figure: largest logits, heads at the clip, losses, and logits at the low rate."""
    figure, axes = _figures.panels(2, 2, f"Attention logits under five rules: {title}")
    _draw_logits(axes[0, 0], runs)
    _draw_heads(axes[0, 1], runs)
    _draw_losses(axes[1, 0], runs)
    _draw_low(axes[1, 1], runs)
    return figure


def _curves(ax: Axes, found: Sequence[Trained], values, arm: str, label: str) -> None:
    """A curve a seed over the steps, one of them labelled."""
    for i, run in enumerate(found):
        steps = np.arange(len(run.rows)) + 1
        ax.plot(steps, values(run), color=COLOURS[arm], lw=1.1, label=label if i == 0 else None)


def _draw_logits(ax: Axes, runs: Runs) -> None:
    for arm, label in ARMS.items():
        _curves(ax, runs[arm], lambda run: _heads.largest(run.rows), arm, label)
    config = next(run.config for found in runs.values() for run in found)
    tau = config.optim.qk_tau
    for level, name in ((tau, f"tau = {tau:g}"), (10 * tau, "10 tau")):
        _figures.mark(ax, level, name)
    ax.set_yscale("log")
    ax.set_ylim(bottom=tau / 100)
    title = f"Largest logit of all heads, learning rate {config.optim.learning_rate:g}"
    _figures.dress(ax, title, "step", "largest attention logit (log scale)")
    _figures.legend(ax, "lower right")


def _draw_heads(ax: Axes, runs: Runs) -> None:
    for arm, scope, name in (("muonclip", "head", "MuonClip"), ("naive", "layer", "naive")):

        def share(run: Trained, scope=scope) -> np.ndarray:
            return 100 * _figures.smooth(_heads.scaled(run.rows, _tau(run), scope) / run.rows[-1]["heads"], 15)

        _curves(ax, runs[arm], share, arm, f"{name}: scaled in a step")
    for i, run in enumerate(runs["muonclip"]):
        ever = 100 * np.array([r["heads_ever_clipped_share"] for r in run.rows])
        label = "MuonClip: ever scaled" if i == 0 else None
        ax.plot(np.arange(len(ever)) + 1, ever, color=COLOURS["muonclip"], lw=1.4, ls="--", label=label)
    _figures.mark(ax, 12.7, "the report: 12.7% ever")
    ax.set_ylim(-2, 102)
    _figures.dress(ax, "Heads that the clip scales (mean of the last 15 steps)", "step", "share of all heads (%)")
    _figures.legend(ax, "upper left")


def _draw_losses(ax: Axes, runs: Runs) -> None:
    for arm in ARMS:
        _curves(ax, runs[arm], _loss, arm, f"{ARMS[arm].split(' (')[0]}: {_validation(runs[arm])}")
    _figures.dress(ax, "Training loss (mean of the last 15 steps)", "step", "next-token loss (nats a token)")
    _figures.legend(ax, "upper right")


def _draw_low(ax: Axes, runs: Runs) -> None:
    for arm in ("adamw", "muon"):
        found = runs[f"{arm}_low"]
        _curves(ax, found, lambda run: _heads.largest(run.rows), arm, f"{ARMS[arm]}: {_validation(found)}")
    _figures.dress(ax, f"Largest logit at {LOW:g} of the learning rate", "step", "largest attention logit")
    _figures.legend(ax, "upper left")


def _loss(run: Trained) -> np.ndarray:
    return _figures.smooth(np.array([np.nan if r["loss"] is None else r["loss"] for r in run.rows]), 15)


def _validation(found: Sequence[Trained]) -> str:
    return f"validation {np.mean([run.result.val_loss for run in found]):.2f}" if found else ""


if __name__ == "__main__":
    command_line(main, "muonclip_stability", __doc__)
