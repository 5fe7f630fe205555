"""The experts' feed-forward over rows that arrived from other devices, by the form of the platform.

`expert_rows` goes through its blocks one by one. On NVIDIA GPUs, in half precision, as many blocks as a balanced routing fills
are one grouped product each (`grouped_matmul_triton`), and a loop over such parts does the rest of an unbalanced one: the same
blocks, so that what is kept of them is the same too. Rows are read where they arrived, weights and their
gradients in the stacks of all layers; a row's answers are summed by looking them up, so the order of sums never changes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.kernels import expert_rows
from k2jax.kernels.expert_rows import Blocks, Experts, Gates, Kept, RowGradients
from k2jax.kernels.grouped_matmul import TRITON, Products, kernel_takes, swiglu, through_swiglu
from k2jax.kernels.grouped_matmul_triton import Groups, Taken


def forward(
    x_XD: Float[Array, "X D"],
    blocks: Blocks,
    weight_XK: Float[Array, "X K"],
    experts: Experts,
    slot: Int[Array, ""],
    block: int,
    keep: int,
    part: int,
) -> tuple[Float[Array, "X D"], Gates]:
    """`expert_rows.forward`; a kernel does `part` blocks at a time, and `keep` is `part` or 0."""
    args = x_XD, blocks, weight_XK, experts, slot
    loop = functools.partial(expert_rows.forward, block=block, keep=keep)
    if not kernel_takes(x_XD, experts.gate_LEDF):
        return loop(*args)
    kernel = functools.partial(grouped_forward, TRITON, block=block, keep=keep, part=part)
    return lax.platform_dependent(*args, default=loop, cuda=kernel)


def backward_rows(
    x_XD: Float[Array, "X D"],
    d_y_XD: Float[Array, "X D"],
    blocks: Blocks,
    weight_XK: Float[Array, "X K"],
    experts: Experts,
    slot: Int[Array, ""],
    block: int,
    gradients: Experts,
    keep: int,
    part: int,
    gates: Gates | None = None,
) -> tuple[RowGradients, Kept, Experts]:
    """`expert_rows.backward_rows`; a kernel does `part` blocks at a time, and `keep` is `part` or 0."""
    args = x_XD, d_y_XD, blocks, weight_XK, experts, slot, gradients, gates

    def loop(x_XD, d_y_XD, blocks, weight_XK, experts, slot, gradients, gates):
        return expert_rows.backward_rows(x_XD, d_y_XD, blocks, weight_XK, experts, slot, block, gradients, keep, gates)

    if not kernel_takes(x_XD, experts.gate_LEDF):
        return loop(*args)
    kernel = functools.partial(grouped_backward_rows, TRITON, block=block, keep=keep, part=part)
    return lax.platform_dependent(*args, default=loop, cuda=kernel)


def backward_weights(
    x_XD: Float[Array, "X D"],
    d_y_XD: Float[Array, "X D"],
    blocks: Blocks,
    weight_XK: Float[Array, "X K"],
    kept: Kept,
    slot: Int[Array, ""],
    block: int,
    gradients: Experts,
) -> Experts:
    """`expert_rows.backward_weights`."""
    args = x_XD, d_y_XD, blocks, weight_XK, kept, slot, gradients

    def loop(x_XD, d_y_XD, blocks, weight_XK, kept, slot, gradients):
        return expert_rows.backward_weights(x_XD, d_y_XD, blocks, weight_XK, kept, slot, block, gradients)

    if not kernel_takes(x_XD, kept.hidden):
        return loop(*args)
    kernel = functools.partial(grouped_backward_weights, TRITON, block=block)
    return lax.platform_dependent(*args, default=loop, cuda=kernel)


class _Part(NamedTuple):
    """The places of some blocks, their rows one after the other, as grouped products want them."""

    row_P: jax.Array  # 0 where there is none
    weight_P: jax.Array  # 0 there
    place_XK: jax.Array  # of each (row, choice); beyond the end if it is not in this part
    groups: Groups  # matrices counted through all layer slots

    @classmethod
    def of(cls, blocks: Blocks, weight_XK, n_experts: int, slot, first, count: int, block: int) -> "_Part":
        """`count` blocks from `first` on. All blocks of an expert but its last are full, so its places have no gap."""
        K = weight_XK.shape[1]
        m = first + jnp.arange(count, dtype=jnp.int32)
        exists_M, m = m < blocks.count, jnp.minimum(m, blocks.expert_M.size - 1)
        start_M = jnp.where(exists_M, blocks.start_M[m], 0)
        rows_M = jnp.where(exists_M, jnp.clip(blocks.end_M[m] - start_M, 0, block), 0)
        place_b = jnp.arange(block, dtype=jnp.int32)
        live_P = (place_b[None] < rows_M[:, None]).reshape(-1)
        pair_P = blocks.pair_N[start_M[:, None] + place_b[None]].reshape(-1)
        weight_P = jnp.where(live_P, weight_XK.reshape(-1)[pair_P], 0)
        P, pairs = count * block, weight_XK.size
        place_N = (
            jnp.full(pairs, P, jnp.int32).at[jnp.where(live_P, pair_P, pairs)].set(jnp.arange(P, dtype=jnp.int32), mode="drop")
        )
        expert_M, experts_E = jnp.where(exists_M, blocks.expert_M[m], n_experts), jnp.arange(n_experts, dtype=jnp.int32)
        first_E = jnp.searchsorted(expert_M, experts_E, method="compare_all").astype(jnp.int32) * block
        rows_E = jnp.zeros(n_experts, jnp.int32).at[expert_M].add(rows_M, mode="drop")
        groups = Groups(first_E, first_E + rows_E, slot * n_experts + experts_E)
        return cls(jnp.where(live_P, pair_P // K, 0), weight_P, place_N.reshape(weight_XK.shape), groups)

    def sum_rows(self, y_PD: Float[Array, "P D"]) -> Float[Array, "X D"]:
        """Adds what a row's places hold, in float32; places that no product wrote are never looked at."""
        columns = (y_PD.at[place_X].get(mode="fill", fill_value=0) for place_X in self.place_XK.T)
        return functools.reduce(jnp.add, (y.astype(jnp.float32) for y in columns)).astype(y_PD.dtype)


