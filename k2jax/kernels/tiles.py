"""What the Pallas kernels share: where they run, which tiles they compute, and tiles of ragged arrays.

Triton takes blocks whose sides are powers of two, products of at least 16 a side, and looks after no edge: loads and stores
beyond an array's end are masked here, and only where a block can reach beyond it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

CAPABLE = ("8.0", "9.0", "10.0", "10.3")  # NVIDIA's GPUs for data centres: 160 KB of shared memory a block and more
GROUP = 8  # rows of tiles that are worked on together, so that the operands they share are still in L2


def nvidia_is_capable() -> bool:
    """Whether the kernels fit the NVIDIA GPU of this process; true where there is none, for one that is compiled for."""
    try:
        return jax.local_devices(backend="cuda")[0].compute_capability in CAPABLE
    except RuntimeError:
        return True


def lower_tiles(n: int, rows: int, columns: int) -> np.ndarray:
    """Returns [2, tiles]: row and column, in tiles of `rows` x `columns`, of each tile that reaches the lower triangle.

    They are ordered GROUP rows of tiles at a time, column by column.
    """
    count = -(-n // rows)
    order = [
        (i, j)
        for first in range(0, count, GROUP)
        for j in range(-(-min((first + GROUP) * rows, n) // columns))
        for i in range(first, min(first + GROUP, count))
        if (i + 1) * rows > j * columns
    ]
    return np.array(order, np.int32).T


def power_of_two(n: int) -> int:
    """Returns the least power of two that is at least `n`, and at least 16."""
    return max(16, pl.next_power_of_2(n))


def product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """The product of two matrices over the axes `contract`, summed in float32; of float32 operands in full precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = ((contract[:1], contract[1:]), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def matrix(n: int, m: int, multiples: tuple[int, int], at: Callable[..., tuple]) -> pl.BlockSpec:
    """One n x m matrix of a batch, whole, with sides rounded up to multiples: what lies beyond it is to be masked."""
    return pl.BlockSpec((None, pl.align_to(n, multiples[0]), pl.align_to(m, multiples[1])), at)


def read(ref, first: tuple, shape: tuple[int, int], sides: tuple[int, int]) -> jax.Array:
    """The block from `first` on of a matrix that has these sides; zeros beyond them."""
    at = ref.at[pl.ds(first[0], shape[0]), pl.ds(first[1], shape[1])]
    mask = inside(sides, first, shape)
    return plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)


def write(ref, first: tuple, block: jax.Array, sides: tuple[int, int], mask: jax.Array | None = None) -> None:
    """Stores, from `first` on, the part of the block that lies in a matrix of these sides, and in the mask."""
    at = ref.at[pl.ds(first[0], block.shape[0]), pl.ds(first[1], block.shape[1])]
    edges = inside(sides, first, block.shape)
    plt.store(at, block, mask=mask if edges is None else edges if mask is None else edges & mask)


def inside(sides: tuple[int, int], first: tuple, shape: tuple[int, int]) -> jax.Array | None:
    """Which elements of a block lie in a matrix; None if no block has an edge of it within."""
    masks = [
        first[axis] + lax.broadcasted_iota(jnp.int32, shape, axis) < sides[axis] for axis in (0, 1) if sides[axis] % shape[axis]
    ]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
