"""Attention layers: multi-head latent attention (MLA) in its training form, and grouped-query attention (GQA, MHA).

MLA's projections are stored split (`q_nope`, `q_rope`, `k_nope`, `v`, `k_rope`), which is what QK-Clip and Muon act on; the
released checkpoints fuse them per head.

`attention.qk_norm` puts an RMSNorm with learned gains on every head's query and key (QK-norm, ViT-22B report), before they are
rotated: no weight can then drive a logit past what the gains allow. In MLA the part without position and the rotated part are
normed apart, because the rotated key is one for all heads and would not stay so if a head's own part had a say in its size.
K2 cannot have it (report 2.1): decoding absorbs the key matrix into the query and keeps latents, not keys, and a normed key is
no linear function of the latent.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k2jax.config import AttentionConfig, ModelConfig
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
        self.q_nope_norm_N, self.k_nope_norm_N = head_gain(a, a.d_nope), head_gain(a, a.d_nope)
        self.q_rope_norm_R, self.k_rope_norm_R = head_gain(a, a.d_rope), head_gain(a, a.d_rope)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> tuple[Float[Array, "B T D"], Float[Array, " H"]]:
        """Returns the layer's output and the largest attention logit of each head."""
        k_BSHY, v_BSHV = self.key_value(x_BTD, context)
        o_BTHV, max_logit_H = attend(self.config, self.query(x_BTD, context), k_BSHY, v_BSHV, context)
        return merge_heads(o_BTHV, self.o_HVD[...]), max_logit_H

    def query(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T H Y"]:
        """Each head's query: its part without position, then the rotated one."""
        a, eps = self.config.attention, self.config.norm_eps
        q_BTQ = checkpoint_name(project(x_BTD, self.q_down_DQ[...]), "latents")
        q_BTQ = rms_norm(q_BTQ, self.q_norm_Q[...], eps)
        q_nope_BTHN = norm_heads(project(q_BTQ, self.q_nope_QHN[...]), self.q_nope_norm_N, eps)
        q_rope_BTHR = norm_heads(project(q_BTQ, self.q_rope_QHR[...]), self.q_rope_norm_R, eps)
        return jnp.concatenate([q_nope_BTHN, rotate(q_rope_BTHR, *context[1:], a.rope.layout)], -1)

    def latent(self, x_BTD: Float[Array, "B S D"]) -> Float[Array, "B S C"]:
        """The compressed key-value; decoding caches this and the rotated key, and nothing else."""
        c_BSC = checkpoint_name(project(x_BTD, self.kv_down_DC[...]), "latents")
        return rms_norm(c_BSC, self.kv_norm_C[...], self.config.norm_eps)

    def rotated_key(self, x_BTD: Float[Array, "B S D"], context: Context) -> Float[Array, "B S 1 R"]:
        """The rotated key that all heads share."""
        k_BSHR = checkpoint_name(project(x_BTD, self.k_rope_DR[...]), "latents")[:, :, None]
        k_BSHR = norm_heads(k_BSHR, self.k_rope_norm_R, self.config.norm_eps)
        return rotate(k_BSHR, *context[1:], self.config.attention.rope.layout)

    def expand(
        self, c_BSC: Float[Array, "B S C"], k_rope_BSHR: Float[Array, "B S 1 R"]
    ) -> tuple[Float[Array, "B S H Y"], Float[Array, "B S H V"]]:
        """Each head's key, its own part, from the latent, before the rotated one; and its value."""
        k_nope_BSHN = norm_heads(project(c_BSC, self.k_nope_CHN[...]), self.k_nope_norm_N, self.config.norm_eps)
        k_rope_BSHR = jnp.broadcast_to(k_rope_BSHR, (*k_nope_BSHN.shape[:3], k_rope_BSHR.shape[-1]))
        return jnp.concatenate([k_nope_BSHN, k_rope_BSHR], -1), project(c_BSC, self.v_CHV[...])

    def key_value(
        self, x_BTD: Float[Array, "B S D"], context: Context
    ) -> tuple[Float[Array, "B S H Y"], Float[Array, "B S H V"]]:
        """Each head's key and value."""
        return self.expand(self.latent(x_BTD), self.rotated_key(x_BTD, context))


class GQA(nnx.Module):
    """Grouped-query attention with rotary positions over the whole head; with a key head a query head it is MHA."""

    def __init__(self, config: ModelConfig):
        a, D = config.attention, config.d_model
        self.config = config
        self.q_DHR = weight(D, a.n_heads, a.d_rope)
        self.k_DGR = weight(D, a.n_kv_heads, a.d_rope)
        self.v_DGV = weight(D, a.n_kv_heads, a.d_value)
        self.o_HVD = weight(a.n_heads, a.d_value, D)
        self.q_norm_R, self.k_norm_R = head_gain(a, a.d_rope), head_gain(a, a.d_rope)

    def __call__(self, x_BTD: Float[Array, "B T D"], context: Context) -> tuple[Float[Array, "B T D"], Float[Array, " H"]]:
        """Returns the layer's output and the largest attention logit of each query head."""
        k_BSGR, v_BSGV = self.key_value(x_BTD, context)
        o_BTHV, max_logit_H = attend(self.config, self.query(x_BTD, context), k_BSGR, v_BSGV, context)
        return merge_heads(o_BTHV, self.o_HVD[...]), max_logit_H

    def query(self, x_BTD: Float[Array, "B T D"], context: Context) -> Float[Array, "B T H R"]:
        """Each query head's query, rotated."""
        q_BTHR = norm_heads(project(x_BTD, self.q_DHR[...]), self.q_norm_R, self.config.norm_eps)
        return rotate(q_BTHR, *context[1:], self.config.attention.rope.layout)

    def key_value(
        self, x_BTD: Float[Array, "B S D"], context: Context
    ) -> tuple[Float[Array, "B S G R"], Float[Array, "B S G V"]]:
        """Each key head's key, rotated, and value."""
        k_BSGR = norm_heads(project(x_BTD, self.k_DGR[...]), self.k_norm_R, self.config.norm_eps)
        return rotate(k_BSGR, *context[1:], self.config.attention.rope.layout), project(x_BTD, self.v_DGV[...])


def attend(
    config: ModelConfig,
    q_BTHY: Float[Array, "B T H Y"],
    k_BSGY: Float[Array, "B S G Y"],
    v_BSGV: Float[Array, "B S G V"],
    context: Context,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """The attention core as the config has it: outputs, and the largest logit of each head, before any soft cap."""
    a = config.attention
    scale, cap = softmax_scale(a), a.soft_cap
    q_BTHY, k_BSGY, v_BSGV = (checkpoint_name(x, "heads") for x in (q_BTHY, k_BSGY, v_BSGV))
    return attention(q_BTHY, k_BSGY, v_BSGV, context.segments_BT, scale=scale, block=a.block, soft_cap=cap)


def head_gain(attention: AttentionConfig, width: int) -> nnx.Param | None:
    """Declares the gain of a norm over part of every head, one for all heads; None without `qk_norm`."""
    return weight(width) if attention.qk_norm else None


def norm_heads(x_BTHN: Float[Array, "B T H N"], gain_N: nnx.Param | None, eps: float) -> Float[Array, "B T H N"]:
    """RMSNorm of every head's vector; without a gain, the vector as it is."""
    return x_BTHN if gain_N is None else rms_norm(x_BTHN, gain_N[...], eps)


def project(x_BTD: Float[Array, "B T D"], w: Float[Array, "D *out"]) -> Float[Array, "B T *out"]:
    """`x @ w` over the last axis, accumulated in float32. Rows are flattened first: XLA's CPU dot is twice as fast so."""
    B, T, D = x_BTD.shape
    y = jnp.dot(x_BTD.reshape(B * T, D), w.reshape(D, -1), preferred_element_type=jnp.float32)
    return y.astype(x_BTD.dtype).reshape(B, T, *w.shape[1:])


def merge_heads(o_BTHV: Float[Array, "B T H V"], o_HVD: Float[Array, "H V D"]) -> Float[Array, "B T D"]:
    """The output projection, over heads and value width together."""
    B, T, H, V = o_BTHV.shape
    return project(o_BTHV.reshape(B, T, H * V), o_HVD.reshape(H * V, -1))
