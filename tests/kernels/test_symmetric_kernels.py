"""The Pallas kernels of symmetric products, in Pallas's interpreter, and Newton-Schulz on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import newton_schulz as ns
from k2jax.kernels import symmetric_tpu, symmetric_triton
from k2jax.kernels.newton_schulz_tiled import Work, tiled
from k2jax.kernels.tiles import lower_tiles

# Tiles so small that little matrices have several, some of them cut off by the edges.
KERNELS = {
    "triton": functools.partial(symmetric_triton.symmetric, tile=(16, 32), interpret=True),
    "tpu": functools.partial(symmetric_tpu.symmetric, sides=(16, 8), depth=16, interpret=True),
}
EACH = pytest.mark.parametrize("symmetric", KERNELS.values(), ids=KERNELS)
ROW = (3.0, -4.0, 2.0)


def integers(*shape, seed=0):
    """Whose products are exact in float32, and which are exact in every dtype."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


@EACH
@pytest.mark.parametrize(
    ("n", "k", "dtype", "tall"), [(40, 24, "bfloat16", False), (33, 50, "float32", True), (9, 70, "float16", False)]
)
def test_product_with_its_transpose_is_exact(symmetric, n, k, dtype, tall):
    x = integers(2, n, k)
    given = jnp.asarray(x.swapaxes(1, 2) if tall else x, dtype)
    np.testing.assert_array_equal(symmetric(given, given, tall=tall), x @ x.swapaxes(1, 2))


@EACH
def test_polynomial_in_one_kernel(symmetric):
    x = integers(2, 33, 33)
    r = x + x.swapaxes(1, 2)
    a, b, c = ROW
    expected = a * np.eye(33, dtype=np.float32) + b * r + c * r @ r
    got = symmetric(jnp.asarray(r, "bfloat16"), jnp.asarray(r, "bfloat16"), row=ROW, out="bfloat16")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.asarray(expected).astype(jnp.bfloat16))


@EACH
def test_a_multiple_of_a_tall_matrix_is_refused(symmetric):
    with pytest.raises(ValueError, match="square, not tall"):
        symmetric(jnp.zeros((1, 20, 16)), jnp.zeros((1, 20, 16)), tall=True, row=ROW)


@EACH
def test_product_of_polynomials_in_one_matrix_is_symmetric_to_the_bit(symmetric):
    x = np.random.default_rng(1).standard_normal((2, 40, 40)).astype(np.float32)
    r = x @ x.swapaxes(1, 2) / 40
    p = 2 * np.eye(40, dtype=np.float32) - 0.1 * r + 0.01 * r @ r
    plain = p @ r
    assert (plain != plain.swapaxes(1, 2)).any()
    got = np.asarray(symmetric(jnp.asarray(p), jnp.asarray(r)))
    np.testing.assert_array_equal(got, got.swapaxes(1, 2))
    np.testing.assert_allclose(got, plain, atol=1e-5)


@EACH
def test_what_is_not_symmetric_is_mirrored_from_below(symmetric):
    x, y = integers(1, 40, 20), integers(1, 40, 20, seed=1)
    lower = np.tril(x @ y.swapaxes(1, 2))
    expected = lower + np.tril(lower, -1).swapaxes(1, 2)
    np.testing.assert_array_equal(symmetric(jnp.asarray(x), jnp.asarray(y)), expected)


