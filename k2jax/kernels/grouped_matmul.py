"""The routed experts' feed-forward, grouped by expert: cost goes with tokens, not with experts.

Every (token, chosen expert) pair is a row. Rows are sorted by expert and each expert's rows are padded to whole blocks, so that
a block meets one expert's weights. Exact for any routing, no token is dropped, and routing never changes a shape.

In jnp, the CPU path and the reference, a loop with a dynamic trip count runs over the blocks that exist, several of small
matrices in a turn. In half precision, on NVIDIA GPUs the products are Pallas kernels over the same rows
(`grouped_matmul_triton`), on TPUs jax's `ragged_dot`, which has a kernel there; SwiGLU between them is left to XLA, since a
kernel that took it in would save 1.6% of a layer's least time at K2's shapes. GSPMD does not partition the kernels: on a mesh
call this inside shard_map.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.kernels import grouped_matmul_triton as triton
from k2jax.kernels.grouped_matmul_triton import Groups, Rows, Taken
from k2jax.kernels.tiles import nvidia_is_capable

TURN_ROWS = 512  # the most rows in a turn of the loop; on CPU 8 to 30% faster than one block, for matrices of 1,024 to 4,096
TURN_NUMBERS = 2**17  # the most numbers in one kind of matrix there: each turn copies its own


class Blocks(NamedTuple):
    """Where every row lies after sorting by expert and padding to blocks."""

    slot_XK: jax.Array  # padded place of each (token, choice)
    token_P: jax.Array  # token of each padded place; 0 at padding
    choice_P: jax.Array  # flat (token, choice) of each padded place; the number of rows at padding
    expert_tM: jax.Array  # expert of each block, a row for each turn of the loop
    count: jax.Array  # blocks that exist
    first_E: jax.Array  # each expert's first block


def block_rows(rows: int, n_experts: int) -> int:
    """Rows a block, within 5% of the best of 32, 64 and 128 on CPU for 64 to 512 experts of width 16 to 64."""
    return 32 if rows < 64 * n_experts else 64


def sort_into_blocks(expert_XK: Int[Array, "X K"], n_experts: int, block: int, turn: int) -> Blocks:
    """Sorts the rows by expert and pads each expert to whole blocks; buffers hold rows/block + n_experts blocks, up to a
    multiple of `turn`."""
    rows, k = expert_XK.size, expert_XK.shape[1]
    expert_N = expert_XK.reshape(-1)
    order_N = argsort(expert_N, n_experts)
    count_E = jnp.zeros(n_experts, jnp.int32).at[expert_N].add(1)
    blocks_E = (count_E + block - 1) // block
    first_block_E, first_row_E = jnp.cumsum(blocks_E) - blocks_E, jnp.cumsum(count_E) - count_E
    sorted_N = expert_N[order_N]
    place_N = (first_block_E * block - first_row_E)[sorted_N] + jnp.arange(rows, dtype=jnp.int32)
    slot_N = jnp.zeros(rows, jnp.int32).at[order_N].set(place_N, unique_indices=True)
    places = -(-(rows // block + min(n_experts, rows)) // turn) * turn * block
    choice_P = jnp.full(places, rows, jnp.int32).at[place_N].set(order_N, unique_indices=True)
    token_P = jnp.where(choice_P < rows, choice_P // k, 0)
    starts_M = jnp.zeros(places // block + 1, jnp.int32).at[first_block_E[1:]].add(1, mode="drop")
    expert_tM = jnp.cumsum(starts_M)[:-1].reshape(-1, turn)
    return Blocks(slot_N.reshape(expert_XK.shape), token_P, choice_P, expert_tM, blocks_E.sum(), first_block_E)


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


def _turn(rows: int, n_experts: int, numbers: int) -> int:
    """Blocks in a turn of the loop, for matrices of so many numbers."""
    block = block_rows(rows, n_experts)
    return max(1, min(TURN_ROWS // block, TURN_NUMBERS // numbers, rows // block + min(n_experts, rows)))


def _rows(x_P, i, expert_tM):
    """Turn i's places, [block of the turn, row, ...]."""
    rows = x_P.shape[0] // expert_tM.shape[0]
    return lax.dynamic_slice_in_dim(x_P, i * rows, rows).reshape(expert_tM.shape[1], -1, *x_P.shape[1:])


def _put_rows(x_P, value, i):
    value = value.reshape(-1, *x_P.shape[1:]).astype(x_P.dtype)
    return lax.dynamic_update_slice_in_dim(x_P, value, i * value.shape[0], 0)


