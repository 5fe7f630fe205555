"""Newton-Schulz of large matrices in half precision, every product of known symmetry by a kernel that computes half of it.

`newton_schulz` with other roundings: what a product hands to the next is stored in that one's operand dtype. So R is rounded
once, for b R as well as for c R^2, and a P = a I + b R + c R^2 is one kernel. Applying a polynomial to X is an ordinary product
and left to XLA: with a I in it nothing is to be added.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Row = tuple[float, float, float]


class Work(NamedTuple):
    """What is done to a matrix in half precision."""

    segments: Sequence[Sequence[Row]]  # rows a, b, c of each segment's steps
    dtype: str  # of operands beside X, and X
    square: str  # of operands in products of [n, n] matrices
    eps: float  # added to the norm


def tiled(x: Float[Array, "b n m"], work: Work, symmetric: Callable) -> Float[Array, "b n m"]:
    """Orthogonalizes each matrix of `x` as `newton_schulz` does, with a platform's `symmetric`; float32."""
    tall = x.shape[-2] > x.shape[-1]
    scale = None
    if work.dtype == "float16":  # its range is too small for what has not been divided by its norm
        x = x / (jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True)) + work.eps)
    x = x.astype(work.dtype)
    for number, rows in enumerate(work.segments):
        unscaled = number == 0 and work.dtype != "float16"
        r = symmetric(x, x, tall=tall, out="float32" if unscaled else work.square)
        if unscaled:  # the trace of X X^T is the squared Frobenius norm: no pass over X is needed for it
            scale = 1 / (jnp.sqrt(jnp.trace(r, axis1=-2, axis2=-1))[:, None, None] + work.eps)
            r = (r * scale * scale).astype(work.square)
        q = None
        for step, row in enumerate(rows):
            p = symmetric(r, r, row=row, out=work.square)
            q = p if q is None else symmetric(p, q, out=work.square)
            if step < len(rows) - 1:
                r = symmetric(p, symmetric(r, p, out=work.square), out=work.square)
        q = (q * scale if unscaled else q).astype(work.dtype)
        left, right = (x, q) if tall else (q, x)
        y = jnp.matmul(left, right, preferred_element_type=jnp.float32)
        x = y.astype(work.dtype)
    return y
