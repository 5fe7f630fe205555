"""The next token from logits: greedy, or drawn at a temperature from the likeliest (top-k, top-p, min-p).

A draw depends on the sequence's seed and on the token's place in it alone, not on what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sequence's tokens are chosen. The three limits apply in the order of the fields, each to what the last one left."""

    temperature: float = 0.6  # logits are divided by it; 0 takes the likeliest token. 0.6 is advised for K2
    top_k: int = 0  # only so many of the likeliest tokens; 0 is all
    top_p: float = 1.0  # only the fewest of the likeliest tokens that have this probability together
    min_p: float = 0.0  # only tokens with at least this share of the likeliest one's probability
    seed: int = 0

    def __post_init__(self):
        for name, rule, kept in (
            ("temperature", "must not be negative", self.temperature >= 0),
            ("top_k", "must not be negative", self.top_k >= 0),
            ("top_p", "must lie in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "must lie in [0, 1]", 0 <= self.min_p <= 1),
            ("seed", "must lie in 0..2^31 - 1", 0 <= self.seed < 2**31),
        ):
            if not kept:
                raise ValueError(f"Sampling.{name} {rule}; got {getattr(self, name)}")


class Settings(NamedTuple):
    """The settings of each row of a batch."""

    temperature_B: Float[Array, " B"]
    top_k_B: Int[Array, " B"]
    top_p_B: Float[Array, " B"]
    min_p_B: Float[Array, " B"]
    seed_B: Int[Array, " B"]


def settings(rows: Sequence[Sampling]) -> Settings:
    """The settings of a batch's rows, side by side."""
    columns = zip(*((r.temperature, r.top_k, r.top_p, r.min_p, r.seed) for r in rows), strict=True)
    return Settings(
        *(np.array(c, t) for c, t in zip(columns, (np.float32, np.int32, np.float32, np.float32, np.int32), strict=True))
    )


def sample(logits_BW: Float[Array, "B W"], rows: Settings, place_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """A token for each row; `place_B` is the place that it will have in its sequence."""
    scaled_BW = logits_BW / jnp.where(rows.temperature_B > 0, rows.temperature_B, 1)[:, None]
    limited = (rows.top_k_B > 0) | (rows.top_p_B < 1) | (rows.min_p_B > 0)
    kept_BW = lax.cond(limited.any(), kept, lambda s, _: jnp.ones(s.shape, bool), scaled_BW, rows)

    def noise(seed, place):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), place), logits_BW.shape[1:])

    # The largest of logit + Gumbel noise is a draw from the softmax.
    drawn_B = jnp.where(kept_BW, scaled_BW + jax.vmap(noise)(rows.seed_B, place_B), -jnp.inf).argmax(-1)
    return jnp.where(rows.temperature_B > 0, drawn_B, logits_BW.argmax(-1)).astype(jnp.int32)


def kept(scaled_BW: Float[Array, "B W"], rows: Settings) -> Bool[Array, "B W"]:
    """The tokens that a row's limits leave: the likeliest so many, of equally likely ones those with lower ids."""
    W = scaled_BW.shape[1]
    order_BW = jnp.argsort(-scaled_BW, axis=-1, stable=True)
    p_BW = jax.nn.softmax(jnp.take_along_axis(scaled_BW, order_BW, -1), -1)
    k_B = jnp.where(rows.top_k_B > 0, jnp.minimum(rows.top_k_B, W), W)
    p_BW = jnp.where(jnp.arange(W)[None] < k_B[:, None], p_BW, 0)
    before_BW = jnp.cumsum(p_BW, -1) - p_BW
    enough_BW = before_BW >= (rows.top_p_B * p_BW.sum(-1))[:, None]
    likely_BW = (p_BW > 0) & (p_BW >= (rows.min_p_B * p_BW[:, 0])[:, None]) & ~((rows.top_p_B < 1)[:, None] & enough_BW)
    rank_BW = jnp.argsort(order_BW, axis=-1)
    return jnp.take_along_axis(likely_BW, rank_BW, -1)