def _dot(a, b, contract):
    """A product for each block of a turn."""
    axes = (((1 + contract[0],), (1 + contract[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _padded_weight(blocks, weight_XK):
    return jnp.concatenate([weight_XK.reshape(-1), jnp.zeros(1, weight_XK.dtype)])[blocks.choice_P]


def _forward(x_XD, expert_XK, weight_XK, gate_EDF, up_EDF, down_EFD):
    E, D, F = gate_EDF.shape
    turn = _turn(expert_XK.size, E, D * F)
    blocks = sort_into_blocks(expert_XK, E, block_rows(expert_XK.size, E), turn)
    weight_P = _padded_weight(blocks, weight_XK)
    matrices = gate_EDF, up_EDF, down_EFD
    y_PD, gate_PF, up_PF = _by_platform(_loop_forward, _grouped_forward, x_XD, weight_P, blocks, *matrices)
    return _sum_choices(y_PD, blocks.slot_XK), (x_XD, blocks, weight_P, *matrices, gate_PF, up_PF)


def _backward(saved, dy_XD):
    x_XD, blocks, weight_P, *matrices, gate_PF, up_PF = saved
    arrays = x_XD, weight_P, blocks, *matrices, gate_PF, up_PF, dy_XD
    dx_PD, dweight_P, *dmatrices = _by_platform(_loop_backward, _grouped_backward, *arrays)
    return _sum_choices(dx_PD, blocks.slot_XK), None, dweight_P[blocks.slot_XK].astype(weight_P.dtype), *dmatrices


routed_swiglu.defvjp(_forward, _backward)


def _loop_forward(x_XD, weight_P, blocks, gate_EDF, up_EDF, down_EFD):
    """Outputs of the padded rows, and the two halves of their hidden activations."""
    x_PD = x_XD[blocks.token_P]

    def body(i, out):
        e_M = blocks.expert_tM[i]
        x, weight = (_rows(a, i, blocks.expert_tM) for a in (x_PD, weight_P))
        gate, up = _dot(x, gate_EDF[e_M], (1, 0)), _dot(x, up_EDF[e_M], (1, 0))
        y = _dot(swiglu(gate, up, weight, x.dtype), down_EFD[e_M], (1, 0))
        return tuple(_put_rows(a, new, i) for a, new in zip(out, (y, gate, up), strict=True))

    hidden = x_PD.shape[0], gate_EDF.shape[-1]
    start = (_zeros(blocks, i, shape, x_PD.dtype) for i, shape in enumerate((x_PD.shape, hidden, hidden)))
    return lax.fori_loop(0, _turns(blocks), body, tuple(start))


def _zeros(blocks, i, shape, dtype):
    """Zeros of which XLA does not know that they are: all that it knows of one shape share a buffer, which a CPU copies for
    every loop that writes into it. `i` tells apart those of one call."""
    zero = (jnp.minimum(blocks.count, 0), jnp.maximum(-blocks.count, 0), blocks.first_E[0], -blocks.first_E[0])[i]
    return jnp.broadcast_to(zero.astype(dtype), shape)


def _turns(blocks):
    return -(-blocks.count // blocks.expert_tM.shape[1])


def _sum_choices(y_PD, slot_XK):
    """Adds a token's K rows; K gathers of rows are ten times faster on CPU than one gather of [X, K, D] and a sum."""
    total = y_PD[slot_XK[:, 0]].astype(jnp.float32)
    for k in range(1, slot_XK.shape[1]):
        total = total + y_PD[slot_XK[:, k]]
    return total.astype(y_PD.dtype)


def _loop_backward(x_XD, weight_P, blocks, gate_EDF, up_EDF, down_EFD, gate_PF, up_PF, dy_XD):
    """Gradients of the padded rows, of their weights in float32, and of the matrices."""
    x_PD, dy_PD = x_XD[blocks.token_P], dy_XD[blocks.token_P]

    def body(i, out):
        dx_PD, dweight_P, dgate_EDF, dup_EDF, ddown_EFD = out
        e_M = blocks.expert_tM[i]
        x, dy, gate, up, weight = (_rows(a, i, blocks.expert_tM) for a in (x_PD, dy_PD, gate_PF, up_PF, weight_P))
        dgate, dup, hidden, dweight = through_swiglu(gate, up, weight, _dot(dy, down_EFD[e_M], (1, 1)))
        dx = _dot(dgate, gate_EDF[e_M], (1, 1)) + _dot(dup, up_EDF[e_M], (1, 1))
        return (
            _put_rows(dx_PD, dx, i),
            _put_rows(dweight_P, dweight, i),
            dgate_EDF.at[e_M].add(_dot(x, dgate, (0, 0))),
            dup_EDF.at[e_M].add(_dot(x, dup, (0, 0))),
            ddown_EFD.at[e_M].add(_dot(hidden, dy, (0, 0))),
        )

    zeros = [_zeros(blocks, i, w.shape, jnp.float32) for i, w in enumerate((gate_EDF, up_EDF, down_EFD))]
    start = (_zeros(blocks, 3, x_PD.shape, x_PD.dtype), _zeros(blocks, 3, weight_P.shape, jnp.float32), *zeros)
    dx_PD, dweight_P, *dw = lax.fori_loop(0, _turns(blocks), body, start)
    dmatrices = [g.astype(w.dtype) for g, w in zip(dw, (gate_EDF, up_EDF, down_EFD), strict=True)]
    return dx_PD, dweight_P, *dmatrices


def swiglu(gate, up, weight, dtype):
    """The weighted hidden activation, computed in float32."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * weight[..., None]).astype(dtype)


def through_swiglu(gate, up, weight, dhidden):
    """Gradients of gate and up, the weighted hidden activation, and the weight's gradient in float32."""
    dtype = gate.dtype
    gate, up, dhidden = gate.astype(jnp.float32), up.astype(jnp.float32), dhidden.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    hidden = silu * up
    dweight = (dhidden * hidden).sum(-1)
    dhidden = dhidden * weight[..., None]
    dgate = dhidden * up * (sigmoid + silu * (1 - sigmoid))
    return dgate.astype(dtype), (dhidden * silu).astype(dtype), (hidden * weight[..., None]).astype(dtype), dweight


class Products(NamedTuple):
    """A platform's grouped products: sums over pairs of rows and matrices, and the matrices' gradients."""

    multiply: Callable[..., Array]
    weight_gradient: Callable[..., Array]


def _formed(rows: Rows) -> Float[Array, "P n"]:
    return rows.x_XD[rows.row_P] if isinstance(rows, Taken) else rows


def _ragged_multiply(rows, matrices, groups, transposed=False):
    def one(x, w_Eij):
        dims = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
        sizes_E = groups.end_E - groups.first_E
        return lax.ragged_dot_general(_formed(x), w_Eij, sizes_E, dims, preferred_element_type=jnp.float32)

    return functools.reduce(jnp.add, map(one, rows, matrices)).astype(matrices[0].dtype)


def _ragged_weight_gradient(x, y, groups):
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    x_Pi, y_Pj, sizes_E = _formed(x), _formed(y), groups.end_E - groups.first_E
    return lax.ragged_dot_general(x_Pi, y_Pj, sizes_E, dims, preferred_element_type=jnp.float32).astype(x_Pi.dtype)


TRITON = Products(triton.multiply, triton.weight_gradient)
RAGGED = Products(_ragged_multiply, _ragged_weight_gradient)


def kernel_takes(*arrays: Array) -> bool:
    """Whether NVIDIA's kernels take products of these arrays."""
    return _is_half(*arrays) and nvidia_is_capable()


def _is_half(*arrays):
    return arrays[0].dtype in (jnp.bfloat16, jnp.float16) and all(x.dtype == arrays[0].dtype for x in arrays)


def _by_platform(loop, grouped, x_XD, weight_P, blocks, *arrays):
    """The form of a platform: grouped products in half precision where it has any, and the loop."""
    kernels = {"cuda": functools.partial(grouped, TRITON)} if kernel_takes(x_XD, arrays[0]) else {}
    if _is_half(x_XD, arrays[0]):
        kernels["tpu"] = functools.partial(grouped, RAGGED)
    if not kernels:
        return loop(x_XD, weight_P, blocks, *arrays)
    return lax.platform_dependent(x_XD, weight_P, blocks, *arrays, default=loop, **kernels)


def _groups(blocks: Blocks) -> Groups:
    """Each expert's places, whole blocks: padding is multiplied too, it has weight 0."""
    end_E = jnp.append(blocks.first_E[1:], blocks.count)
    block = blocks.token_P.size // blocks.expert_tM.size
    return Groups(block * blocks.first_E, block * end_E, jnp.arange(end_E.size, dtype=jnp.int32))


def _grouped_forward(products: Products, x_XD, weight_P, blocks, gate_EDF, up_EDF, down_EFD):
    """As `_loop_forward`; places beyond the blocks that exist hold anything."""
    groups = _groups(blocks)
    x = Taken(x_XD, blocks.token_P)
    gate_PF, up_PF = (products.multiply([x], [w], groups) for w in (gate_EDF, up_EDF))
    hidden_PF = swiglu(gate_PF, up_PF, weight_P, x_XD.dtype)
    return products.multiply([hidden_PF], [down_EFD], groups), gate_PF, up_PF


def _grouped_backward(products: Products, x_XD, weight_P, blocks, gate_EDF, up_EDF, down_EFD, gate_PF, up_PF, dy_XD):
    """As `_loop_backward`; places beyond the blocks that exist hold anything."""
    groups = _groups(blocks)
    x, dy = Taken(x_XD, blocks.token_P), Taken(dy_XD, blocks.token_P)
    dhidden_PF = products.multiply([dy], [down_EFD], groups, transposed=True)
    dgate_PF, dup_PF, hidden_PF, dweight_P = through_swiglu(gate_PF, up_PF, weight_P, dhidden_PF)
    dx_PD = products.multiply([dgate_PF, dup_PF], [gate_EDF, up_EDF], groups, transposed=True)
    pairs = (x, dgate_PF), (x, dup_PF), (hidden_PF, dy)
    return dx_PD, dweight_P, *(products.weight_gradient(x, y, groups) for x, y in pairs)