@pytest.mark.parametrize(
    ("n", "rows", "columns"), [(1, 16, 16), (40, 16, 32), (40, 16, 16), (2048, 128, 256), (1500, 128, 128)]
)
def test_tiles_reach_every_element_below_the_diagonal_once(n, rows, columns):
    tiles = lower_tiles(n, rows, columns).T.tolist()
    assert len(set(map(tuple, tiles))) == len(tiles)
    covered = np.zeros((-(-n // rows), -(-n // columns)), bool)
    covered[tuple(np.transpose(tiles))] = True
    element = np.arange(n)
    needed = covered[element[:, None] // rows, element[None, :] // columns]
    assert needed[np.tril_indices(n)].all()
    assert all(i * rows + rows > j * columns for i, j in tiles)  # none lies above the diagonal


def test_half_of_the_tiles_of_k2s_experts_are_computed():
    assert lower_tiles(2048, 128, 256).shape[1] == 72  # of 128
    assert lower_tiles(2048, 512, 512).shape[1] == 10  # of 16


def quintic(x, table):
    """Newton-Schulz of one matrix in float64."""
    x = np.asarray(x, np.float64)
    x = x / (np.linalg.norm(x) + 1e-7)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative(x, y):
    return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


def work(lengths, dtype, square):
    rows = iter(ns.coefficients("jordan", sum(lengths)))
    return Work(tuple(tuple(next(rows) for _ in range(length)) for length in lengths), dtype, square, ns.EPS)


# What a platform takes for X and for [n, n] products, the segments that these bear, and the error of five steps on Gaussian
# matrices: up to 1.3e-5, 3.5e-3, 1.2e-2, 2.3e-2 and 1.7e-2 are seen.
CASES = [
    ("float32", "float32", (2, 3), 4e-5),
    ("float16", "float16", (2, 3), 1e-2),
    ("bfloat16", "float16", (2, 3), 3e-2),
    ("bfloat16", "bfloat16", (2, 2, 1), 5e-2),
    ("bfloat16", "bfloat16", (1, 1, 1, 1, 1), 4e-2),
]


def plain(x, y, *, tall=False, row=(0.0, 0.0, 1.0), out="float32"):
    """The same as the kernels in jnp, whole."""
    a, b, c = row
    product = jnp.einsum("bki,bkj->bij" if tall else "bik,bjk->bij", x, y, preferred_element_type=jnp.float32)
    sums = a * jnp.eye(product.shape[-1])[None] + (b * x.astype(jnp.float32) if b else 0) + c * product
    return sums.astype(out)


@pytest.mark.parametrize(("dtype", "square", "lengths", "error"), CASES)
@pytest.mark.parametrize("tall", [False, True])
def test_newton_schulz_equals_the_float64_quintic(dtype, square, lengths, error, tall):
    x = np.random.default_rng(2).standard_normal((3, 24, 80))
    x[0] = 0
    given = jnp.asarray(x.swapaxes(1, 2) if tall else x, jnp.float32)
    y = np.asarray(tiled(given, work(lengths, dtype, square), plain))
    y = y.swapaxes(1, 2) if tall else y
    assert y.dtype == np.float32 and (y[0] == 0).all()
    for got, one in zip(y[1:], x[1:], strict=True):
        assert relative(got, quintic(one, ns.coefficients("jordan", 5))) < error


@pytest.mark.parametrize(("kernel", "square"), [("triton", "float16"), ("tpu", "bfloat16")])
def test_newton_schulz_on_the_kernels_equals_that_on_plain_products(kernel, square):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 24, 40)), jnp.float32)
    todo, run = work((2,), "bfloat16", square), jax.jit(tiled, static_argnums=(1, 2))
    assert relative(run(x, todo, KERNELS[kernel]), np.asarray(run(x, todo, plain), np.float64)) < 1e-2  # 3e-3 is seen


def test_rounding_of_square_products_takes_no_singular_value_too_far():
    """float16 bears segments of three steps; bfloat16 does not, which is why a TPU's have two."""
    u, v = (np.linalg.qr(np.random.default_rng(seed).standard_normal((n, 48)))[0] for seed, n in ((4, 48), (5, 120)))
    x = jnp.asarray((u * np.geomspace(1, 1e-9, 48)) @ v.T, jnp.bfloat16).astype(jnp.float32)
    exact = quintic(x, ns.coefficients("jordan", 5))
    largest, errors = {}, {}
    for square, lengths in (("float16", (2, 3)), ("bfloat16", (2, 2, 1)), ("bfloat16", (2, 3))):
        y = np.asarray(tiled(x[None], work(lengths, "bfloat16", square), plain)[0], np.float64)
        largest[square, lengths] = np.linalg.svd(y, compute_uv=False).max()
        errors[square, lengths] = relative(y, exact)
    assert largest["float16", (2, 3)] < 1.21 and largest["bfloat16", (2, 2, 1)] < 1.21  # 1.204 is the most the set makes
    assert errors["float16", (2, 3)] < 0.1 and errors["bfloat16", (2, 2, 1)] < 0.1
    assert errors["bfloat16", (2, 3)] > 0.1
