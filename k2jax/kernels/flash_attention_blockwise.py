"""Attention in blocks with an online softmax, in jnp: the CPU path and the reference of the kernels.

Nothing of size [T, T] is formed above one block, and the backward pass recomputes the probabilities from the saved log-sum-exp.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MASKED = -1e30  # finite, so that a row without any allowed key gives 0 and not nan


def capped(s: Array, soft_cap: float) -> Array:
    """`soft_cap * tanh(s / soft_cap)`, which keeps order: the cap of a maximum is the maximum of the capped."""
    return jnp.where(s > MASKED, soft_cap * jnp.tanh(s / soft_cap), MASKED) if soft_cap else s


def forward(
    q_BTHY: Float[Array, "B T H Y"],
    k_BSGY: Float[Array, "B T G Y"],
    v_BSGV: Float[Array, "B T G V"],
    segments_BT: Int[Array, "B T"],
    scale: float,
    soft_cap: float,
    block: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"], Float[Array, "B H T"]]:
    """Returns output, largest logit of each head, and each row's log-sum-exp."""
    B, T, H, _ = q_BTHY.shape
    q, k, v, segments = _blocks(q_BTHY, k_BSGY, v_BSGV, segments_BT, block)
    o, row_max, lse = _forward(q, k, v, segments, scale, soft_cap)
    return _heads_last(o, T), row_max.max(axis=(0, 3, 4)).reshape(H), lse.reshape(B, H, -1)[:, :, :T]


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
    block: int,
) -> tuple[Float[Array, "B T H Y"], Float[Array, "B T G Y"], Float[Array, "B T G V"]]:
    """Returns the gradients of q, k and v."""
    T, G = q_BTHY.shape[1], k_BSGY.shape[2]
    q, k, v, segments = _blocks(q_BTHY, k_BSGY, v_BSGV, segments_BT, block)
    block = q.shape[-2]
    # Rowwise do . o, the softmax Jacobian's second term.
    delta_BTH = (d_o_BTHV.astype(jnp.float32) * o_BTHV.astype(jnp.float32)).sum(-1)
    delta, lse = (
        jnp.pad(x, ((0, 0), (0, 0), (0, -T % block))).reshape(*q.shape[:-1]) for x in (delta_BTH.transpose(0, 2, 1), lse_BHT)
    )
    do = _grouped(_heads_first(d_o_BTHV, block), G)
    dq, dk, dv = _backward(q, k, v, segments, lse, delta, do, scale, soft_cap)
    return _heads_last(dq, T), _heads_last(dk, T), _heads_last(dv, T)


def _blocks(q_BTHY, k_BSGY, v_BSGV, segments_BT, block):
    """q [B, G, H/G, n, block, Y], k [B, G, n, block, Y], v [B, G, n, block, V], segments [B, n, block], padded with 0."""
    T = q_BTHY.shape[1]
    block = min(block, T)
    segments = jnp.pad(segments_BT, ((0, 0), (0, -T % block))).reshape(q_BTHY.shape[0], -1, block)
    q, k, v = (_heads_first(x, block) for x in (q_BTHY, k_BSGY, v_BSGV))
    return _grouped(q, k.shape[1]), k, v, segments


def _heads_first(x, block):  # [B, T, n, width] -> [B, n, blocks, block, width]
    B, T, n, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -T % block), (0, 0), (0, 0)))
    return x.transpose(0, 2, 1, 3).reshape(B, n, -1, block, width)


def _heads_last(x, T):  # [B, n..., blocks, block, width] -> [B, T, n, width]
    B, width = x.shape[0], x.shape[-1]
    x = x.reshape(B, -1, x.shape[-3] * x.shape[-2], width)
    return x[:, :, :T].transpose(0, 2, 1, 3)


def _grouped(x, groups):  # heads [B, H, ...] -> [B, G, H/G, ...]
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _logits(q, k, segments_q, segments_k, i, j, scale):
    """Logits of query block i against key block j, [B, G, H/G, block, block], with MASKED where no attention is allowed."""
    s = jnp.einsum("bghtx,bgsx->bghts", q, k, preferred_element_type=jnp.float32) * scale
    block = q.shape[-2]
    t, u = jnp.arange(block)[:, None] + i * block, jnp.arange(block)[None, :] + j * block
    allowed = (segments_q[:, :, None] == segments_k[:, None, :]) & (segments_q[:, :, None] > 0) & (t >= u)[None]
    return jnp.where(allowed[:, None, None], s, MASKED)


