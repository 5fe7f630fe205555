"""A symmetric product on TPUs, as a Pallas kernel; `symmetric_triton` has the same for NVIDIA GPUs.

Each tile on or below the diagonal is computed once. The contracted axis is the innermost of the grid, the sums stay in VMEM
meanwhile, and the axis has one step more than it needs: there the tile's mirror image is the next block of the output.

GSPMD does not partition the kernel: on a mesh it is called inside shard_map. It has been compiled for TPU v5e, v5p and v6e and
compared with float64 in Pallas's interpreter, and never run on a TPU: sizes of tiles are reasoned, not tuned.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from k2jax.kernels.tiles import lower_tiles, product

SIDES = (512, 256, 128)  # of a tile of the result: the largest of which there are MIN_TILES a side
MIN_TILES = 3  # a side, so that at most two thirds of the tiles are computed
DEPTH = 2048  # bytes of the contracted axis at a time, at most; with tiles of 512 the blocks take 11 of VMEM's 16 MB


@functools.partial(jax.jit, static_argnames=("tall", "row", "out", "sides", "depth", "interpret"))  # traced once a shape
def symmetric(
    x: Float[Array, "b n k"],
    y: Float[Array, "b n k"],
    *,
    tall: bool = False,
    row: tuple[float, float, float] = (0.0, 0.0, 1.0),
    out: str = "float32",
    sides: tuple[int, ...] = SIDES,
    depth: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b i i"]:
    """a I + b X + c X Y^T in the dtype `out`, with `row` a, b, c; or with `tall` a I + c X^T Y of [b, k, n].

    The caller knows that X Y^T is symmetric, and X where b is not 0: what lies above their diagonals is not looked at. X and Y
    have one dtype, float32 or bfloat16; sums, and what is added to them, are float32. Tiles have one of `sides`, and `depth` of
    the contracted axis is loaded at a time.
    """
    if tall and row[1]:
        raise ValueError(f"a multiple of X is added where X is square, not tall; got {row=}")
    count, n, k = (x.shape[0], x.shape[2], x.shape[1]) if tall else x.shape
    side = next((side for side in sides if pl.cdiv(n, side) >= MIN_TILES), min(n, sides[-1]))
    depth = depth or _depth(k, x.dtype)
    tiles = lower_tiles(n, side, side)
    steps = pl.cdiv(k, depth)

    def operand(which):
        def at(matrix, t, step, tiles_ref):
            block, step = tiles_ref[which, t], jnp.minimum(step, steps - 1)
            return (matrix, step, block) if tall else (matrix, block, step)

        return pl.BlockSpec((None, depth, side) if tall else (None, side, depth), at)

    def tile(matrix, t, step, tiles_ref):
        return matrix, tiles_ref[0, t], tiles_ref[1, t]

    def tile_or_mirror(matrix, t, step, tiles_ref):
        mirror = jnp.int32(step == steps)
        return matrix, tiles_ref[mirror, t], tiles_ref[1 - mirror, t]

    added = [pl.BlockSpec((None, side, side), tile)] if row[1] else []
    return pl.pallas_call(
        functools.partial(_kernel, tall=tall, k=k, row=row),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count, tiles.shape[1], steps + 1),
            in_specs=[operand(0), operand(1), *added],
            out_specs=pl.BlockSpec((None, side, side), tile_or_mirror),
            scratch_shapes=[pltpu.VMEM((side, side), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((count, n, n), out),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="symmetric_product",
    )(jnp.asarray(tiles), x, y, *([x] if added else []))


def _depth(k: int, dtype: jnp.dtype) -> int:
    """How much of the contracted axis is loaded at a time: all of it if that is little, else a divisor if there is one."""
    most = DEPTH // dtype.itemsize
    return k if k <= most else next((depth for depth in (most, most // 2, most // 4) if k % depth == 0), most)


def _kernel(tiles_ref, x_ref, y_ref, *refs, tall, k, row):
    *added_ref, out_ref, sums_ref = refs
    t, step, steps = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    axis = 0 if tall else 1

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    @pl.when(step < steps)
    def _():
        sums_ref[...] += product(_within(x_ref, axis, step, k), _within(y_ref, axis, step, k), (axis, axis))

    @pl.when(step == steps - 1)
    def _():
        out = row[2] * sums_ref[...]
        if added_ref:
            out += row[1] * added_ref[0][...].astype(jnp.float32)
        i, j = (lax.broadcasted_iota(jnp.int32, out.shape, axis) for axis in (0, 1))
        diagonal = tiles_ref[0, t] == tiles_ref[1, t]
        out = jnp.where(diagonal & (i == j), out + row[0], out)
        out = jnp.where(diagonal & (i < j), out.T, out)
        sums_ref[...] = out
        out_ref[...] = out.astype(out_ref.dtype)

    @pl.when(step == steps)
    def _():
        out_ref[...] = sums_ref[...].T.astype(out_ref.dtype)


def _within(ref, axis: int, step, k: int) -> jax.Array:
    """The block, with zeros where it reaches beyond the `k` entries of the contracted axis."""
    block = ref[...]
    if k % block.shape[axis] == 0:
        return block
    inside = step * block.shape[axis] + lax.broadcasted_iota(jnp.int32, block.shape, axis) < k
    return jnp.where(inside, block.astype(jnp.float32), 0.0).astype(block.dtype)
