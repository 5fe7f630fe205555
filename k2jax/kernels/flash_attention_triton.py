"""Flash attention on NVIDIA GPUs, as Pallas kernels for Triton, with the largest logit of each block of rows.

Three kernels: forward, the gradient of the queries, and the gradients of keys and values. Each reads [B, T, heads, width] as it
lies, so nothing is transposed, and writes what it alone computes, so a result is the same to the bit in every run. Seven
products of a block of logits' size in the backward pass where atomic additions would need five: the price of that. Widths that
are no power of two, such as MLA's 192, are worked on in parts that are (128 and 64).

Blocks above the diagonal are never visited, nor those before a block's first document or after its last. GSPMD does not
partition the kernels: on a mesh they are called inside shard_map. They have been compiled for H100 and compared with a dense
reference in Pallas's interpreter, and never run on a GPU: sizes of blocks are reasoned, not tuned.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from k2jax.kernels.flash_attention_blockwise import MASKED, capped
from k2jax.kernels.tiles import power_of_two, product, read, write


class Tile(NamedTuple):
    """How a kernel is cut up: a block of logits, and what Triton is told."""

    queries: int
    keys: int
    warps: int
    stages: int


# A thread holds its share of the sums, [rows, width] in float32, and of logits and their gradients in at most 255 registers.
FORWARD = Tile(queries=128, keys=64, warps=8, stages=3)
D_QUERIES = Tile(queries=128, keys=64, warps=8, stages=2)
D_KEYS = Tile(queries=64, keys=64, warps=8, stages=2)
WIDEST = 320  # of a query and a value together, MLA's 192 and 128: beyond it sums do not fit into registers


def fits(width: int, value_width: int) -> bool:
    """Whether heads with queries and values of these widths may be worked on."""
    return sum(size for w in (width, value_width) for _, size in parts(w)) <= WIDEST


def parts(width: int) -> list[tuple[int, int]]:
    """Cuts a width into powers of two, 16 and more: (first, size) of each, the last of which may reach beyond the end."""
    out, first = [], 0
    while first < width:
        rest = width - first
        size = max(16, 1 << rest.bit_length() >> 1)  # the power of two below
        out.append((first, size))
        first += size
    return out


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "tile", "interpret"))
def forward(
    q_BTHY: Float[Array, "B T H Y"],
    k_BSGY: Float[Array, "B T G Y"],
    v_BSGV: Float[Array, "B T G V"],
    segments_BT: Int[Array, "B T"],
    scale: float,
    soft_cap: float,
    *,
    tile: Tile = FORWARD,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"], Float[Array, "B H T"]]:
    """Returns output, largest logit of each head, and each row's log-sum-exp."""
    shape = _Shape.of(q_BTHY, k_BSGY, v_BSGV, tile, scale, soft_cap)
    B, T, H, V = *q_BTHY.shape[:3], v_BSGV.shape[-1]
    n = pl.cdiv(T, shape.queries)
    o, lse, top = pl.pallas_call(
        functools.partial(_forward, shape=shape),
        grid=(n, H, B),
        in_specs=[shape.bounds(n), shape.positions(), shape.q, shape.k, shape.v],
        out_specs=[shape.o, shape.rows(), pl.BlockSpec((None, None, n), lambda i, h, b: (b, h, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((B, T, H, V), q_BTHY.dtype),
            jax.ShapeDtypeStruct((B, H, T), jnp.float32),
            jax.ShapeDtypeStruct((B, H, n), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_attention",
    )(first_keys(segments_BT, shape.queries, shape.keys), segments_BT, q_BTHY, k_BSGY, v_BSGV)
    return o, top.max(axis=(0, 2)), lse


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "tiles", "interpret"))
def backward(
    q_BTHY: Float[Array, "B T H Y"],
    k_BSGY: Float[Array, "B T G Y"],
    v_BSGV: Float[Array, "B T G V"],
    segments_BT: Int[Array, "B T"],
    o_BTHV: Float[Array, "B T H V"],
    lse_BHT: Float[Array, "B H T"],
    d_o_BTHV: Float[Array, "B T H V"],
    scale: float,
    soft_cap: float,
    *,
    tiles: tuple[Tile, Tile] = (D_QUERIES, D_KEYS),
    interpret: bool = False,
) -> tuple[Float[Array, "B T H Y"], Float[Array, "B T G Y"], Float[Array, "B T G V"]]:
    """Returns the gradients of q, k and v."""
    B, T, H, Y = q_BTHY.shape
    G, V = v_BSGV.shape[2:]
    delta_BHT = jnp.einsum("bthv,bthv->bht", d_o_BTHV, o_BTHV, preferred_element_type=jnp.float32)
    arrays = segments_BT, q_BTHY, k_BSGY, v_BSGV, d_o_BTHV, lse_BHT, delta_BHT

    def call(kernel, shape, n, bounds, out_specs, out_shape, name):
        tile = shape.tile
        return pl.pallas_call(
            functools.partial(kernel, shape=shape),
            grid=(n, H, B),
            in_specs=[shape.bounds(n), shape.positions(), shape.q, shape.k, shape.v, shape.o, shape.rows(), shape.rows()],
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name=name,
        )(bounds, *arrays)

    shape = _Shape.of(q_BTHY, k_BSGY, v_BSGV, tiles[0], scale, soft_cap)
    bounds = first_keys(segments_BT, shape.queries, shape.keys)
    like_q = jax.ShapeDtypeStruct(q_BTHY.shape, q_BTHY.dtype)
    d_q = call(_d_queries, shape, pl.cdiv(T, shape.queries), bounds, shape.q, like_q, "flash_attention_d_queries")

    shape = _Shape.of(q_BTHY, k_BSGY, v_BSGV, tiles[1], scale, soft_cap)
    bounds = last_queries(segments_BT, shape.queries, shape.keys)
    # Each query head writes what it gives to its key head; of several, in float32, the sum is taken outside.
    dtypes = (jnp.float32, jnp.float32) if H > G else (k_BSGY.dtype, v_BSGV.dtype)
    like = [jax.ShapeDtypeStruct((B, T, H, width), dtype) for width, dtype in zip((Y, V), dtypes, strict=True)]
    out = call(_d_keys, shape, pl.cdiv(T, shape.keys), bounds, [shape.q, shape.o], like, "flash_attention_d_keys")
    if H > G:
        out = [x.reshape(B, T, G, H // G, -1).sum(3) for x in out]
    return d_q, out[0].astype(k_BSGY.dtype), out[1].astype(v_BSGV.dtype)


class _Shape(NamedTuple):
    """The fixed numbers of a kernel. Its grid is (block, head, row of the batch)."""

    T: int
    Y: int
    V: int
    group: int  # query heads a key head
    queries: int
    keys: int
    scale: float
    soft_cap: float
    tile: Tile

    @classmethod
    def of(cls, q, k, v, tile: Tile, scale: float, soft_cap: float) -> "_Shape":
        T, (H, Y), (G, V) = q.shape[1], q.shape[2:], v.shape[2:]
        queries, keys = (min(side, power_of_two(T)) for side in (tile.queries, tile.keys))
        return cls(T, Y, V, H // G, queries, keys, scale, soft_cap, tile)

    @property
    def length(self) -> int:
        """T rounded up to whole blocks, powers of two: what lies beyond T is masked."""
        return pl.align_to(self.T, max(self.queries, self.keys))

    def head(self, width: int, group: int = 1) -> pl.BlockSpec:
        """One head of [B, T, heads, width]."""
        first, size = parts(width)[-1]
        return pl.BlockSpec((None, self.length, None, first + size), lambda i, h, b: (b, 0, h // group, 0))

    @property
    def q(self) -> pl.BlockSpec:
        return self.head(self.Y)

    @property
    def k(self) -> pl.BlockSpec:
        return self.head(self.Y, self.group)

    @property
    def v(self) -> pl.BlockSpec:
        return self.head(self.V, self.group)

    @property
    def o(self) -> pl.BlockSpec:
        return self.head(self.V)

    def rows(self) -> pl.BlockSpec:
        """One head of [B, H, T]."""
        return pl.BlockSpec((None, None, self.length), lambda i, h, b: (b, h, 0))

    def positions(self) -> pl.BlockSpec:
        """One row of [B, T]."""
        return pl.BlockSpec((None, self.length), lambda i, h, b: (b, 0))

    def bounds(self, n: int) -> pl.BlockSpec:
        """One row of [B, blocks]."""
        return pl.BlockSpec((None, n), lambda i, h, b: (b, 0))

    def load(self, ref, first, rows: int, width: int) -> list[jax.Array]:
        """Rows of a head, cut by columns."""
        return [read(ref, (first, at), (rows, size), (self.T, width)) for at, size in parts(width)]

    def load_rows(self, ref, first, rows: int) -> jax.Array:
        """A number for each of the rows; 0 beyond the end."""
        at = ref.at[pl.ds(first, rows)]
        if self.T % rows == 0:
            return plt.load(at)
        return plt.load(at, mask=first + jnp.arange(rows, dtype=jnp.int32) < self.T, other=0)

    def store(self, ref, first, columns: list[jax.Array], width: int) -> None:
        """The reverse of `load`."""
        for (at, _), block in zip(parts(width), columns, strict=True):
            write(ref, (first, at), block.astype(ref.dtype), (self.T, width))

    def store_rows(self, ref, first, values: jax.Array) -> None:
        """The reverse of `load_rows`."""
        rows = values.shape[0]
        mask = None if self.T % rows == 0 else first + jnp.arange(rows, dtype=jnp.int32) < self.T
        plt.store(ref.at[pl.ds(first, rows)], values, mask=mask)


def first_keys(segments_BT: Int[Array, "B T"], queries: int, keys: int) -> Int[Array, "B blocks"]:
    """The first block of keys in which each block of queries may find its documents; the number of blocks if there is none.

    Documents are compared by their least and largest number in a block: with rising numbers, as packing gives them, what lies
    before is never visited; with any others at most too much is.
    """
    meets = _meets(segments_BT, queries, keys)
    return jnp.where(meets.any(-1), jnp.argmax(meets, -1), meets.shape[-1]).astype(jnp.int32)


def last_queries(segments_BT: Int[Array, "B T"], queries: int, keys: int) -> Int[Array, "B blocks"]:
    """One after the last block of queries that may ask for each block of keys; 0 if there is none."""
    meets = _meets(segments_BT, queries, keys).swapaxes(1, 2)[:, :, ::-1]
    return jnp.where(meets.any(-1), meets.shape[-1] - jnp.argmax(meets, -1), 0).astype(jnp.int32)


def _meets(segments_BT, queries, keys):
    """Whether a block of queries and one of keys may have a document in common, [B, blocks of queries, blocks of keys]."""

    def least_and_largest(block):
        s = jnp.pad(segments_BT, ((0, 0), (0, -segments_BT.shape[1] % block))).reshape(segments_BT.shape[0], -1, block)
        return jnp.where(s > 0, s, jnp.iinfo(s.dtype).max).min(-1), s.max(-1)

    (low_q, high_q), (low_k, high_k) = least_and_largest(queries), least_and_largest(keys)
    return (low_q[:, :, None] <= high_k[:, None]) & (low_k[:, None] <= high_q[:, :, None])


def _sum_products(lefts, rights, contract):
    """The product over a width that is cut into parts."""
    return functools.reduce(jnp.add, (product(x, y, contract) for x, y in zip(lefts, rights, strict=True)))


def _logits(shape, rows, columns, q_at, k_at):
    """Logits in float32, MASKED where none is allowed. A place is (positions, documents), broadcast as rows or columns are."""
    (t, of_t), (u, of_u) = q_at, k_at
    s = _sum_products(rows, columns, (1, 1)) * shape.scale
    return jnp.where((of_t == of_u) & (of_t > 0) & (t >= u), s, MASKED)


def _places(shape, ref, first, count):
    return first + jnp.arange(count, dtype=jnp.int32), shape.load_rows(ref, first, count)


def _as_column(place):
    return tuple(x[:, None] for x in place)


def _as_row(place):
    return tuple(x[None, :] for x in place)


def _forward(first_ref, segments_ref, q_ref, k_ref, v_ref, o_ref, lse_ref, max_ref, *, shape):
    i = pl.num_programs(0) - 1 - pl.program_id(0)  # the longest rows begin first
    first = i * shape.queries
    q = shape.load(q_ref, first, shape.queries, shape.Y)
    q_at = _as_column(_places(shape, segments_ref, first, shape.queries))

    def step(j, state):
        o, m, total = state
        at = j * shape.keys
        k_at = _as_row(_places(shape, segments_ref, at, shape.keys))
        s = _logits(shape, q, shape.load(k_ref, at, shape.keys, shape.Y), q_at, k_at)
        m_new = jnp.maximum(m, s.max(1))
        top = capped(m_new, shape.soft_cap)
        p = jnp.where(s > MASKED, jnp.exp(capped(s, shape.soft_cap) - top[:, None]), 0.0)
        shrink = jnp.exp(capped(m, shape.soft_cap) - top)
        v = shape.load(v_ref, at, shape.keys, shape.V)
        o = [x * shrink[:, None] + product(p.astype(y.dtype), y, (1, 0)) for x, y in zip(o, v, strict=True)]
        return o, m_new, total * shrink + p.sum(1)

    empty = (
        [jnp.zeros((shape.queries, size), jnp.float32) for _, size in parts(shape.V)],
        jnp.full(shape.queries, MASKED, jnp.float32),
        jnp.zeros(shape.queries, jnp.float32),
    )
    o, m, total = lax.fori_loop(first_ref[i], _keys_end(shape, first), step, empty)
    total = jnp.maximum(total, 1e-30)  # of a row without any key: 0, not nan
    shape.store(o_ref, first, [x / total[:, None] for x in o], shape.V)
    shape.store_rows(lse_ref, first, capped(m, shape.soft_cap) + jnp.log(total))
    max_ref[i] = m.max()


def _keys_end(shape, first):
    """One after the last block of keys that queries from `first` on may see."""
    return pl.cdiv(jnp.minimum(first + shape.queries, shape.T), shape.keys)


def _d_logits(shape, s, lse, d_p, delta, dtype):
    """Weights and gradients of the logits, for products in `dtype`; `lse` and `delta` broadcast over keys."""
    p = jnp.where(s > MASKED, jnp.exp(capped(s, shape.soft_cap) - lse), 0.0)
    d_s = p * (d_p - delta) * shape.scale
    if shape.soft_cap:
        d_s = d_s * (1 - jnp.square(jnp.tanh(s / shape.soft_cap)))
    return p.astype(dtype), d_s.astype(dtype)


def _d_queries(first_ref, segments_ref, q_ref, k_ref, v_ref, d_o_ref, lse_ref, delta_ref, d_q_ref, *, shape):
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    first = i * shape.queries
    q, d_o = (shape.load(ref, first, shape.queries, width) for ref, width in ((q_ref, shape.Y), (d_o_ref, shape.V)))
    lse, delta = (shape.load_rows(ref, first, shape.queries)[:, None] for ref in (lse_ref, delta_ref))
    q_at = _as_column(_places(shape, segments_ref, first, shape.queries))

    def step(j, d_q):
        at = j * shape.keys
        k = shape.load(k_ref, at, shape.keys, shape.Y)
        s = _logits(shape, q, k, q_at, _as_row(_places(shape, segments_ref, at, shape.keys)))
        d_p = _sum_products(d_o, shape.load(v_ref, at, shape.keys, shape.V), (1, 1))
        _, d_s = _d_logits(shape, s, lse, d_p, delta, q_ref.dtype)
        return [x + product(d_s, y, (1, 0)) for x, y in zip(d_q, k, strict=True)]

    zero = [jnp.zeros((shape.queries, size), jnp.float32) for _, size in parts(shape.Y)]
    shape.store(d_q_ref, first, lax.fori_loop(first_ref[i], _keys_end(shape, first), step, zero), shape.Y)


def _d_keys(last_ref, segments_ref, q_ref, k_ref, v_ref, d_o_ref, lse_ref, delta_ref, d_k_ref, d_v_ref, *, shape):
    j = pl.program_id(0)  # the longest columns begin first
    first = j * shape.keys
    k, v = (shape.load(ref, first, shape.keys, width) for ref, width in ((k_ref, shape.Y), (v_ref, shape.V)))
    k_at = _as_column(_places(shape, segments_ref, first, shape.keys))

    def step(i, state):
        d_k, d_v = state
        at = i * shape.queries
        q, d_o = (shape.load(ref, at, shape.queries, width) for ref, width in ((q_ref, shape.Y), (d_o_ref, shape.V)))
        lse, delta = (shape.load_rows(ref, at, shape.queries)[None, :] for ref in (lse_ref, delta_ref))
        # Logits with keys as rows, so that no product needs its left operand transposed.
        s = _logits(shape, k, q, _as_row(_places(shape, segments_ref, at, shape.queries)), k_at)
        p, d_s = _d_logits(shape, s, lse, _sum_products(v, d_o, (1, 1)), delta, q_ref.dtype)
        d_k = [x + product(d_s, y, (1, 0)) for x, y in zip(d_k, q, strict=True)]
        return d_k, [x + product(p, y, (1, 0)) for x, y in zip(d_v, d_o, strict=True)]

    zero = [[jnp.zeros((shape.keys, size), jnp.float32) for _, size in parts(width)] for width in (shape.Y, shape.V)]
    d_k, d_v = lax.fori_loop(first // shape.queries, last_ref[j], step, tuple(zero))
    shape.store(d_k_ref, first, d_k, shape.Y)
    shape.store(d_v_ref, first, d_v, shape.V)
