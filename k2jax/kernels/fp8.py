"""FP8 storage: E4M3 numbers with a float32 scale for every tile of 1 x 128 (report 2.4.3). Nothing computes in it.

A tile's largest magnitude becomes 448, the largest E4M3 number. 1.03125 bytes an element where the last axis is a multiple of
128. The error of an element is at most 2^-4 of it where the tile's scale leaves it a normal number, from 2^-6 on, and at most
2^-10 of a unit, or 2^-18.8 of the tile's largest, below.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TILE = 128
LARGEST = 448.0  # of float8_e4m3fn, which has no infinity: what is larger would become nan


class Stored(NamedTuple):
    """An array in FP8."""

    value: jax.Array  # float8_e4m3fn, as the array
    scale: jax.Array  # float32, [..., tiles]


def store(x: Float[Array, "... n"]) -> Stored:
    """Rounds to the nearest E4M3 number, tile by tile along the last axis; the last tile may be shorter. Zeros stay zeros.

    A tile with an infinity or a nan becomes nan.
    """
    tiles = _tiles(x.astype(jnp.float32))
    largest = jnp.abs(tiles).max(-1)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    value = jnp.clip(tiles / scale[..., None], -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return Stored(value.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scale)


def load(stored: Stored, dtype: str) -> Float[Array, "... n"]:
    """The inverse of `store`, up to its rounding."""
    n = stored.value.shape[-1]
    tiles = _tiles(stored.value.astype(jnp.float32)) * stored.scale[..., None]
    return tiles.reshape(*stored.value.shape[:-1], -1)[..., :n].astype(dtype)


def _tiles(x: Float[Array, "... n"]) -> Float[Array, "... tiles tile"]:
    padding = -x.shape[-1] % TILE
    if padding:
        x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, padding)))
    return x.reshape(*x.shape[:-1], -1, TILE)
