import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import fp8


def stored(x):
    return jax.jit(fp8.store)(jnp.asarray(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_of_normal_numbers_and_of_the_small_ones_beside_them(dtype):
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.standard_normal((64, 512)) * np.exp(3 * rng.standard_normal((64, 512))), dtype), np.float32)
    got = np.asarray(fp8.load(stored(jnp.asarray(x, dtype)), "float32"))
    unit = np.repeat(np.abs(x).reshape(64, 4, 128).max(-1), 128, axis=-1) / fp8.LARGEST
    normal = np.abs(x) >= 2.0**-6 * unit
    assert 0.5 < normal.mean() < 0.99  # both kinds are there
    assert (np.abs(got - x) <= 2.0**-4 * np.abs(x))[normal].all()
    assert (np.abs(got - x) <= 2.0**-10 * 1.001 * unit)[~normal].all()


def test_largest_of_a_tile_is_exact_to_rounding_and_nothing_overflows():
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32) * 1e30
    got = np.asarray(fp8.load(stored(x), "float32"))
    place = np.abs(x).argmax(-1)[:, None]
    np.testing.assert_allclose(np.take_along_axis(got, place, 1), np.take_along_axis(x, place, 1), rtol=1e-6)
    assert np.isfinite(got).all()


def test_bytes_shapes_and_a_short_last_tile():
    x = stored(np.ones((3, 5, 7168), np.float32))
    assert (x.value.nbytes + x.scale.nbytes) / x.value.size == 1.03125
    short = np.random.default_rng(2).standard_normal((2, 200)).astype(np.float32)
    short[:, 128:] *= 100  # were it one tile, the first part would lose digits
    got = fp8.load(stored(short), "float32")
    assert got.shape == short.shape
    np.testing.assert_allclose(got[:, :128], short[:, :128], rtol=2**-4, atol=0.01)


def test_zeros_stay_and_what_is_not_finite_spoils_its_tile_alone():
    x = np.zeros((1, 384), np.float32)
    x[0, :128], x[0, 200] = np.linspace(-3, 3, 128), np.inf
    got = np.asarray(fp8.load(stored(x), "float32"))
    assert np.isfinite(got[0, :128]).all() and not np.isfinite(got[0, 128:256]).any() and (got[0, 256:] == 0).all()