def _flat(stacks: Experts) -> Experts:
    """Matrices of all slots as one list."""
    return Experts(*(w.reshape(-1, *w.shape[2:]) for w in stacks))


def _parts(blocks: Blocks, part: int) -> Int[Array, ""]:
    return -(-blocks.count // part)


def _require_whole(keep: int, part: int) -> None:
    if keep not in (0, part):
        raise ValueError(f"all blocks of a part are kept, or none; got {keep=}, {part=}")


def _gates(products: Products, x: Taken, w: Experts, groups: Groups) -> Gates:
    return Gates(*(products.multiply([x], [m], groups) for m in (w.gate_LEDF, w.up_LEDF)))


def grouped_forward(products: Products, x_XD, blocks, weight_XK, experts, slot, block: int, keep: int, part: int):
    """`expert_rows.forward` in grouped products."""
    _require_whole(keep, part)
    (_, E, _, F), w = experts.gate_LEDF.shape, _flat(experts)

    def output_of(p):
        these = _Part.of(blocks, weight_XK, E, slot, p * part, part, block)
        gates = _gates(products, Taken(x_XD, these.row_P), w, these.groups)
        hidden = swiglu(*gates, these.weight_P, x_XD.dtype)
        return these.sum_rows(products.multiply([hidden], [w.down_LEFD], these.groups)), gates

    if keep:
        y_XD, gates = output_of(0)
    else:
        y_XD, gates = jnp.zeros_like(x_XD), Gates(*(jnp.zeros((0, F), x_XD.dtype) for _ in Gates._fields))
    if keep < blocks.expert_M.size:
        y_XD = lax.fori_loop(keep // part, _parts(blocks, part), lambda p, y_XD: y_XD + output_of(p)[0], y_XD)
    return y_XD, Gates(*(a.reshape(keep, block, F) for a in gates))


def grouped_backward_rows(
    products: Products, x_XD, d_y_XD, blocks, weight_XK, experts, slot, gradients, gates, block: int, keep: int, part: int
):
    """`expert_rows.backward_rows` in grouped products."""
    _require_whole(keep, part)
    (_, E, _, F), w = experts.gate_LEDF.shape, _flat(experts)

    def gradients_of(p, gates: Gates | None):
        these = _Part.of(blocks, weight_XK, E, slot, p * part, part, block)
        gates = gates or _gates(products, Taken(x_XD, these.row_P), w, these.groups)
        d_hidden = products.multiply([Taken(d_y_XD, these.row_P)], [w.down_LEFD], these.groups, transposed=True)
        d_gate, d_up, hidden, d_weight_P = through_swiglu(*gates, these.weight_P, d_hidden)
        d_x_PD = products.multiply([d_gate, d_up], [w.gate_LEDF, w.up_LEDF], these.groups, transposed=True)
        d_weight_XK = d_weight_P.at[these.place_XK].get(mode="fill", fill_value=0)
        return these, RowGradients(these.sum_rows(d_x_PD), d_weight_XK), Kept(d_gate, d_up, hidden)

    def adding(p, carry):
        out, gradients = carry
        these, new, kept = gradients_of(p, None)
        return jax.tree.map(jnp.add, out, new), _add(products, gradients, x_XD, d_y_XD, these, kept)

    if keep:
        _, out, kept = gradients_of(0, gates and Gates(*(a.reshape(-1, F) for a in gates)))
    else:
        out = RowGradients(jnp.zeros_like(x_XD), jnp.zeros(weight_XK.shape, jnp.float32))
        kept = Kept(*(jnp.zeros((0, F), x_XD.dtype) for _ in Kept._fields))
    if keep < blocks.expert_M.size:
        out, gradients = lax.fori_loop(keep // part, _parts(blocks, part), adding, (out, gradients))
    return out, Kept(*(a.reshape(keep, block, F) for a in kept)), gradients


def grouped_backward_weights(products: Products, x_XD, d_y_XD, blocks, weight_XK, kept, slot, gradients, block: int):
    """`expert_rows.backward_weights` in grouped products."""
    keep, _, F = kept.hidden.shape
    if not keep:
        return gradients
    these = _Part.of(blocks, weight_XK, gradients.gate_LEDF.shape[1], slot, 0, keep, block)
    return _add(products, gradients, x_XD, d_y_XD, these, Kept(*(a.reshape(-1, F) for a in kept)))


def _add(products: Products, gradients: Experts, x_XD, d_y_XD, these: _Part, kept: Kept) -> Experts:
    x, d_y = Taken(x_XD, these.row_P), Taken(d_y_XD, these.row_P)
    pairs = (x, kept.d_gate), (x, kept.d_up), (kept.hidden, d_y)
    new = (products.weight_gradient(*pair, these.groups, w) for pair, w in zip(pairs, _flat(gradients), strict=True))
    return Experts(*(w.reshape(total.shape) for w, total in zip(new, gradients, strict=True)))
