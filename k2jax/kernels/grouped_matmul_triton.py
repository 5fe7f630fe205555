"""Products of rows with their experts' matrices on NVIDIA GPUs, as Pallas kernels for Triton.

Rows lie sorted by expert, or are taken from where they lie in that order. A table made on the device cuts every expert's rows
into tiles, so a tile meets one expert's matrix, which is read in place: cost goes with rows, neither weights nor rows are
gathered into memory, and experts without rows cost next to nothing. The tiles of the same rows run side by side, so that rows
are read from memory once and an expert's matrix stays in L2 while it is needed.

GSPMD does not partition the kernels: on a mesh they are called inside shard_map. They have been compiled for H100 and compared
with a dense reference in Pallas's interpreter, and never run on a GPU: sizes of tiles are reasoned, not tuned.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from k2jax.kernels.tiles import inside, power_of_two, product

TILE = (128, 256)  # rows and columns of the result; in float32 half of the registers
DEPTH = 64  # of the contracted axis at a time: in half precision a row of shared memory without bank conflicts


class Groups(NamedTuple):
    """Each expert's places, from `first` to before `end`, and which of the matrices is its own."""

    first_E: jax.Array
    end_E: jax.Array
    matrix_E: jax.Array


class Taken(NamedTuple):
    """`x_XD[row_P]`, one row a place, without forming it."""

    x_XD: jax.Array
    row_P: jax.Array


Rows = Array | Taken  # [P, n]: a row for each place


