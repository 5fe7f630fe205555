"""Times programs against each other: in turn within every round, so that what else the machine does meets all alike."""

import time
from collections.abc import Callable, Hashable, Mapping

import jax


def interleaved(programs: Mapping[Hashable, Callable], rounds: int) -> dict[Hashable, list[float]]:
    """Milliseconds of every program in every round; each is a function of nothing and has run once before."""
    for run in programs.values():
        jax.block_until_ready(run())
    times: dict[Hashable, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.perf_counter() - start))
    return times
