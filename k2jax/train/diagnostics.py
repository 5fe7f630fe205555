"""What a run's metrics say about its health: loss spikes, starved data, dead or overloaded experts, heads at the clip."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from k2jax.config import RunConfig

WINDOW = 64  # steps whose losses tell the noise
LEVEL = 9  # steps whose median is what to expect of the next: few, so that a falling loss is not far below it
WARM = 16  # steps before there is enough to tell
Z = 7.0  # robust standard deviations above the expected loss; one in 1e11 for normal noise
FLOOR = 2e-3  # least standard deviation, as a share of the loss: a noiseless curve has no spikes at rounding


class Spike(NamedTuple):
    """A stretch of steps whose loss left its trend upwards."""

    start: int  # first step, counted from 1
    end: int  # last step
    peak: float | None  # largest loss, nats; None if not finite
    z: float | None  # robust standard deviations of the peak above its expectation; None if not finite


def find_spikes(losses: Sequence[float | None]) -> list[Spike]:
    """Finds the spikes in the unsmoothed losses of steps 1, 2, ...; None or nan is a step whose loss was not finite.

    The expected loss is the median of the last `LEVEL` losses that were no spike; the noise comes from the median absolute
    deviation of successive differences over `WINDOW`, which a trend does not inflate. A falling loss lies below its past
    median, so decay cannot raise a flag.
    """
    values = np.array([np.nan if x is None else x for x in losses], np.float64)
    scores = np.full(len(values), -np.inf)
    past: list[float] = []
    for i, value in enumerate(values):
        if not np.isfinite(value):
            scores[i] = np.inf
            continue
        if len(past) >= WARM:
            scores[i] = _score(value, np.array(past))
        if scores[i] <= Z:
            past = [*past[1 - WINDOW :], value]
    return [_spike(values, scores, first, last) for first, last in _stretches(scores > Z)]


def _score(value: float, past: np.ndarray) -> float:
    level = np.median(past[-LEVEL:])
    change = np.diff(past)
    deviation = np.median(np.abs(change - np.median(change))) / 0.6745  # of a normal distribution with that median
    noise = deviation / np.sqrt(2)  # a change is the difference of two losses
    return float((value - level) / max(noise, FLOOR * abs(level), 1e-12))


def _stretches(flags: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(int)))
    return [(int(a), int(b) - 1) for a, b in edges.reshape(-1, 2)]


def _spike(values: np.ndarray, scores: np.ndarray, first: int, last: int) -> Spike:
    stretch = slice(first, last + 1)
    known = np.isfinite(values[stretch]).all()
    peak, z = (float(values[stretch].max()), float(scores[stretch].max())) if known else (None, None)
    return Spike(first + 1, last + 1, peak, z)


def diagnose(config: RunConfig, rows: Sequence[dict]) -> list[str]:
    """What is amiss in a run's rows of metrics, one sentence each; empty for a healthy run."""
    if not rows:
        return []
    found = []
    if spikes := find_spikes([r["loss"] for r in rows]):
        steps = ", ".join(str(s.start) for s in spikes[:5]) + (", ..." if len(spikes) > 5 else "")
        found.append(f"the loss spiked {len(spikes)} time(s), first at step {steps}")
    if skipped := rows[-1]["skips_total"]:
        found.append(f"{skipped} step(s) had a gradient that was not finite and were skipped")
    waited, spent = sum(r["data_wait"] for r in rows), sum(r["seconds"] for r in rows)
    if waited > 0.05 * spent:
        found.append(f"the steps waited for data {waited / spent:.0%} of the time; raise data.workers or data.prefetch")
    late = rows[-max(1, len(rows) // 10) :]  # balance takes a while to settle
    for stack in rows[-1]["load_imbalance"]:
        worst = np.mean([r["load_imbalance"][stack] for r in late], axis=0)
        idle = np.min([r["idle_experts"][stack] for r in late], axis=0)
        layer = int(worst.argmax())
        if worst[layer] > 4:
            found.append(
                f"layer {layer} of {stack} is unbalanced: its busiest expert has {worst[layer]:.1f} times the mean load"
            )
        if idle.max():
            layer = int(idle.argmax())
            found.append(f"layer {layer} of {stack} has {idle[layer]} expert(s) that no token of the last steps chose")
    top = max((x for layers in rows[-1]["max_logit"].values() for x in layers if x is not None), default=0.0)
    if top > config.optim.qk_tau:
        found.append(f"attention logits end above the clip threshold: {top:.0f} against optim.qk_tau={config.optim.qk_tau:g}")
    return found
