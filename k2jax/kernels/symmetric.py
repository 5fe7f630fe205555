"""Products that are known to be symmetric: half of the tiles are computed and mirrored.

X X^T is symmetric, and so is the product of two symmetric matrices that commute, such as polynomials in one matrix: all
square products of Newton-Schulz are of these two kinds. Mirroring halves their FLOPs.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

MIN_SIDE = 256  # of the result; below it one plain product is faster
BLOCKS = 4  # the jnp form cuts a side in so many: 10 of 16 tiles are computed
# Of float32 operands: TF32 on a GPU and three passes in bfloat16 on a TPU, whose default of one Newton-Schulz does not bear.
PRECISION = lax.Precision.HIGH


def symmetric_product(
    x: Float[Array, "b i j"], y: Float[Array, "b i j"], dtype: str, tall: bool = False
) -> Float[Array, "b n n"]:
    """X Y^T, or with `tall` X^T Y of [b, k, n], of which the caller knows that it is symmetric.

    Operands are taken in `dtype`; sums and the result are float32, of float64 operands float64. Where the product is not
    symmetric the result is its lower tiles and their mirror image.
    """
    return with_operands(lambda x, y: _symmetric(x, y, tall), dtype, x, y)


def with_operands(f: Callable[..., jax.Array], dtype: str, *arrays: jax.Array) -> jax.Array:
    """Returns f, a product, of arrays taken in `dtype`.

    A CPU multiplies bfloat16 in float32. Rounded without leaving float32, operands give the same sums and cost fewer passes.
    """
    if dtype != "bfloat16":
        return f(*(x.astype(dtype) for x in arrays))
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: f(*(lax.reduce_precision(x.astype(jnp.float32), 8, 7) for x in arrays)),
        default=lambda *arrays: f(*(x.astype(dtype) for x in arrays)),
    )


def sums(dtype: str) -> jnp.dtype:
    """The dtype in which products of `dtype` are summed."""
    return jnp.promote_types(dtype, jnp.float32)


def _symmetric(x: jax.Array, y: jax.Array, tall: bool) -> Float[Array, "b n n"]:
    side = x.shape[-1] if tall else x.shape[-2]
    return _blocked(x, y, tall) if side >= MIN_SIDE else _product(x, y, tall)


def _product(x: jax.Array, y: jax.Array, tall: bool) -> Float[Array, "b i j"]:
    pattern = "bki,bkj->bij" if tall else "bik,bjk->bij"
    return jnp.einsum(pattern, x, y, precision=PRECISION, preferred_element_type=sums(x.dtype.name))


def _blocked(x: jax.Array, y: jax.Array, tall: bool) -> Float[Array, "b n n"]:
    """The jnp form: rows of blocks up to the diagonal, and the mirror image above it."""
    side = x.shape[-1] if tall else x.shape[-2]
    edges = [side * i // BLOCKS for i in range(BLOCKS + 1)]
    out = jnp.zeros((x.shape[0], side, side), sums(x.dtype.name))
    for first, last in itertools.pairwise(edges):
        rows, columns = (x[..., first:last], y[..., :last]) if tall else (x[:, first:last], y[:, :last])
        lower = _product(rows, columns, tall)
        out = out.at[:, first:last, :last].set(lower)
        if first:
            out = out.at[:, :first, first:last].set(lower[..., :first].swapaxes(-1, -2))
    return out
