"""Newton-Schulz orthogonalization, batched over every leading axis.

The quintic map s -> a s + b s^3 + c s^5 acts on all singular values of a matrix at once and brings them near 1; singular
vectors stay. It is written in matrix products alone, in two forms with the same answer: the standard one iterates on the
matrix X [n, m], the Gram one on X X^T [n, n] and touches X four times in all. `form` counts which is cheaper.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

JORDAN = (3.4445, -4.7750, 2.0315)  # a, b, c: steep at 0, so that five steps reach [0.68, 1.14] from 0.01
EPS = 1e-7  # added to the Frobenius norm: zero in, zero out
RESTART = 2  # steps of the Gram form after which X X^T is formed anew; without it float32 drifts
CHUNK_BYTES = 2**17  # of matrices worked on at a time on a CPU, so that they and their products stay in its cache

Form = Literal["standard", "gram"]


def flops(n: int, m: int, steps: int, form: Form) -> int:
    """Counts the matrix-product FLOPs of one n x m matrix, a multiply-add being 2; work of order n*m is left out."""
    n, m = min(n, m), max(n, m)
    if form == "standard":  # X X^T, its square, and its product with X
        return steps * (4 * n * n * m + 2 * n**3)
    # A segment forms X X^T and applies its polynomial to X once. Its first step squares the Gram matrix; every later one
    # also moves it (two products) and extends the polynomial (one).
    return sum(4 * n * n * m + 2 * n**3 * (4 * length - 3) for length in _segments(steps))


def form(n: int, m: int, steps: int) -> Form:
    """Returns the form with fewer counted FLOPs: "gram" once the long side is about 1.5 times the short one."""
    return "gram" if flops(n, m, steps, "gram") < flops(n, m, steps, "standard") else "standard"


def newton_schulz(
    x: Float[Array, "... n m"], steps: int, coefficients: tuple[float, float, float] = JORDAN
) -> Float[Array, "... n m"]:
    """Orthogonalizes each matrix of `x` approximately: singular vectors kept, singular values near 1.

    Products take operands in `x`'s dtype and accumulate in float32. Values from 0.01 of the Frobenius norm up land in
    [0.68, 1.14] after five steps; a zero matrix stays zero. Source: Moonlight report 2.1, Kimi K2 report algorithm 1.
    """
    if steps < 1:
        raise ValueError(f"Newton-Schulz needs at least 1 step; got {steps}")
    n, m = x.shape[-2:]
    kernel = {"standard": standard, "gram": gram}[form(n, m, steps)]
    (y,) = map_chunks(lambda x: (kernel(x, steps, coefficients),), x.reshape(-1, n, m))
    return y.reshape(x.shape)


def standard(x: Float[Array, "b n m"], steps: int, coefficients: tuple[float, float, float]) -> Float[Array, "b n m"]:
    """The quintic iterated on the matrices: A = X X^T, then X <- a X + (b A + c A A) X, on the short side."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    y = x.astype(jnp.float32)
    y = y / (jnp.sqrt(jnp.sum(jnp.square(y), axis=(-2, -1), keepdims=True)) + EPS)
    for _ in range(steps):
        gram_nn = _gram(y, x.dtype, tall)
        y = a * y + _apply(b * gram_nn + c * _product(gram_nn, gram_nn, x.dtype), y, x.dtype, tall)
    return y.astype(x.dtype)


def gram(x: Float[Array, "b n m"], steps: int, coefficients: tuple[float, float, float]) -> Float[Array, "b n m"]:
    """The same map on the Gram matrix R = X X^T: with P = a + b R + c R^2, X <- P X becomes R <- P R P.

    The product of the P is applied to X at the end of a segment of steps; a new segment forms R anew from X.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    eye = jnp.eye(min(x.shape[-2:]), dtype=jnp.float32)[None]
    y = x
    for number, length in enumerate(_segments(steps)):
        r = _gram(y, x.dtype, tall)
        scale = None
        if number == 0:  # the trace of X X^T is the squared Frobenius norm: no pass over X is needed for it
            norm = jnp.sqrt(jnp.trace(r, axis1=-2, axis2=-1))[:, None, None]
            scale = 1 / (norm + EPS)
            r = r * scale * scale
        q = None
        for step in range(length):
            p = a * eye + b * r + c * _product(r, r, x.dtype)
            q = p if q is None else _product(p, q, x.dtype)
            if step < length - 1:
                r = _product(p, _product(r, p, x.dtype), x.dtype)
        y = _apply(q if scale is None else q * scale, y, x.dtype, tall)
    return y.astype(x.dtype)


def map_chunks(f: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Applies `f` to arrays [b, ...] that share the axis b: in cache-sized chunks on a CPU, whole elsewhere.

    `f` must treat the entries of b independently and return arrays with the same leading axis.
    """
    count, row_bytes = arrays[0].shape[0], 4 * math.prod(arrays[0].shape[1:])
    chunk = max(1, CHUNK_BYTES // row_bytes)
    if count <= chunk:
        return f(*arrays)
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: _map_chunks(f, arrays, count, chunk),
        default=f,
    )


def _map_chunks(f, arrays, count: int, chunk: int):
    whole = count // chunk
    out = lax.map(lambda a: f(*a), tuple(a[: whole * chunk].reshape(whole, chunk, *a.shape[1:]) for a in arrays))
    out = tuple(o.reshape(whole * chunk, *o.shape[2:]) for o in out)
    if count % chunk:
        rest = f(*(a[whole * chunk :] for a in arrays))
        out = tuple(jnp.concatenate(pair) for pair in zip(out, rest, strict=True))
    return out


def _segments(steps: int) -> tuple[int, ...]:
    return (RESTART, steps - RESTART) if steps > RESTART else (steps,)


def _product(x, y, dtype):
    return jnp.matmul(x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


def _gram(x, dtype, tall: bool):
    x = x.astype(dtype)
    pattern = "bki,bkj->bij" if tall else "bik,bjk->bij"
    return jnp.einsum(pattern, x, x, preferred_element_type=jnp.float32)


def _apply(p, x, dtype, tall: bool):
    """The symmetric [n, n] polynomial times X, from the right where the short side is the last."""
    return _product(x, p, dtype) if tall else _product(p, x, dtype)
