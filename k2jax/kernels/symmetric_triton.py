"""A symmetric product on NVIDIA GPUs, as a Pallas kernel for Triton.

Each tile that reaches the lower triangle is computed once and stored twice, the second time transposed: half the FLOPs, no pass
that mirrors, and a result symmetric to the bit. A step's P = a I + b R + c R^2 is one such kernel, and what one kernel hands to
the next is in the operands' half precision: with R = X X^T, P and P X a step moves 6 n m + 8 n^2 bytes.

GSPMD does not partition the kernel: on a mesh it is called inside shard_map. It has been compiled for H100 and compared with
float64 in Pallas's interpreter, and never run on a GPU: sizes of tiles are reasoned, not tuned.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from k2jax.kernels.tiles import lower_tiles, matrix, power_of_two, product, read, write

# Rows and columns of the result's tiles. The larger they are the less is read from L2, which should bound smaller ones on H100;
# what a tile of 128 x 256 adds or writes in float32 does not fit beside it into registers.
PLAIN_TILE, TILE = (128, 256), (128, 128)
DEPTH = 128  # bytes of the contracted axis at a time: a row of shared memory without bank conflicts


@functools.partial(jax.jit, static_argnames=("tall", "row", "out", "tile", "interpret"))  # traced once a shape
def symmetric(
    x: Float[Array, "b n k"],
    y: Float[Array, "b n k"],
    *,
    tall: bool = False,
    row: tuple[float, float, float] = (0.0, 0.0, 1.0),
    out: str = "float32",
    tile: tuple[int, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "b i i"]:
    """a I + b X + c X Y^T in the dtype `out`, with `row` a, b, c; or with `tall` a I + c X^T Y of [b, k, n].

    The caller knows that X Y^T is symmetric, and X where b is not 0: what lies above their diagonals is not looked at. X and Y
    have one dtype; sums, and what is added to them, are float32. `tile` is the shape of the result's tiles, powers of two.
    """
    a, b, c = row
    if tall and b:
        raise ValueError(f"a multiple of X is added where X is square, not tall; got {row=}")
    plain = not b and x.dtype.itemsize == jnp.dtype(out).itemsize == 2
    count, n, k = (x.shape[0], x.shape[2], x.shape[1]) if tall else x.shape
    rows, columns = (min(side, power_of_two(n)) for side in tile or (PLAIN_TILE if plain else TILE))
    depth = min(DEPTH // x.dtype.itemsize, power_of_two(k))
    tiles = lower_tiles(n, rows, columns)
    side = max(rows, columns)  # powers of two: a multiple of the other

    def at(t, number):
        return number, 0, 0

    operand = matrix(k, n, (depth, side), at) if tall else matrix(n, k, (side, max(depth, columns) if b else depth), at)
    return pl.pallas_call(
        functools.partial(_kernel, tall=tall, add=bool(b), n=n, k=k, tile=(rows, columns), depth=depth),
        grid=(tiles.shape[1], count),
        in_specs=[pl.BlockSpec(), pl.BlockSpec(), operand, operand],
        out_specs=matrix(n, n, (side, side), at),
        out_shape=jax.ShapeDtypeStruct((count, n, n), out),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="symmetric_product",
    )(jnp.asarray(tiles), jnp.array([a, b, c], jnp.float32), x, y)


def _kernel(tiles_ref, row_ref, x_ref, y_ref, out_ref, *, tall, add, n, k, tile, depth):
    t = pl.program_id(0)
    first = tiles_ref[0, t] * tile[0], tiles_ref[1, t] * tile[1]

    def operand(ref, axis, step):
        if tall:
            return read(ref, (step * depth, first[axis]), (depth, tile[axis]), (k, n))
        return read(ref, (first[axis], step * depth), (tile[axis], depth), (n, k))

    def multiply(step, sums):
        return sums + product(operand(x_ref, 0, step), operand(y_ref, 1, step), (0, 0) if tall else (1, 1))

    out = row_ref[2] * lax.fori_loop(0, pl.cdiv(k, depth), multiply, jnp.zeros(tile, jnp.float32))
    if add:
        out += row_ref[1] * read(x_ref, first, tile, (n, n)).astype(jnp.float32)
    i, j = (first[axis] + lax.broadcasted_iota(jnp.int32, tile, axis) for axis in (0, 1))
    out = jnp.where(i == j, out + row_ref[0], out).astype(out_ref.dtype)
    below = first[0] >= first[1] + tile[1] - 1

    @pl.when(below)
    def _():
        write(out_ref, first, out, (n, n))
        write(out_ref, first[::-1], out.T, (n, n))

    @pl.when(~below)  # the diagonal crosses the tile
    def _():
        write(out_ref, first, out, (n, n), i >= j)
        write(out_ref, first[::-1], out.T, (n, n), (i >= j).T)
