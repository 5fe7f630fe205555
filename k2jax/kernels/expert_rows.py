"""The experts' feed-forward over rows that arrived from other devices, and its backward pass in two halves.

A row is one token; it may use several of the experts here. (Row, choice) pairs are sorted by expert and cut into blocks of one
expert each; loops with a dynamic trip count gather a block's rows, multiply, and add the result back, so memory does not depend
on how many experts a row uses and cost goes with the pairs. Weights of all layers are read, and their gradients added, in
place: `gate_LEDF[slot, expert]` inside the loop. The forward pass may keep SwiGLU's inputs for the backward one, which else
computes them again. The backward pass gives the rows' gradients first and keeps what the weights' gradients need, so that those
can run beside the transfer of the former (report 2.4.2: decoupled weight gradient). This is the jnp form.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.kernels.grouped_matmul import argsort, swiglu, through_swiglu


class Experts(NamedTuple):
    """Weights, or their gradients in float32, of the experts here, stacked over layer slots."""

    gate_LEDF: jax.Array
    up_LEDF: jax.Array
    down_LEFD: jax.Array


class Blocks(NamedTuple):
    """Pairs of (row, choice) sorted by expert, and the blocks that cover them."""

    pair_N: jax.Array  # flat (row, choice) in order of expert; a block's length of padding at the end
    expert_M: jax.Array  # expert of each block
    start_M: jax.Array  # first pair of each block
    end_M: jax.Array  # one after the last pair of the block's expert
    count: jax.Array  # blocks that exist


def block_rows(pairs: int, n_experts: int) -> int:
    """Rows a block, between 16 and 512: about half an expert's share, so that little of a block is padding."""
    half = pairs // n_experts // 2
    return min(512, max(16, 1 << half.bit_length() >> 1))  # the power of two below


def sort_pairs(expert_XK: Int[Array, "X K"], n_experts: int, block: int) -> Blocks:
    """Sorts the pairs by expert; an expert of -1 is no pair."""
    expert_N = jnp.where(expert_XK < 0, n_experts, expert_XK).reshape(-1)
    pairs = expert_N.size
    pair_N = jnp.pad(argsort(expert_N, n_experts + 1), (0, block))
    count_E = jnp.zeros(n_experts, jnp.int32).at[expert_N].add(1, mode="drop")
    first_E, blocks_E = jnp.cumsum(count_E) - count_E, -(-count_E // block)
    first_block_E = jnp.cumsum(blocks_E) - blocks_E
    M = pairs // block + min(n_experts, pairs)
    place_M = jnp.arange(M, dtype=jnp.int32)
    expert_M = jnp.searchsorted(jnp.cumsum(blocks_E), place_M, side="right").astype(jnp.int32)
    expert_M = jnp.minimum(expert_M, n_experts - 1)
    start_M = first_E[expert_M] + (place_M - first_block_E[expert_M]) * block
    return Blocks(pair_N, expert_M, start_M, (first_E + count_E)[expert_M], blocks_E.sum())


class _Block(NamedTuple):
    """One block: its expert, and for each place the row (beyond the end where there is none) and the weight (0 there)."""

    expert: jax.Array
    row_b: jax.Array
    pair_b: jax.Array
    weight_b: jax.Array


def _block(blocks: Blocks, weight_XK, m, block: int) -> _Block:
    X, K = weight_XK.shape
    start = blocks.start_M[m]
    place = jnp.arange(block, dtype=jnp.int32)
    pair = lax.dynamic_slice_in_dim(blocks.pair_N, start, block)
    live = start + place < blocks.end_M[m]
    weight = jnp.where(live, weight_XK.reshape(-1)[pair], 0)
    # Distinct places beyond the end: what is gathered there is 0, what is scattered there is dropped.
    return _Block(blocks.expert_M[m], jnp.where(live, pair // K, X + place), jnp.where(live, pair, X * K + place), weight)


def _take(x_XD, row_b):
    return x_XD.at[row_b].get(mode="fill", fill_value=0)


def _add(y_XD, row_b, value):
    return y_XD.at[row_b].add(value.astype(y_XD.dtype), mode="drop", unique_indices=True)


def _at(w, slot, expert):
    return lax.dynamic_slice(w, (slot, expert, 0, 0), (1, 1, *w.shape[2:]))[0, 0]


def _dot(a, b, contract):
    return lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())), preferred_element_type=jnp.float32)


def _put(stacks, new, m):
    """`stack[m] = new`, stack by stack."""
    return type(stacks)(*(lax.dynamic_update_index_in_dim(a, b, m, 0) for a, b in zip(stacks, new, strict=True)))


def _get(stacks, m):
    return type(stacks)(*(lax.dynamic_index_in_dim(a, m, keepdims=False) for a in stacks))


class Gates(NamedTuple):
    """Gate and up projection of some blocks, [blocks, rows, F]: SwiGLU's inputs."""

    gate: jax.Array
    up: jax.Array


def _gates(x, experts: Experts, slot, expert) -> Gates:
    return Gates(*(_dot(x, _at(w, slot, expert), (1, 0)).astype(x.dtype) for w in (experts.gate_LEDF, experts.up_LEDF)))