@functools.partial(jax.jit, static_argnames=("transposed", "tile", "interpret"))
def multiply(
    rows: Sequence[Rows],
    matrices: Sequence[Float[Array, "E i j"]],
    groups: Groups,
    *,
    transposed: bool = False,
    tile: tuple[int, int] = TILE,
    interpret: bool = False,
) -> Float[Array, "P n"]:
    """The sum over pairs of `rows[p] @ matrix[e]`, or of its transpose, for the places p of each expert e.

    Sums are float32, the result is in the rows' dtype. At places of no expert nothing is written: they hold anything.
    """
    (P, k), n = _shape(rows[0]), matrices[0].shape[1 if transposed else 2]
    height, width = (min(side, power_of_two(count)) for side, count in zip(tile, (P, n), strict=True))
    depth = min(DEPTH, power_of_two(k))
    tiles = _tiles(groups, height, P)
    operands = [_Operand.of(x, height, depth) for x in rows]
    sides = (width, depth) if transposed else (depth, width)
    matrix = pl.BlockSpec((matrices[0].shape[0], *map(pl.align_to, matrices[0].shape[1:], sides)), lambda j, m: (0, 0, 0))
    taken = tuple(len(operand.arrays) > 1 for operand in operands)
    return pl.pallas_call(
        functools.partial(_multiply, taken=taken, n=n, k=k, transposed=transposed, tile=(height, width), depth=depth),
        grid=(pl.cdiv(n, width), tiles.shape[1]),
        in_specs=[pl.BlockSpec(), *(spec for operand in operands for spec in operand.specs), *[matrix] * len(matrices)],
        out_specs=_whole(P + height, n, width),
        out_shape=jax.ShapeDtypeStruct((P, n), matrices[0].dtype),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(tiles, *(x for operand in operands for x in operand.arrays), *matrices)


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def weight_gradient(
    x: Rows,
    y: Rows,
    groups: Groups,
    total: Float[Array, "N i j"] | None = None,
    *,
    tile: tuple[int, int] = TILE,
    interpret: bool = False,
) -> Float[Array, "N i j"]:
    """The sum over each expert's places of the outer product of x's row and y's, [experts, i, j] in their dtype.

    With a `total`, what it becomes when the sums are added to the experts' matrices in it, in place. Sums are float32.
    """
    (P, i), (_, j) = _shape(x), _shape(y)
    height, width = (min(side, power_of_two(count)) for side, count in zip(tile, (i, j), strict=True))
    depth = min(DEPTH, power_of_two(P))
    operands = _Operand.of(x, depth, height), _Operand.of(y, depth, width)
    E = groups.first_E.shape[0]
    count, dtype = (E, operands[0].arrays[0].dtype) if total is None else (total.shape[0], total.dtype)
    out = pl.BlockSpec((count, pl.align_to(i, height), pl.align_to(j, width)), lambda *_: (0, 0, 0))
    taken, arrays = tuple(len(operand.arrays) > 1 for operand in operands), [a for o in operands for a in o.arrays]
    return pl.pallas_call(
        functools.partial(_weight_gradient, taken=taken, add=total is not None, i=i, j=j, tile=(height, width), depth=depth),
        grid=(pl.cdiv(j, width), pl.cdiv(i, height), E),
        in_specs=[pl.BlockSpec(), *(s for o in operands for s in o.specs), *([] if total is None else [out])],
        out_specs=out,
        out_shape=jax.ShapeDtypeStruct((count, i, j), dtype),
        input_output_aliases={} if total is None else {1 + len(arrays): 0},
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_matmul_weight_gradient",
    )(jnp.stack(groups), *arrays, *([] if total is None else [total]))


def _shape(x: Rows) -> tuple[int, int]:
    return (x.row_P.shape[0], x.x_XD.shape[1]) if isinstance(x, Taken) else x.shape


def _whole(rows: int, columns: int, width: int) -> pl.BlockSpec:
    """[rows, columns] whole, columns rounded up to a multiple: what lies beyond the array is masked."""
    return pl.BlockSpec((rows, pl.align_to(columns, width)), lambda *_: (0, 0))


class _Operand(NamedTuple):
    arrays: list[Array]
    specs: list[pl.BlockSpec]

    @classmethod
    def of(cls, x: Rows, height: int, width: int) -> "_Operand":
        """Rows that are read `height` x `width` at a time, from any place on: a block may reach beyond the last one."""
        if isinstance(x, Taken):
            places = pl.BlockSpec((x.row_P.shape[0] + height,), lambda *_: (0,))
            return cls([x.x_XD, x.row_P], [_whole(x.x_XD.shape[0], x.x_XD.shape[1], width), places])
        return cls([x], [_whole(x.shape[0] + height, x.shape[1], width)])


def _tiles(groups: Groups, height: int, P: int) -> Int[Array, "3 tiles"]:
    """First place, end of the expert's places, and matrix of each tile; first and end are 0 where there is no tile."""
    E = groups.first_E.shape[0]
    tiles_E = jnp.maximum(groups.end_E - groups.first_E + height - 1, 0) // height
    until_E = jnp.cumsum(tiles_E)
    tile_M = jnp.arange(P // height + min(E, P), dtype=jnp.int32)
    expert_M = jnp.searchsorted(until_E, tile_M, side="right", method="compare_all").astype(jnp.int32)
    lives_M, expert_M = expert_M < E, jnp.minimum(expert_M, E - 1)
    first_M = groups.first_E[expert_M] + (tile_M - (until_E - tiles_E)[expert_M]) * height
    first_M, end_M = (jnp.where(lives_M, x, 0) for x in (first_M, groups.end_E[expert_M]))
    return jnp.stack([first_M, end_M, groups.matrix_E[expert_M]]).astype(jnp.int32)


class _Places(NamedTuple):
    """A block of places: the first, where their rows are if those are taken, and which places belong to the expert."""

    first: Array
    row: Array | None
    live: Array

    @classmethod
    def of(cls, row_ref, first, end, height: int) -> "_Places":
        live = first + jnp.arange(height, dtype=jnp.int32) < end
        row = None if row_ref is None else plt.load(row_ref.at[pl.ds(first, height)], mask=live, other=0)
        return cls(first, row, live)

    def mask(self, column, shape: tuple[int, int], columns: int) -> Array:
        mask = jnp.broadcast_to(self.live[:, None], shape)
        return mask & (column + lax.broadcasted_iota(jnp.int32, shape, 1) < columns) if columns % shape[1] else mask

    def load(self, ref, column, width: int, columns: int) -> Array:
        """Some of the `columns` of the rows; zeros beyond the expert's."""
        shape = self.live.shape[0], width
        if self.row is None:
            at = ref.at[pl.ds(self.first, shape[0]), pl.ds(column, width)]
        else:
            at = ref.at[jnp.broadcast_to(self.row[:, None], shape), column + lax.broadcasted_iota(jnp.int32, shape, 1)]
        return plt.load(at, mask=self.mask(column, shape, columns), other=0.0)


def _pair_up(refs, taken):
    """References as they were given to the kernel, as pairs (rows, where they lie or None)."""
    refs = iter(refs)
    return [(next(refs), next(refs) if lies else None) for lies in taken]


def _read(ref, number, first, shape, sides):
    """A block of one of the matrices, which have these sides; zeros beyond them."""
    at = ref.at[number, pl.ds(first[0], shape[0]), pl.ds(first[1], shape[1])]
    mask = inside(sides, first, shape)
    return plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)


def _multiply(tiles_ref, *refs, taken, n, k, transposed, tile, depth):
    (height, width), count = tile, len(taken)
    column, m = pl.program_id(0) * width, pl.program_id(1)
    first, end, number = (tiles_ref[row, m] for row in range(3))
    *refs, out_ref = refs

    @pl.when(first < end)
    def _():
        sums = jnp.zeros(tile, jnp.float32)
        for (rows_ref, row_ref), matrix_ref in zip(_pair_up(refs[:-count], taken), refs[-count:], strict=True):
            places = _Places.of(row_ref, first, end, height)

            def step(s, sums, rows_ref=rows_ref, places=places, matrix_ref=matrix_ref):
                x = places.load(rows_ref, s * depth, depth, k)
                if transposed:
                    return sums + product(x, _read(matrix_ref, number, (column, s * depth), (width, depth), (n, k)), (1, 1))
                return sums + product(x, _read(matrix_ref, number, (s * depth, column), (depth, width), (k, n)), (1, 0))

            sums = lax.fori_loop(0, pl.cdiv(k, depth), step, sums)
        places = _Places.of(None, first, end, height)
        at = out_ref.at[pl.ds(first, height), pl.ds(column, width)]
        plt.store(at, sums.astype(out_ref.dtype), mask=places.mask(column, tile, n))


def _weight_gradient(groups_ref, *refs, taken, add, i, j, tile, depth):
    row, column, expert = pl.program_id(1) * tile[0], pl.program_id(0) * tile[1], pl.program_id(2)
    first, end, number = (groups_ref[field, expert] for field in range(3))
    *refs, out_ref = refs
    (x_ref, x_row_ref), (y_ref, y_row_ref) = _pair_up(refs, taken)

    def step(s, sums):
        at = first + s * depth
        x = _Places.of(x_row_ref, at, end, depth).load(x_ref, row, tile[0], i)
        y = _Places.of(y_row_ref, at, end, depth).load(y_ref, column, tile[1], j)
        return sums + product(x, y, (0, 0))

    def write(number, sums):
        sums = lax.fori_loop(0, pl.cdiv(end - first, depth), step, sums)
        at = out_ref.at[number, pl.ds(row, tile[0]), pl.ds(column, tile[1])]
        plt.store(at, sums.astype(out_ref.dtype), mask=inside((i, j), (row, column), tile))

    if not add:
        write(expert, jnp.zeros(tile, jnp.float32))
        return

    @pl.when(first < end)
    def _():
        write(number, _read(out_ref, number, (row, column), tile, (i, j)))
