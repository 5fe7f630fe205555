"""The routed experts' feed-forward, grouped by expert: cost goes with tokens, not with experts.

Every (token, chosen expert) pair is a row. Rows are sorted by expert and each expert's rows are padded to whole blocks, so that
a block meets one expert's weights; a loop with a dynamic trip count runs over the blocks that exist. Exact for any routing, no
token is dropped, and routing never changes a shape. This is the jnp form: the CPU path and the reference.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 64  # rows a block; within 5 % of the best of 32, 64 and 128 on CPU for 64 to 512 experts of width 32 and 64


class Blocks(NamedTuple):
    """Where every row lies after sorting by expert and padding to blocks."""

    slot_XK: jax.Array  # padded place of each (token, choice)
    token_P: jax.Array  # token of each padded place; 0 at padding
    choice_P: jax.Array  # flat (token, choice) of each padded place; the number of rows at padding
    expert_M: jax.Array  # expert of each block
    count: jax.Array  # blocks that exist


def sort_into_blocks(expert_XK: Int[Array, "X K"], n_experts: int, block: int = BLOCK) -> Blocks:
    """Sorts the rows by expert and pads each expert to whole blocks; buffers hold rows/block + n_experts blocks."""
    rows, k = expert_XK.size, expert_XK.shape[1]
    expert_N = expert_XK.reshape(-1)
    order_N = argsort(expert_N, n_experts)
    count_E = jnp.zeros(n_experts, jnp.int32).at[expert_N].add(1)
    blocks_E = (count_E + block - 1) // block
    first_block_E, first_row_E = jnp.cumsum(blocks_E) - blocks_E, jnp.cumsum(count_E) - count_E
    sorted_N = expert_N[order_N]
    place_N = (first_block_E * block - first_row_E)[sorted_N] + jnp.arange(rows, dtype=jnp.int32)
    slot_N = jnp.zeros(rows, jnp.int32).at[order_N].set(place_N, unique_indices=True)
    places = (rows // block + min(n_experts, rows)) * block
    choice_P = jnp.full(places, rows, jnp.int32).at[place_N].set(order_N, unique_indices=True)
    token_P = jnp.where(choice_P < rows, choice_P // k, 0)
    starts_M = jnp.zeros(places // block + 1, jnp.int32).at[first_block_E[1:]].add(1, mode="drop")
    expert_M = jnp.cumsum(starts_M)[:-1]
    return Blocks(slot_N.reshape(expert_XK.shape), token_P, choice_P, expert_M, blocks_E.sum())


def argsort(expert_N: Int[Array, " N"], n_experts: int) -> Int[Array, " N"]:
    """Stable argsort; one integer key (expert, row) sorts four times faster than a key with a payload."""
    rows = expert_N.size
    iota = jnp.arange(rows, dtype=jnp.int32)
    if n_experts * rows < 2**31:
        return lax.sort(expert_N * rows + iota) % rows
    return lax.sort_key_val(expert_N, iota)[1]


@jax.custom_vjp
def routed_swiglu(
    x_XD: Float[Array, "X D"],
    expert_XK: Int[Array, "X K"],
    weight_XK: Float[Array, "X K"],
    gate_EDF: Float[Array, "E D F"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
) -> Float[Array, "X D"]:
    """`sum_k weight_k * FFN_(expert_k)(x)` for each token, `FFN(x) = (silu(x @ gate) * (x @ up)) @ down` (DeepSeek-V3 eq. 12).

    The weight multiplies the hidden activation (width F) instead of the output (width D); padding rows have weight 0.
    Accumulates in float32; differentiable in x, weight and the three matrices.
    """
    return _forward(x_XD, expert_XK, weight_XK, gate_EDF, up_EDF, down_EFD)[0]


def _rows(x, i, block):
    return lax.dynamic_slice_in_dim(x, i * block, block)


def _put_rows(x, value, i, block):
    return lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), i * block, 0)


def _expert(w, e):
    return lax.dynamic_index_in_dim(w, e, keepdims=False)


def _dot(a, b, contract):
    return lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())), preferred_element_type=jnp.float32)


def _padded_weight(blocks, weight_XK):
    return jnp.concatenate([weight_XK.reshape(-1), jnp.zeros(1, weight_XK.dtype)])[blocks.choice_P]


def _forward(x_XD, expert_XK, weight_XK, gate_EDF, up_EDF, down_EFD):
    E, _, F = gate_EDF.shape
    blocks = sort_into_blocks(expert_XK, E)
    weight_P = _padded_weight(blocks, weight_XK)
    x_PD = x_XD[blocks.token_P]

    def body(i, out):
        y_PD, gate_PF, up_PF = out
        e = blocks.expert_M[i]
        x = _rows(x_PD, i, BLOCK)
        gate, up = _dot(x, _expert(gate_EDF, e), (1, 0)), _dot(x, _expert(up_EDF, e), (1, 0))
        hidden = jax.nn.silu(gate) * up * _rows(weight_P, i, BLOCK)[:, None]
        y = _dot(hidden.astype(x.dtype), _expert(down_EFD, e), (1, 0))
        return _put_rows(y_PD, y, i, BLOCK), _put_rows(gate_PF, gate, i, BLOCK), _put_rows(up_PF, up, i, BLOCK)

    places = x_PD.shape[0]
    hidden = jnp.zeros((places, F), x_XD.dtype)
    y_PD, gate_PF, up_PF = lax.fori_loop(0, blocks.count, body, (jnp.zeros_like(x_PD), hidden, hidden))
    y_XD = _sum_choices(y_PD, blocks.slot_XK)
    return y_XD, (x_XD, blocks, weight_P, gate_EDF, up_EDF, down_EFD, gate_PF, up_PF)


def _sum_choices(y_PD, slot_XK):
    """Adds a token's K rows; K gathers of rows are ten times faster on CPU than one gather of [X, K, D] and a sum."""
    total = y_PD[slot_XK[:, 0]].astype(jnp.float32)
    for k in range(1, slot_XK.shape[1]):
        total = total + y_PD[slot_XK[:, k]]
    return total.astype(y_PD.dtype)


