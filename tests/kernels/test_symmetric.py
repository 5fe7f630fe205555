import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import symmetric

symmetric_product = jax.jit(symmetric.symmetric_product, static_argnums=(0, 3))
WIDE, TALL, PLAIN = "bik,bjk->bij", "bki,bkj->bij", "bik,bkj->bij"


@pytest.fixture
def blocked(monkeypatch):
    """Blocks already in small matrices."""
    monkeypatch.setattr(symmetric, "MIN_SIDE", 8)


@pytest.mark.parametrize("shape", [(16, 40), (19, 5)])  # 19: blocks of unequal size
@pytest.mark.parametrize("tall", [False, True])
def test_product_with_its_transpose(shape, tall, blocked):
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    given = jnp.asarray(x.swapaxes(1, 2) if tall else x)
    got = np.asarray(symmetric_product(TALL if tall else WIDE, given, given, "float32"))
    np.testing.assert_allclose(got, x @ x.swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[:, 9:, :4], got[:, :4, 9:].swapaxes(1, 2))


def test_product_of_polynomials_in_one_matrix(blocked):
    x = np.random.default_rng(1).standard_normal((2, 12, 12)).astype(np.float32)
    r = x @ x.swapaxes(1, 2)
    p = 2 * np.eye(12, dtype=np.float32) - 0.1 * r
    got = np.asarray(symmetric_product(PLAIN, jnp.asarray(p), jnp.asarray(r), "float32"))
    np.testing.assert_allclose(got, p @ r, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(got[:, 9:, :4], got[:, :4, 9:].swapaxes(1, 2))


def test_what_is_not_symmetric_is_mirrored_from_below(blocked):
    x, y = np.random.default_rng(2).standard_normal((2, 1, 16, 16)).astype(np.float32)
    got, product = np.asarray(symmetric_product(WIDE, jnp.asarray(x), jnp.asarray(y), "float32"))[0], (x @ y.swapaxes(1, 2))[0]
    np.testing.assert_allclose(got[12:, :4], product[12:, :4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[:4, 12:], product[12:, :4].T, rtol=1e-5, atol=1e-5)


def flops(side):
    jaxpr = jax.make_jaxpr(lambda x: symmetric.symmetric_product(WIDE, x, x, "float32"))(jnp.zeros((1, side, 24))).jaxpr
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return sum(2 * 24 * e.outvars[0].aval.size for e in dots)


def test_blocks_spare_products(blocked):
    assert flops(64) <= 10 / 16 * 2 * 64 * 64 * 24
    assert flops(7) == 2 * 7 * 7 * 24  # below MIN_SIDE: whole


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("side", [4, 16])
def test_sums_are_float32(dtype, side, blocked):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, side, 300)), dtype)
    got, exact = symmetric_product(WIDE, x, x, dtype), np.asarray(x, np.float64) @ np.asarray(x, np.float64).swapaxes(1, 2)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, atol=1e-6 * np.abs(exact).max())


def test_a_cpu_rounds_operands_to_bfloat16_as_a_cast_does():
    x = np.random.default_rng(4).standard_normal((1, 8, 8)).astype(np.float32)
    x[0, 0] = [0, 1e-30, 3e38, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -1e-3, 65504]  # ties, large, small
    rounded = symmetric.with_operands(lambda x: 1.0 * x, "bfloat16", jnp.asarray(x))
    assert rounded.dtype == jnp.float32  # what a CPU multiplies
    np.testing.assert_array_equal(rounded, jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
