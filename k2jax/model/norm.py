"""RMSNorm, computed in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows D"], gain_D: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """`x / sqrt(mean(x^2) + eps) * gain` over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (x32 * gain_D.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