def _backward(saved, dy_XD):
    x_XD, blocks, weight_P, gate_EDF, up_EDF, down_EFD, gate_PF, up_PF = saved
    x_PD, dy_PD = x_XD[blocks.token_P], dy_XD[blocks.token_P]

    def body(i, out):
        dx_PD, dweight_P, dgate_EDF, dup_EDF, ddown_EFD = out
        e = blocks.expert_M[i]
        x, dy = _rows(x_PD, i, BLOCK), _rows(dy_PD, i, BLOCK)
        weight = _rows(weight_P, i, BLOCK)[:, None]
        gate, up = (_rows(a, i, BLOCK).astype(jnp.float32) for a in (gate_PF, up_PF))
        sigmoid = jax.nn.sigmoid(gate)
        silu = gate * sigmoid
        hidden = silu * up  # before the weight
        dhidden = _dot(dy, _expert(down_EFD, e), (1, 1))
        dweight = (dhidden * hidden).sum(-1)
        dhidden = dhidden * weight
        dup = (dhidden * silu).astype(x.dtype)
        dgate = (dhidden * up * (sigmoid + silu * (1 - sigmoid))).astype(x.dtype)
        dx = _dot(dgate, _expert(gate_EDF, e), (1, 1)) + _dot(dup, _expert(up_EDF, e), (1, 1))

        def add(total, value):
            return lax.dynamic_update_index_in_dim(total, _expert(total, e) + value, e, 0)

        return (
            _put_rows(dx_PD, dx, i, BLOCK),
            _put_rows(dweight_P, dweight, i, BLOCK),
            add(dgate_EDF, _dot(x, dgate, (0, 0))),
            add(dup_EDF, _dot(x, dup, (0, 0))),
            add(ddown_EFD, _dot((hidden * weight).astype(x.dtype), dy, (0, 0))),
        )

    zeros = [jnp.zeros(w.shape, jnp.float32) for w in (gate_EDF, up_EDF, down_EFD)]
    start = (jnp.zeros_like(x_PD), jnp.zeros(weight_P.shape, jnp.float32), *zeros)
    dx_PD, dweight_P, *dw = lax.fori_loop(0, blocks.count, body, start)
    dweights = [g.astype(w.dtype) for g, w in zip(dw, (gate_EDF, up_EDF, down_EFD), strict=True)]
    return _sum_choices(dx_PD, blocks.slot_XK), None, dweight_P[blocks.slot_XK].astype(weight_P.dtype), *dweights


routed_swiglu.defvjp(_forward, _backward)