def forward(
    x_XD: Float[Array, "X D"],
    blocks: Blocks,
    weight_XK: Float[Array, "X K"],
    experts: Experts,
    slot: Int[Array, ""],
    block: int,
    keep: int,
) -> tuple[Float[Array, "X D"], Gates]:
    """`sum_k weight_k FFN_(expert_k)(x)` over the experts here (DeepSeek-V3 eq. 12), and SwiGLU's inputs of `keep` blocks."""

    def output_of(m, y_XD):
        e, row_b, _, weight_b = _block(blocks, weight_XK, m, block)
        x = _take(x_XD, row_b)
        gates = _gates(x, experts, slot, e)
        hidden = swiglu(*gates, weight_b, x.dtype)
        return _add(y_XD, row_b, _dot(hidden, _at(experts.down_LEFD, slot, e), (1, 0))), gates

    def keeping(m, carry):
        y_XD, kept = carry
        y_XD, new = output_of(m, y_XD)
        return y_XD, _put(kept, new, m)

    y_XD, F = jnp.zeros_like(x_XD), experts.gate_LEDF.shape[-1]
    kept = Gates(*(jnp.zeros((keep, block, F), x_XD.dtype) for _ in Gates._fields))
    if keep:
        y_XD, kept = lax.fori_loop(0, jnp.minimum(blocks.count, keep), keeping, (y_XD, kept))
    if keep < blocks.expert_M.size:
        y_XD = lax.fori_loop(keep, jnp.maximum(blocks.count, keep), lambda m, y_XD: output_of(m, y_XD)[0], y_XD)
    return y_XD, kept


class Kept(NamedTuple):
    """What the weights' gradients need of each block, [blocks, rows, F]."""

    d_gate: jax.Array
    d_up: jax.Array
    hidden: jax.Array  # weighted, the input of the down projection


class RowGradients(NamedTuple):
    """Gradients of the rows and of their weights."""

    d_x_XD: jax.Array
    d_weight_XK: jax.Array  # float32


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
    gates: Gates | None = None,
) -> tuple[RowGradients, Kept, Experts]:
    """The rows' half of the backward pass; what the weights' half needs of the first `keep` blocks is kept.

    `gates` are SwiGLU's inputs of the same blocks, from the forward pass; those that are not given are computed again. Blocks
    beyond `keep`, which only an unbalanced routing has, add their weights' gradients at once.
    """
    F = experts.gate_LEDF.shape[-1]

    def gradients_of(m, out: RowGradients, gates: Gates | None):
        e, row_b, pair_b, weight_b = _block(blocks, weight_XK, m, block)
        w_gate, w_up, w_down = (_at(w, slot, e) for w in experts)
        gates = gates or _gates(_take(x_XD, row_b), experts, slot, e)
        d_hidden = _dot(_take(d_y_XD, row_b), w_down, (1, 1))
        d_gate, d_up, hidden, d_weight_b = through_swiglu(*gates, weight_b, d_hidden)
        d_x = _dot(d_gate, w_gate, (1, 1)) + _dot(d_up, w_up, (1, 1))
        d_weight_XK = out.d_weight_XK.reshape(-1).at[pair_b].set(d_weight_b, mode="drop", unique_indices=True)
        out = RowGradients(_add(out.d_x_XD, row_b, d_x), d_weight_XK.reshape(weight_XK.shape))
        return out, Kept(d_gate, d_up, hidden)

    def keeping(m, carry):
        out, kept = carry
        out, new = gradients_of(m, out, gates and _get(gates, m))
        return out, _put(kept, new, m)

    def adding(m, carry):
        out, gradients = carry
        out, new = gradients_of(m, out, None)
        return out, _add_block(gradients, x_XD, d_y_XD, _block(blocks, weight_XK, m, block), new, slot)

    out = RowGradients(jnp.zeros_like(x_XD), jnp.zeros(weight_XK.shape, jnp.float32))
    kept = Kept(*(jnp.zeros((keep, block, F), x_XD.dtype) for _ in Kept._fields))
    if keep:
        out, kept = lax.fori_loop(0, jnp.minimum(blocks.count, keep), keeping, (out, kept))
    if keep < blocks.expert_M.size:
        out, gradients = lax.fori_loop(keep, jnp.maximum(blocks.count, keep), adding, (out, gradients))
    return out, kept, gradients


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
    """The weights' half: adds the kept blocks' gradients to `gradients[slot, expert]`, in place."""

    def body(m, gradients):
        return _add_block(gradients, x_XD, d_y_XD, _block(blocks, weight_XK, m, block), _get(kept, m), slot)

    keep = kept.hidden.shape[0]
    return lax.fori_loop(0, jnp.minimum(blocks.count, keep), body, gradients) if keep else gradients


def _add_block(gradients: Experts, x_XD, d_y_XD, of: _Block, kept: Kept, slot) -> Experts:
    x, d_y = _take(x_XD, of.row_b), _take(d_y_XD, of.row_b)

    def add(total, a, b):
        start = (slot, of.expert, 0, 0)
        return lax.dynamic_update_slice(total, (_at(total, slot, of.expert) + _dot(a, b, (0, 0)))[None, None], start)

    return Experts(
        add(gradients.gate_LEDF, x, kept.d_gate),
        add(gradients.up_LEDF, x, kept.d_up),
        add(gradients.down_LEFD, kept.hidden, d_y),
    )
