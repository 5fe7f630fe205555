"""Times programs against each other: in turn within every round, so that what else the machine does meets all alike."""

import time
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp


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


def matmul_rate(rounds: int, dtype: str = "float32") -> float:
    """FLOP/s of a product of 1024 x 1024 matrices here, the best of the rounds."""
    a, product = jnp.ones((1024, 1024), dtype), jax.jit(jnp.dot)
    return 2 * 1024**3 / (1e-3 * min(interleaved({"product": lambda: product(a, a)}, rounds)["product"]))
