"""The learning rate as a function of tokens: warm-up, stable, decay, anneal (report 2.5)."""

import math

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from k2jax.config import OptimConfig


def learning_rate(config: OptimConfig, tokens: ArrayLike, total_tokens: ArrayLike) -> Float[Array, ""]:
    """Returns the learning rate once `tokens` of a run of `total_tokens` are consumed; both may be traced.

    The four phases of `config.schedule` are stretched to the run, so K2's own total puts their ends on K2's token counts.
    Counts are handled as float32, which leaves one part in ten million of the run. Tokens beyond the end keep the last rate.
    """
    s = config.schedule
    total = s.warmup + s.stable + s.decay + s.anneal
    decay_start, anneal_start = (s.warmup + s.stable) / total, (s.warmup + s.stable + s.decay) / total
    done = jnp.asarray(tokens, jnp.float32) / jnp.asarray(total_tokens, jnp.float32)

    rate = _progress(done, 0.0, s.warmup / total)
    if s.decay:
        u = _progress(done, decay_start, s.decay / total)
        shape = (1 - jnp.cos(math.pi * u)) / 2 if s.decay_shape == "cosine" else u
        rate = jnp.where(done < decay_start, rate, 1 - (1 - s.decay_to) * shape)
    if s.anneal:
        u = _progress(done, anneal_start, s.anneal / total)
        rate = jnp.where(done < anneal_start, rate, s.decay_to - (s.decay_to - s.anneal_to) * u)
    return config.learning_rate * rate


def _progress(done: Float[Array, ""], start: float, length: float) -> Float[Array, ""]:
    """How far into a phase, 0 to 1; a phase of no length is over."""
    return jnp.clip((done - start) / length, 0, 1) if length else jnp.ones_like(done)
