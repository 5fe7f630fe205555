from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k2jax.config import AttentionConfig, ModelConfig, RopeConfig
from k2jax.model.mla import GQA, MLA, Context
from k2jax.model.rope import look_up, softmax_scale
from k2jax.model.weights import build

MLA_CONFIG = ModelConfig(
    d_model=12,
    dtype="float32",
    attention=AttentionConfig(n_heads=3, n_kv_heads=3, q_rank=7, kv_rank=5, d_nope=4, d_rope=6, d_value=3, block=4),
)
GQA_CONFIG = replace(
    MLA_CONFIG, attention=AttentionConfig(kind="gqa", n_heads=4, n_kv_heads=2, d_nope=0, d_rope=6, d_value=3, block=4)
)


def context_for(config, segments, positions):
    a = config.attention
    return Context(segments, *look_up(a.rope, a.d_rope, segments.shape[1], positions))


def one_document(B, T):
    return jnp.ones((B, T), jnp.int32), jnp.tile(jnp.arange(T), (B, 1))


def normed(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def turn(x_TR, theta=50_000.0):
    """Rotates interleaved pairs of one head by complex multiplication, float64."""
    T, R = x_TR.shape
    z = (x_TR[:, 0::2] + 1j * x_TR[:, 1::2]) * np.exp(1j * np.arange(T)[:, None] * theta ** (-np.arange(R // 2) / (R // 2)))
    return np.stack([z.real, z.imag], -1).reshape(T, R)


def attend(q, k, v, scale):
    s = scale * q @ k.T
    s[np.triu_indices(len(s), 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v, s.max()


def mla_head_by_head(layer, x_TD, scale):
    """DeepSeek-V3 eq. 1-11 for one sequence, one head at a time, in float64 NumPy."""
    w = {name: np.asarray(value, np.float64) for name, value in nnx.to_pure_dict(nnx.state(layer)).items()}
    c_q = normed(x_TD @ w["q_down_DQ"], w["q_norm_Q"])
    c_kv = normed(x_TD @ w["kv_down_DC"], w["kv_norm_C"])
    k_rope = x_TD @ w["k_rope_DR"]
    k_rope = turn(normed(k_rope, w["k_rope_norm_R"]) if "k_rope_norm_R" in w else k_rope)
    y, largest = 0, []
    for h in range(w["q_nope_QHN"].shape[1]):
        q_nope, q_rope, k_nope = c_q @ w["q_nope_QHN"][:, h], c_q @ w["q_rope_QHR"][:, h], c_kv @ w["k_nope_CHN"][:, h]
        if "q_nope_norm_N" in w:
            q_nope, k_nope = normed(q_nope, w["q_nope_norm_N"]), normed(k_nope, w["k_nope_norm_N"])
            q_rope = normed(q_rope, w["q_rope_norm_R"])
        q, k = np.concatenate([q_nope, turn(q_rope)], 1), np.concatenate([k_nope, k_rope], 1)
        o, s = attend(q, k, c_kv @ w["v_CHV"][:, h], scale)
        y = y + o @ w["o_HVD"][h]
        largest.append(s)
    return y, np.array(largest)


def gqa_head_by_head(layer, x_TD, scale):
    w = {name: np.asarray(value, np.float64) for name, value in nnx.to_pure_dict(nnx.state(layer)).items()}
    y, largest = 0, []
    for h in range(4):
        g = h // 2  # two query heads a key head
        q, k = x_TD @ w["q_DHR"][:, h], x_TD @ w["k_DGR"][:, g]
        if "q_norm_R" in w:
            q, k = normed(q, w["q_norm_R"]), normed(k, w["k_norm_R"])
        o, s = attend(turn(q), turn(k), x_TD @ w["v_DGV"][:, g], scale)
        y = y + o @ w["o_HVD"][h]
        largest.append(s)
    return y, np.array(largest)


@pytest.mark.parametrize("yarn_factor", [1.0, 32.0])
@pytest.mark.parametrize(
    ("kind", "config", "reference"), [(MLA, MLA_CONFIG, mla_head_by_head), (GQA, GQA_CONFIG, gqa_head_by_head)]
)
def test_equals_a_reference_head_by_head(kind, config, reference, yarn_factor):
    # original_context 2 puts every frequency below YaRN's band, so the tables are plain and only the scale changes.
    rope = RopeConfig(yarn_factor=yarn_factor, original_context=2, theta=50_000.0)
    config = replace(config, attention=replace(config.attention, rope=rope))
    layer = build(lambda: kind(config), 0.4, 0)
    x = jax.random.normal(jax.random.key(1), (2, 9, 12))
    context = context_for(config, *one_document(2, 9))
    if yarn_factor > 1:
        plain = replace(config.attention, rope=RopeConfig())
        context = context_for(replace(config, attention=plain), *one_document(2, 9))
        assert softmax_scale(config.attention) == pytest.approx(softmax_scale(plain) * 1.8132604, rel=1e-6)
    y, max_logit = layer(x, context)
    expected = [reference(layer, np.asarray(x[b], np.float64), softmax_scale(config.attention)) for b in range(2)]
    np.testing.assert_allclose(y, np.stack([e[0] for e in expected]), atol=1e-5)
    np.testing.assert_allclose(max_logit, np.max([e[1] for e in expected], axis=0), rtol=1e-5)


@pytest.mark.parametrize(("kind", "config"), [(MLA, MLA_CONFIG), (GQA, GQA_CONFIG)])
def test_gradient_by_finite_differences(kind, config):
    layer = build(lambda: kind(config), 0.4, 0)
    graphdef, weights = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (1, 6, 12))
    context = context_for(config, *one_document(1, 6))

    def scalar(weights):
        return jnp.sin(nnx.merge(graphdef, weights)(x, context)[0]).sum()

    # Along the gradient itself the slope is its norm, far above float32's noise in the differences.
    grads = jax.jit(jax.grad(scalar))(weights)
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    step, scalar = 1e-2, jax.jit(scalar)
    ends = [scalar(jax.tree.map(lambda w, g, s=s: w + s * step * g / norm, weights, grads)) for s in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(norm), rel=2e-3)


def test_scaling_the_parts_as_qk_clip_does_scales_every_logit_of_the_head():
    """gamma^.5 on both nope parts and gamma on the rotated query scale a head's logits by gamma (report 2.1)."""
    layer = build(lambda: MLA(MLA_CONFIG), 0.4, 0)
    x = jax.random.normal(jax.random.key(1), (1, 6, 12))
    context = context_for(MLA_CONFIG, *one_document(1, 6))
    before = layer(x, context)[1]
    for name, power in (("q_nope_QHN", 0.5), ("k_nope_CHN", 0.5), ("q_rope_QHR", 1.0)):
        w = getattr(layer, name)
        w[...] = w[...].at[:, 1].multiply(0.3**power)
    after = layer(x, context)[1]
    np.testing.assert_allclose(after[1], 0.3 * before[1], rtol=1e-5)
    np.testing.assert_array_equal(after[jnp.array([0, 2])], before[jnp.array([0, 2])])


@pytest.mark.parametrize(("kind", "config"), [(MLA, MLA_CONFIG), (GQA, GQA_CONFIG)])
def test_packed_documents_equal_separate_ones(kind, config):
    layer = build(lambda: kind(config), 0.4, 0)
    x = jax.random.normal(jax.random.key(1), (1, 11, 12))
    lengths = (4, 5)
    segments = jnp.array([[1] * 4 + [2] * 5 + [0] * 2])
    positions = jnp.array([[*range(4), *range(5), 0, 0]])
    y, max_logit = layer(x, context_for(config, segments, positions))
    start, largest = 0, []
    for n in lengths:
        alone, logit = layer(x[:, start : start + n], context_for(config, *one_document(1, n)))
        np.testing.assert_allclose(y[:, start : start + n], alone, atol=2e-6)
        largest.append(logit)
        start += n
    np.testing.assert_allclose(max_logit, np.max(largest, axis=0), rtol=1e-6)


def with_qk_norm(config):
    return replace(config, attention=replace(config.attention, qk_norm=True))


@pytest.mark.parametrize(
    ("kind", "config", "reference"), [(MLA, MLA_CONFIG, mla_head_by_head), (GQA, GQA_CONFIG, gqa_head_by_head)]
)
def test_qk_norm_equals_a_reference_head_by_head(kind, config, reference):
    layer = build(lambda: kind(with_qk_norm(config)), 0.4, 0)
    gains = [getattr(layer, name) for name in vars(layer) if "_norm_N" in name or name.endswith("_norm_R")]
    assert len(gains) == (4 if kind is MLA else 2) and all((gain[...] == 1).all() for gain in gains)
    for i, gain in enumerate(gains):
        gain[...] = 1 + 0.3 * jnp.cos(i + jnp.arange(gain.shape[0]))  # of every channel its own
    x = jax.random.normal(jax.random.key(1), (1, 9, 12))
    y, max_logit = jax.jit(layer)(x, context_for(config, *one_document(1, 9)))
    expected = reference(layer, np.asarray(x[0], np.float64), softmax_scale(config.attention))
    np.testing.assert_allclose(y[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(max_logit, expected[1], rtol=1e-5)


@pytest.mark.parametrize(("kind", "config"), [(MLA, MLA_CONFIG), (GQA, GQA_CONFIG)])
def test_qk_norm_bounds_the_logits_by_the_gains_whatever_the_weights(kind, config):
    """A normed vector of width d is at most sqrt(d) times its largest gain long: no logit exceeds sqrt(d) times two of them."""
    x = jax.random.normal(jax.random.key(1), (2, 9, 12))
    context = context_for(config, *one_document(2, 9))
    bound = np.sqrt(config.attention.d_nope + config.attention.d_rope)

    def largest(config):
        graphdef, weights = nnx.split(build(lambda: kind(config), 100.0, 0))
        return weights, jax.jit(lambda weights: nnx.merge(graphdef, weights)(x, context)[1])

    weights, max_logit = largest(with_qk_norm(config))
    assert (0.3 * bound < max_logit(weights)).all() and (max_logit(weights) <= bound * (1 + 1e-5)).all()
    for name in ("q_nope_norm_N", "q_rope_norm_R") if kind is MLA else ("q_norm_R",):
        weights[name] = jax.tree.map(lambda gain: 0.1 * gain, weights[name])
    assert (max_logit(weights) <= 0.1 * bound * (1 + 1e-5)).all()
    weights, max_logit = largest(config)
    assert (max_logit(weights) > 1e5).all()


def test_decoding_from_the_latent_can_not_have_qk_norm():
    """MLA's decoding keeps latents c, not keys, and gives a query q the logits (q W_k^T) c: linear in c. A normed key is not
    linear in c, so no matrix W_k^T, nor any other vector in place of q W_k^T, gives its logits (report 2.1)."""
    S, C, N = 40, MLA_CONFIG.attention.kv_rank, MLA_CONFIG.attention.d_nope
    x = jax.random.normal(jax.random.key(1), (1, S, 12))
    context = context_for(MLA_CONFIG, *one_document(1, S))

    def nope_logits(config):
        layer = build(lambda: MLA(config), 0.4, 0)
        c_BSC = layer.latent(x)
        q_THN, k_SHN, c_SC = (
            np.array(y[0], np.float64) for y in (layer.query(x, context), layer.key_value(x, context)[0], c_BSC)
        )
        return layer, q_THN[..., :N], c_SC, np.einsum("thn,shn->hts", q_THN[..., :N], k_SHN[..., :N])

    def unexplained(c_SC, logits_HTS):
        """What the best vectors in place of q W_k^T, found for every query and head by least squares, leave of the logits."""
        y_S = logits_HTS.reshape(-1, S).T
        best, *_ = np.linalg.lstsq(c_SC, y_S, rcond=None)
        return np.linalg.norm(c_SC @ best - y_S) / np.linalg.norm(y_S)

    layer, q_THN, c_SC, logits_HTS = nope_logits(MLA_CONFIG)
    absorbed_THC = np.einsum("thn,chn->thc", q_THN, layer.k_nope_CHN[...])
    np.testing.assert_allclose(np.einsum("thc,sc->hts", absorbed_THC, c_SC), logits_HTS, atol=1e-5 * np.abs(logits_HTS).max())
    assert S > C and unexplained(c_SC, logits_HTS) < 1e-5
    _, _, c_SC, logits_HTS = nope_logits(with_qk_norm(MLA_CONFIG))
    assert unexplained(c_SC, logits_HTS) > 0.1
