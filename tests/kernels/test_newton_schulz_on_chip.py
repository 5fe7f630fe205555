"""The Pallas kernels that do all of Newton-Schulz on one core, in Pallas's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels.newton_schulz_on_chip import fits, on_chip_tpu, on_chip_triton
from k2jax.kernels.newton_schulz_tiled import Work

JORDAN = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
KERNELS = {
    "triton": functools.partial(on_chip_triton, interpret=True),
    "tpu": functools.partial(on_chip_tpu, interpret=True),
}
EACH = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def quintic(x, steps=5):
    """Jordan's steps on one matrix in float64."""
    x = np.asarray(x, np.float64)
    x = x / (np.linalg.norm(x) + EPS)
    a, b, c = JORDAN
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative(x, y):
    return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


# The wide matrices are 100 long and the tall ones 70: neither is a multiple of what Triton's kernel loads at a time. Errors up
# to 1.4e-6, 1.3e-2, 2.1e-2 and 2.3e-3 are seen.
@EACH
@pytest.mark.parametrize(
    ("shape", "dtype", "square", "lengths", "error"),
    [
        ((3, 24, 100), "float32", "float32", (2, 3), 1e-5),
        ((3, 70, 20), "bfloat16", "float16", (2, 3), 3e-2),
        ((3, 24, 100), "bfloat16", "bfloat16", (2, 2, 1), 5e-2),
        ((3, 17, 70), "float16", "float16", (2, 3), 6e-3),
    ],
    ids=["float32", "nvidia", "tpu", "float16"],
)
def test_equals_the_float64_quintic(kernel, shape, dtype, square, lengths, error):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 1e-3
    x[0] = 0
    y = kernel(jnp.asarray(x), Work(tuple((JORDAN,) * length for length in lengths), dtype, square, EPS))
    assert y.dtype == jnp.float32 and (y[0] == 0).all()
    for got, one in zip(np.asarray(y)[1:], x[1:], strict=True):
        assert relative(got, quintic(one)) < error


def test_both_kernels_round_alike():
    """They differ in the order of sums alone."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 16, 48)), jnp.float32)
    work = Work(((JORDAN,) * 2,), "bfloat16", "float16", EPS)
    assert relative(KERNELS["triton"](x, work), np.asarray(KERNELS["tpu"](x, work), np.float64)) < 1e-3


def test_hard_spectra_stay_in_range():
    """Singular values over nine decades, two spikes, rank 1: none is taken above 1.204, the most the set makes, and 0.02."""
    n, m = 24, 60
    u, v = (np.linalg.qr(np.random.default_rng(seed).standard_normal((size, n)))[0] for seed, size in ((2, n), (3, m)))
    spectra = [np.geomspace(1, 1e-9, n), np.array([1.0, 1.0] + [1e-3] * (n - 2)), np.eye(n)[0]]
    x = jnp.asarray(np.stack([(u * s) @ v.T for s in spectra]), jnp.bfloat16).astype(jnp.float32)
    y = np.asarray(KERNELS["triton"](x, Work(((JORDAN,) * 2, (JORDAN,) * 3), "bfloat16", "float16", EPS)), np.float64)
    assert np.isfinite(y).all() and np.linalg.svd(y, compute_uv=False).max() < 1.204 + 0.02
    for got, one in zip(y, np.asarray(x), strict=True):
        assert relative(got, quintic(one)) < 0.15


def test_inputs_of_half_precision_are_taken():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((1, 16, 16)), jnp.bfloat16)
    work = Work(((JORDAN,),), "bfloat16", "bfloat16", EPS)
    np.testing.assert_array_equal(KERNELS["tpu"](x, work), KERNELS["tpu"](x.astype(jnp.float32), work))


def test_what_fits():
    assert fits(1536, 128) and fits(128, 512) and fits(1536, 64) and fits(64, 32)  # heads of MLA, small experts
    assert not fits(1536, 192) and not fits(7168, 64)


@EACH
@pytest.mark.parametrize("shape", [(1, 129, 130), (1, 2049, 8)])
def test_a_matrix_that_does_not_fit_is_refused(kernel, shape):
    work = Work(((JORDAN,),), "bfloat16", "bfloat16", EPS)
    with pytest.raises(ValueError, match=r"at most 128 and 2048; got shape"):
        jax.eval_shape(lambda x: kernel(x, work), jnp.zeros(shape))
