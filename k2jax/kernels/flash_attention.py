"""Causal attention that also returns the largest logit of each head, at no further pass: it is the maximum of the row maxima
that the softmax needs anyway.

On NVIDIA GPUs it is Pallas kernels (`flash_attention_triton`) in half precision, elsewhere blocks in jnp
(`flash_attention_blockwise`), on TPUs too: the kernel that jax ships for them returns the log-sum-exp but not the largest
logit. Both keep inputs, output and the log-sum-exp of each row for the backward pass, and recompute probabilities: memory
grows with T.

With a soft cap (Gemma 2 report) a logit s enters the softmax as `cap * tanh(s / cap)`. The statistic is then still that of s,
before the cap: the cap bounds what attention sees, not what it is given, and it is the latter whose growth one wants to see.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k2jax.kernels import flash_attention_blockwise as blockwise
from k2jax.kernels import flash_attention_triton as triton
from k2jax.kernels.tiles import nvidia_is_capable


@functools.partial(jax.jit, static_argnames=("scale", "block", "soft_cap"))
def attention(
    q_BTHY: Float[Array, "B T H Y"],
    k_BSGY: Float[Array, "B T G Y"],
    v_BSGV: Float[Array, "B T G V"],
    segments_BT: Int[Array, "B T"],
    *,
    scale: float,
    block: int,
    soft_cap: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Softmax attention of each query over the earlier positions of its own document, and the largest logit of each head.

    Head h reads key head `h // (H / G)`. Segment 0 is padding: it attends to nothing and returns 0. Logits are scaled and in
    float32; the maximum is over batch, queries and allowed keys, carries no gradient, and is -1e30 where no pair is allowed.
    `soft_cap` bounds the logits that the softmax takes; the maximum is of those before it. At 0 it is off and costs nothing.
    `block` is that of the jnp form; the kernels, which GSPMD does not partition, have their own: on a mesh call this inside
    shard_map.
    """
    numbers = scale, soft_cap, block
    given = (lax.stop_gradient(x) for x in (q_BTHY, k_BSGY, v_BSGV))
    o_BTHV, max_logit_H, lse_BHT = _forward(*given, segments_BT, *numbers)
    # By these names an activation policy knows what the backward pass needs of the forward one.
    o_BTHV, lse_BHT = checkpoint_name(o_BTHV, "attention"), checkpoint_name(lse_BHT, "attention_lse")
    return _differentiable(q_BTHY, k_BSGY, v_BSGV, segments_BT, o_BTHV, lse_BHT, *numbers), max_logit_H


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _differentiable(q, k, v, segments, o, lse, scale, soft_cap, block):
    """`o`, with attention's gradient."""
    return o


def _forward(q, k, v, segments, scale, soft_cap, block):
    """Output, largest logit of each head, log-sum-exp of each row."""
    reference = functools.partial(blockwise.forward, scale=scale, soft_cap=soft_cap, block=block)
    kernel = functools.partial(triton.forward, scale=scale, soft_cap=soft_cap)
    return _by_platform(reference, kernel, q, k, v, segments)


def _backward(scale, soft_cap, block, saved, d_o):
    reference = functools.partial(blockwise.backward, scale=scale, soft_cap=soft_cap, block=block)
    kernel = functools.partial(triton.backward, scale=scale, soft_cap=soft_cap)
    return *_by_platform(reference, kernel, *saved, d_o), None, None, None


_differentiable.defvjp(lambda *given: (given[4], given[:6]), _backward)


def _by_platform(reference, kernel, q, k, v, *arrays):
    """The kernel on NVIDIA GPUs if it takes these arrays: in one half precision, and heads not too wide."""
    half = q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
    if half and triton.fits(q.shape[-1], v.shape[-1]) and nvidia_is_capable():
        return lax.platform_dependent(q, k, v, *arrays, default=reference, cuda=kernel)
    return reference(q, k, v, *arrays)