def _at(x, i, axis):
    return lax.dynamic_index_in_dim(x, i, axis, keepdims=False)


def _put(x, value, i, axis):
    return lax.dynamic_update_index_in_dim(x, value, i, axis)


def _add(x, value, i, axis):
    return _put(x, _at(x, i, axis) + value, i, axis)


def _loop(n, first, end, body, state):
    """`lax.fori_loop(first, end, body, state)`, written out where there are few blocks."""
    if n > 2:
        return lax.fori_loop(first, end, body, state)
    for i in range(first, end):
        state = body(i, state)
    return state


def _forward(q, k, v, segments, scale, soft_cap):
    n = q.shape[3]

    def query_block(i, out):
        o_all, max_all, lse_all = out
        q_i, segments_i = _at(q, i, 3), _at(segments, i, 1)

        def key_block(j, state):
            o, m, total = state
            s = _logits(q_i, _at(k, j, 2), segments_i, _at(segments, j, 1), i, j, scale)
            m_new = jnp.maximum(m, s.max(-1))
            top = capped(m_new, soft_cap)
            p = jnp.where(s > MASKED, jnp.exp(capped(s, soft_cap) - top[..., None]), 0)
            shrink = jnp.exp(capped(m, soft_cap) - top)
            pv = jnp.einsum("bghts,bgsv->bghtv", p.astype(v.dtype), _at(v, j, 2), preferred_element_type=jnp.float32)
            return o * shrink[..., None] + pv, m_new, total * shrink + p.sum(-1)

        rows = q_i.shape[:-1]
        empty = jnp.zeros((*rows, v.shape[-1]), jnp.float32), jnp.full(rows, MASKED), jnp.zeros(rows, jnp.float32)
        o, m, total = _loop(n, 0, i + 1, key_block, empty)
        o = o / jnp.maximum(total, 1e-30)[..., None]
        lse = capped(m, soft_cap) + jnp.log(jnp.maximum(total, 1e-30))
        return _put(o_all, o.astype(q.dtype), i, 3), _put(max_all, m, i, 3), _put(lse_all, lse, i, 3)

    rows = q.shape[:-1]
    out = jnp.zeros((*rows, v.shape[-1]), q.dtype), jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.float32)
    o, row_max, lse = _loop(n, 0, n, query_block, out)
    return o, row_max, lse


def _backward(q, k, v, segments, lse, delta, do, scale, soft_cap):
    n = q.shape[3]

    def key_block(j, out):
        dq, dk_all, dv_all = out
        k_j, v_j, segments_j = _at(k, j, 2), _at(v, j, 2), _at(segments, j, 1)

        def query_block(i, state):
            dq, dk, dv = state
            q_i, do_i = _at(q, i, 3), _at(do, i, 3)
            s = _logits(q_i, k_j, _at(segments, i, 1), segments_j, i, j, scale)
            p = jnp.where(s > MASKED, jnp.exp(capped(s, soft_cap) - _at(lse, i, 3)[..., None]), 0)
            dv = dv + jnp.einsum("bghts,bghtv->bgsv", p.astype(do.dtype), do_i, preferred_element_type=jnp.float32)
            dp = jnp.einsum("bghtv,bgsv->bghts", do_i, v_j, preferred_element_type=jnp.float32)
            ds = p * (dp - _at(delta, i, 3)[..., None]) * scale
            ds = (ds * (1 - jnp.square(jnp.tanh(s / soft_cap))) if soft_cap else ds).astype(q.dtype)
            dq = _add(dq, jnp.einsum("bghts,bgsx->bghtx", ds, k_j, preferred_element_type=jnp.float32), i, 3)
            return dq, dk + jnp.einsum("bghts,bghtx->bgsx", ds, q_i, preferred_element_type=jnp.float32), dv

        start = dq, jnp.zeros(k_j.shape, jnp.float32), jnp.zeros(v_j.shape, jnp.float32)
        dq, dk, dv = _loop(n, j, n, query_block, start)
        return dq, _put(dk_all, dk.astype(k.dtype), j, 2), _put(dv_all, dv.astype(v.dtype), j, 2)

    out = jnp.zeros(q.shape, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v)
    dq, dk, dv = _loop(n, 0, n, key_block, out)
    return dq.astype(q.dtype), dk, dv
