import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.config import AttentionConfig, RopeConfig
from k2jax.model.rope import frequencies_R, look_up, rotate, softmax_scale, table, yarn_magnitude, yarn_range

K2_LONG = RopeConfig(yarn_factor=32.0)


def test_yarn_constants_of_k2():
    assert yarn_range(K2_LONG, 64) == (19, 20)
    assert yarn_magnitude(32.0, 1.0) ** 2 == pytest.approx(1.8132604, rel=1e-7)
    assert softmax_scale(AttentionConfig()) == pytest.approx(0.07216878, rel=1e-6)
    assert softmax_scale(AttentionConfig(rope=K2_LONG)) == pytest.approx(0.1308608, rel=1e-6)
    assert softmax_scale(AttentionConfig(rope=RopeConfig(yarn_factor=64.0))) == pytest.approx(0.07216878 * 2.0047397, rel=1e-6)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain, extended = frequencies_R(RopeConfig(), 64), frequencies_R(K2_LONG, 64)
    np.testing.assert_array_equal(extended[:20], plain[:20])
    np.testing.assert_allclose(extended[20:], plain[20:] / 32, rtol=1e-15)
    assert 2 * np.pi / plain[19] < 3875 and 2 * np.pi / plain[20] > 5432


def test_yarn_ramp_with_deepseek_betas():
    ramp = frequencies_R(RopeConfig(yarn_factor=32.0, beta_fast=32.0), 64) / frequencies_R(RopeConfig(), 64)
    expected = 1 - (1 - 1 / 32) * np.clip((np.arange(32) - 8) / 12, 0, 1)
    np.testing.assert_allclose(ramp, expected, rtol=1e-12)


@pytest.mark.parametrize("factor", [32, 64])
def test_yarn_from_4k_to_128k_and_256k_pair_by_pair(factor):
    """By wavelength: a pair that turns once or more within 4096 tokens is kept, a slower one reaches no angle that is new."""
    rope, length = RopeConfig(yarn_factor=float(factor)), 4096 * factor
    cos, sin = table(rope, 64, length)
    for i, frequency in enumerate(frequencies_R(rope, 64)):
        wavelength = 2 * math.pi * 50_000 ** (i / 32)
        stretched = wavelength * factor if wavelength > 4096 else wavelength
        assert frequency == pytest.approx(2 * math.pi / stretched, rel=1e-12)
        assert stretched == wavelength or length / stretched < 1
        turns = (length - 1) / stretched
        angle = 2 * math.pi * (turns - math.floor(turns))
        assert (cos[-1, i], sin[-1, i]) == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-6)
    assert softmax_scale(AttentionConfig(rope=rope)) * math.sqrt(192) == pytest.approx(
        (math.log(factor) / 10 + 1) ** 2, rel=1e-12
    )


def test_no_extension_is_the_identity():
    np.testing.assert_array_equal(frequencies_R(RopeConfig(yarn_factor=1.0), 64), 50_000.0 ** (-np.arange(32) / 32))


def test_table_equals_direct_computation_up_to_128k():
    cos, sin = table(RopeConfig(), 64, 131_072)
    positions = np.array([0, 1, 4095, 65_537, 131_071])
    angles = positions[:, None] * 50_000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(cos[positions], np.cos(angles), atol=6e-8)
    np.testing.assert_allclose(sin[positions], np.sin(angles), atol=6e-8)


def test_look_up_computes_no_angle():
    text = str(jax.make_jaxpr(lambda p: look_up(RopeConfig(), 8, 16, p))(jnp.zeros((1, 3), jnp.int32)))
    assert "gather" in text and " cos " not in text and " sin " not in text and "pow" not in text


def rotated(x, positions, layout):
    cos, sin = look_up(RopeConfig(), x.shape[-1], 64, positions)
    return rotate(x, cos, sin, layout)


def test_interleaved_equals_complex_multiplication():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 9, 0, 60, 1]])
    angles = np.asarray(positions)[..., None] * 50_000.0 ** (-np.arange(4) / 4)
    turned = (np.asarray(x[..., 0::2]) + 1j * np.asarray(x[..., 1::2])) * np.exp(1j * angles)[:, :, None]
    got = rotated(x, positions, "interleaved")
    np.testing.assert_allclose(got[..., 0::2], turned.real, atol=1e-6)
    np.testing.assert_allclose(got[..., 1::2], turned.imag, atol=1e-6)


def test_both_layouts_give_equal_products_after_deinterleaving():
    """De-interleave first, then rotate halves: q.k is that of the interleaved form; without the permutation it is not."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 6, 2, 8))
    positions = jnp.arange(6)[None]

    def products(layout, permute):
        a, b = (jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if permute else x for x in (q, k))
        return jnp.einsum("bthr,bshr->bhts", rotated(a, positions, layout), rotated(b, positions, layout))

    np.testing.assert_allclose(products("half", permute=True), products("interleaved", permute=False), atol=1e-5)
    assert jnp.abs(products("half", permute=False) - products("interleaved", permute=False)).max() > 0.1


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_products_depend_on_relative_position_alone(layout):
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 6, 2, 8))

    def products(shift):
        positions = jnp.arange(6)[None] + shift
        return jnp.einsum("bthr,bshr->bhts", rotated(q, positions, layout), rotated(k, positions, layout))

    np.testing.assert_allclose(products(0), products(40), atol=1e-5)
