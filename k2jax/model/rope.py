"""Rotary position embedding (RoPE), its YaRN extension, and the softmax scale that YaRN changes.

The angles come from a table that is computed once in float64 and looked up by position, because position times frequency in
float32 is off by 0.008 radians at 128k.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k2jax.config import AttentionConfig, RopeConfig


def frequencies_R(rope: RopeConfig, d_rope: int) -> np.ndarray:
    """Radians a position for each of the d_rope/2 channel pairs, YaRN included (YaRN paper; DeepSeek-V3 report 4.3).

    With `yarn_factor` 1 these are `theta ** (-2i / d_rope)`. Otherwise pairs that turn more than `beta_fast` times over the
    original context are kept, those below `beta_slow` turns are divided by the factor, and those between are mixed.
    """
    i = np.arange(d_rope // 2, dtype=np.float64)
    plain = rope.theta ** (-2 * i / d_rope)
    if rope.yarn_factor == 1:
        return plain
    low, high = yarn_range(rope, d_rope)
    ramp = np.clip((i - low) / (high - low if high > low else 1e-3), 0, 1)
    return plain * (1 - ramp) + plain / rope.yarn_factor * ramp


def yarn_range(rope: RopeConfig, d_rope: int) -> tuple[int, int]:
    """The channel pairs between which YaRN passes from kept to interpolated; (19, 20) for K2, a step."""

    def pair_with_turns(turns: float) -> float:
        return d_rope * math.log(rope.original_context / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(rope.beta_slow)), d_rope - 1)
    return low, high


def yarn_magnitude(factor: float, coefficient: float) -> float:
    """YaRN's `m(s, a) = 0.1 a ln(s) + 1`; 1 without extension."""
    return 0.1 * coefficient * math.log(factor) + 1 if factor > 1 else 1.0


def softmax_scale(attention: AttentionConfig) -> float:
    """`(nope + rope width) ** -0.5`, times the square of YaRN's magnitude: 0.07217 for K2 in pre-training, 0.13086 at 128k."""
    scale = (attention.d_nope + attention.d_rope) ** -0.5
    return scale * yarn_magnitude(attention.rope.yarn_factor, attention.rope.mscale_all_dim) ** 2


@functools.lru_cache
def table(rope: RopeConfig, d_rope: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, each float32 [length, d_rope/2], for positions 0 to length - 1."""
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies_R(rope, d_rope)
    magnitude = yarn_magnitude(rope.yarn_factor, rope.mscale) / yarn_magnitude(rope.yarn_factor, rope.mscale_all_dim)
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def look_up(
    rope: RopeConfig, d_rope: int, length: int, positions_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T P"], Float[Array, "B T P"]]:
    """The table's rows at `positions_BT`; P = d_rope / 2 pairs. Positions must be below `length`."""
    cos_TP, sin_TP = table(rope, d_rope, length)
    return jnp.asarray(cos_TP)[positions_BT], jnp.asarray(sin_TP)[positions_BT]


def rotate(
    x_BTHR: Float[Array, "B T H R"], cos_BTP: Float[Array, "B T P"], sin_BTP: Float[Array, "B T P"], layout: str
) -> Float[Array, "B T H R"]:
    """Rotates channel pairs by their angle, in float32.

    `interleaved` pairs channels (2i, 2i+1), as the released weights do; `half` pairs (i, i + R/2). The two differ by a fixed
    permutation of channels, so weights trained in one are wrong in the other.
    """
    x, cos, sin = x_BTHR.astype(jnp.float32), cos_BTP[:, :, None], sin_BTP[:, :, None]
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return pairs.reshape(x.shape).astype(x_BTHR.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BTHR.dtype)
