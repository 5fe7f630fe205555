"""Products that are known to be symmetric: half of the tiles are computed and mirrored.

X X^T is symmetric, and so is the product of two symmetric matrices that commute, such as polynomials in one matrix: all
square products of Newton-Schulz are of these two kinds. Mirroring halves their FLOPs.
"""

import functools
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


def symmetric_product(pattern: str, x: Float[Array, "b n k"], y: Float[Array, "b l m"], dtype: str) -> Float[Array, "b i i"]:
    """The einsum `pattern`, with result "bij", of which the caller knows that it is symmetric in i and j.

    Operands are taken in `dtype`; sums and the result are float32, of float64 operands float64. Where the product is not
    symmetric the result is its lower tiles and their mirror image.
    """
    return with_operands(lambda x, y: _symmetric(pattern, x, y), dtype, x, y)


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


def _symmetric(pattern: str, x: jax.Array, y: jax.Array) -> Float[Array, "b i i"]:
    """In rows of blocks up to the diagonal, and the mirror image above it."""
    letters_x, letters_y = pattern.split("->")[0].split(",")
    row, column = letters_x.index("i"), letters_y.index("j")
    side = x.shape[row]
    product = functools.partial(jnp.einsum, pattern, precision=PRECISION, preferred_element_type=sums(x.dtype.name))
    if side < MIN_SIDE:
        return product(x, y)
    edges = [side * i // BLOCKS for i in range(BLOCKS + 1)]
    out = jnp.zeros((x.shape[0], side, side), sums(x.dtype.name))
    for first, last in itertools.pairwise(edges):
        lower = product(lax.slice_in_dim(x, first, last, axis=row), lax.slice_in_dim(y, 0, last, axis=column))
        out = out.at[:, first:last, :last].set(lower)
        if first:
            out = out.at[:, :first, first:last].set(lower[..., :first].swapaxes(-1, -2))
    return out
