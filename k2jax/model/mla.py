"""Attention layers: multi-head latent attention (MLA) in its training form, and grouped-query attention (GQA, MHA).

MLA's projections are stored split (`q_nope`, `q_rope`, `k_nope`, `v`, `k_rope`), which is what QK-Clip and Muon act on; the
released checkpoints fuse them per head.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k2jax.config import ModelConfig
from k2jax.kernels.flash_attention import attention
from k2jax.model.norm import rms_norm
from k2jax.model.rope import rotate, softmax_scale
from k2jax.model.weights import weight


class Context(NamedTuple):
    """What every attention layer reads beside its input: documents and rotation angles."""

    segments_BT: Int[Array, "B T"]  # document number within the row; 0 is padding
    cos_BTP: Float[Array, "B T P"]
    sin_BTP: Float[Array, "B T P"]


class MLA(nnx.Module):
    """Multi-head latent attention (DeepSeek-V3 eq. 1-11): queries and keys-values pass through a low rank; position enters
    through a rotated part of each query and one rotated key shared by all heads."""

    def __init__(self, config: ModelConfig):
        a, D = config.attention, config.d_model
        H, Q, C = a.n_heads, a.q_rank, a.kv_rank
        self.config = config
        self.q_down_DQ = weight(D, Q)
        self.q_norm_Q = weight(Q)
        self.q_nope_QHN = weight(Q, H, a.d_nope)
        self.q_rope_QHR = weight(Q, H, a.d_rope)
        self.kv_down_DC = weight(D, C)
        self.kv_norm_C = weight(C)
        self.k_rope_DR = weight(D, a.d_rope)
        self.k_nope_CHN = weight(C, H, a.d_nope)
        self.v_CHV = weight(C, H, a.d_value)
        self.o_HVD = weight(H, a.d_value, D)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> tuple[Float[Array, "B T D"], Float[Array, " H"]]:
        """Returns the layer's output and the largest attention logit of each head."""
        a, eps = self.config.attention, self.config.norm_eps
        q_BTQ = rms_norm(project(x_BTD, self.q_down_DQ[...]), self.q_norm_Q[...], eps)
        q_nope_BTHN = project(q_BTQ, self.q_nope_QHN[...])
        q_rope_BTHR = rotate(project(q_BTQ, self.q_rope_QHR[...]), *context[1:], a.rope.layout)

        c_BTC = rms_norm(project(x_BTD, self.kv_down_DC[...]), self.kv_norm_C[...], eps)
        k_rope_BTHR = rotate(project(x_BTD, self.k_rope_DR[...])[:, :, None], *context[1:], a.rope.layout)
        k_nope_BTHN = project(c_BTC, self.k_nope_CHN[...])
        v_BTHV = project(c_BTC, self.v_CHV[...])
        k_rope_BTHR = jnp.broadcast_to(k_rope_BTHR, (*k_nope_BTHN.shape[:3], a.d_rope))  # one key for all heads

        o_BTHV, max_logit_H = attention(
            jnp.concatenate([q_nope_BTHN, q_rope_BTHR], -1),
            jnp.concatenate([k_nope_BTHN, k_rope_BTHR], -1),
            v_BTHV,
            context.segments_BT,
            scale=softmax_scale(a),
            block=a.block,
        )
        return merge_heads(o_BTHV, self.o_HVD[...]), max_logit_H


class GQA(nnx.Module):
    """Grouped-query attention with rotary positions over the whole head; with a key head a query head it is MHA."""

    def __init__(self, config: ModelConfig):
        a, D = config.attention, config.d_model
        self.config = config
        self.q_DHR = weight(D, a.n_heads, a.d_rope)
        self.k_DGR = weight(D, a.n_kv_heads, a.d_rope)
        self.v_DGV = weight(D, a.n_kv_heads, a.d_value)
        self.o_HVD = weight(a.n_heads, a.d_value, D)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> tuple[Float[Array, "B T D"], Float[Array, " H"]]:
        """Returns the layer's output and the largest attention logit of each query head."""
        a = self.config.attention
        o_BTHV, max_logit_H = attention(
            rotate(project(x_BTD, self.q_DHR[...]), *context[1:], a.rope.layout),
            rotate(project(x_BTD, self.k_DGR[...]), *context[1:], a.rope.layout),
            project(x_BTD, self.v_DGV[...]),
            context.segments_BT,
            scale=softmax_scale(a),
            block=a.block,
        )
        return merge_heads(o_BTHV, self.o_HVD[...]), max_logit_H


def project(x_BTD: Float[Array, "B T D"], w: Float[Array, "D *out"]) -> Float[Array, "B T *out"]:
    """`x @ w` over the last axis, accumulated in float32. Rows are flattened first: XLA's CPU dot is twice as fast so."""
    B, T, D = x_BTD.shape
    y = jnp.dot(x_BTD.reshape(B * T, D), w.reshape(D, -1), preferred_element_type=jnp.float32)
    return y.astype(x_BTD.dtype).reshape(B, T, *w.shape[1:])


def merge_heads(o_BTHV: Float[Array, "B T H V"], o_HVD: Float[Array, "H V D"]) -> Float[Array, "B T D"]:
    """The output projection, over heads and value width together."""
    B, T, H, V = o_BTHV.shape
    return project(o_BTHV.reshape(B, T, H * V), o_HVD.reshape(H * V, -1))
