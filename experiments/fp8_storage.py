"""Does FP8 storage of activations change the loss? Runs that store them so against runs that keep them (report 2.4.3).

The claim, 25 in the list of the report's: inputs of the experts' up-projections and of SwiGLU, stored in FP8 (E4M3, a scale for
each 1 x 128) until the backward pass needs them, leave the training loss where it is. Here both norms' outputs, of which one is
the experts' input, and the shared experts' SwiGLU inputs are stored so; `more` stores everything so that a policy can name, the
layer's input included. The sweep's model with 64 experts is trained from several seeds in each way; runs of a seed see the same
weights and batches, so their difference is the rounding's doing, and it is measured against how much seeds differ.

    python -m experiments.fp8_storage                  6 minutes on two cores
    python -m experiments.fp8_storage --preset smoke   2 minutes; shows that everything works, not the claim
    python -m experiments.fp8_storage --preset full    4 hours on two cores

It writes summary.json, with the paired gaps and the verdict, and figure.png to the folder --out. A killed experiment goes on
when the same command is given again. What rounding is not tested here: that of the routed experts' own SwiGLU inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from configs import ladder
from experiments import _figures
from experiments._study import Claim, Gap, Options, Trained, command_line, conclude, gap_of, placed, study, train
from k2jax.config import ActivationConfig, RunConfig
from k2jax.parallel.activations import NAMES

WAYS = {
    "kept": ActivationConfig(policy="none"),
    "fp8": ActivationConfig(policy="none", norms="fp8", gates="fp8"),
    "more": ActivationConfig(policy="none", **dict.fromkeys(NAMES, "fp8")),
}
LABELS = {"fp8": "norms and gates", "more": "everything"}


class Size(NamedTuple):
    """A preset: a rung of the sweep's ladder of the preset `ladder`, and how many seeds."""

    ladder: str
    rung: int
    seeds: int


SIZES = {"smoke": Size("smoke", 0, 2), "default": Size("default", 0, 5), "full": Size("default", 2, 8)}


def plan(options: Options) -> dict[tuple[str, int], RunConfig]:
    """(way, seed) -> its run."""
    size = SIZES[options.preset]
    base = ladder.config(8, size.ladder, size.rung)
    return {
        (way, seed): replace(base, seed=seed, data_seed=seed, activations=policy)
        for seed in range(options.seeds or size.seeds)
        for way, policy in WAYS.items()
    }


def main(options: Options) -> int:
    """Runs the experiment; returns the exit status."""
    opened, runs = study("fp8_storage", options), plan(options)
    names = {key: f"{key[0]}_seed{key[1]}" for key in runs}
    trained, corpus, errors = train(opened, [placed(opened, names[key], config) for key, config in runs.items()])
    seeds = [s for s in sorted({seed for _, seed in runs}) if all(names[way, s] in trained for way in WAYS)]
    found = {way: [trained[names[way, seed]] for seed in seeds] for way in WAYS}
    if seeds:
        _figures.save(draw(found, f"{options.preset}, corpus {corpus.tier}"), opened.folder / "figure.png")
    gaps = gaps_of(found) if len(seeds) > 1 else {}
    losses = {way: [run.result.val_loss for run in of] for way, of in found.items()}
    findings = {"gaps": {way: gap._asdict() for way, gap in gaps.items()}, "val_loss": losses, "seeds": seeds}
    return conclude(opened, corpus, claims(gaps), findings, errors)


def gaps_of(found: Mapping[str, Sequence[Trained]]) -> dict[str, Gap]:
    """Way -> its validation loss less that of keeping, seed by seed."""
    losses = {way: np.array([run.result.val_loss for run in runs]) for way, runs in found.items()}
    return {way: gap_of(losses[way] - losses["kept"], losses["kept"]) for way in LABELS}


def claims(gaps: Mapping[str, Gap]) -> list[Claim]:
    """25, for each way of rounding."""
    found = []
    for number, way in (("25a", "fp8"), ("25b", "more")):
        text = f"FP8 storage of {LABELS[way]} leaves the loss where it is: the mean gap is below the spread of seeds"
        gap = gaps.get(way)
        if gap is None:
            found.append(Claim(number, text, "a spread needs 2 seeds", "untested"))
            continue
        measured = f"gap {gap.mean:+.4f} nats, 95%: {gap.low:+.4f} to {gap.high:+.4f}; seeds spread by {gap.spread:.4f}"
        found.append(Claim(number, text, measured, "pass" if abs(gap.mean) < gap.spread else "fail"))
    return found


def draw(found: Mapping[str, Sequence[Trained]], title: str) -> Figure:
    """Left the training losses, right how far FP8's are from those of keeping, seed by seed."""
    figure, axes = _figures.panels(1, 2, f"FP8 storage of activations: {title}")
    colours = {"kept": "black", "fp8": "tab:blue", "more": "tab:orange"}
    losses = {way: np.array([[row["loss"] for row in run.rows] for run in runs]) for way, runs in found.items()}
    steps = np.arange(losses["kept"].shape[1]) + 1
    for way, of in losses.items():
        axes[0, 0].plot(steps, of.mean(0), color=colours[way], lw=1.0, label=f"FP8: {LABELS[way]}" if way in LABELS else "kept")
    _figures.dress(axes[0, 0], f"Training loss, mean of {len(losses['kept'])} seeds", "step", "next-token loss (nats a token)")
    for way in LABELS:
        gap = losses[way] - losses["kept"]
        for i, values in enumerate(gap):
            axes[0, 1].plot(steps, values, color=colours[way], lw=0.7, label=f"FP8: {LABELS[way]}" if i == 0 else None)
    axes[0, 1].axhline(0, color="0.3", lw=0.8)
    _figures.dress(axes[0, 1], "Less that of keeping, same seed", "step", "difference of training loss (nats)")
    for ax in axes[0]:
        _figures.legend(ax, "best")
    return figure


if __name__ == "__main__":
    command_line(main, "fp8_storage", __doc__)
