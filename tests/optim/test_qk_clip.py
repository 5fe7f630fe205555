import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from k2jax.config import AttentionConfig, ModelConfig, OptimConfig
from k2jax.model import mla
from k2jax.model.rope import look_up
from k2jax.model.weights import build, fill
from k2jax.optim.qk_clip import qk_clip

MLA = AttentionConfig(n_heads=3, n_kv_heads=3)
T, D, Q, C, H, N, R, V = 9, 8, 6, 5, 3, 4, 2, 4
MLA_SHAPES = {
    "q_nope_QHN": (Q, H, N),
    "q_rope_QHR": (Q, H, R),
    "kv_down_DC": (D, C),
    "k_rope_DR": (D, R),
    "k_nope_CHN": (C, H, N),
    "v_CHV": (C, H, V),
    "o_HVD": (H, V, D),
}


def gqa(heads, kv_heads):
    return AttentionConfig(kind="gqa", n_heads=heads, n_kv_heads=kv_heads, d_nope=0, d_rope=6)


def mla_logits(w, x_TD, c_TQ):
    """[H, T, T] logits on fixed inputs, without RoPE: a rotation of q_rope and k_rope is linear in both."""
    q_nope, q_rope = (np.einsum("tq,qhn->htn", c_TQ, w[name]) for name in ("q_nope_QHN", "q_rope_QHR"))
    k_nope = np.einsum("tc,chn->htn", x_TD @ w["kv_down_DC"], w["k_nope_CHN"])
    k_rope = x_TD @ w["k_rope_DR"]
    return (q_nope @ k_nope.mT + q_rope @ k_rope.T) / np.sqrt(N + R)


def gqa_logits(w, x_TD):
    q, k = np.einsum("td,dhr->htr", x_TD, w["q_DHR"]), np.einsum("td,dgr->gtr", x_TD, w["k_DGR"])
    k = np.stack([k[h // (len(q) // len(k))] for h in range(len(q))])
    return q @ k.mT / np.sqrt(q.shape[-1])


def largest(logits_HTT):
    """Each head's largest logit at or before the query."""
    return np.where(np.tri(T, dtype=bool), logits_HTT, -np.inf).max((1, 2))


def clipped(config, attention, params, max_logit_LH, updates=None):
    updates = jax.tree.map(jnp.zeros_like, params) if updates is None else updates
    out, _ = jax.jit(lambda u, p, s: qk_clip(config, attention).update(u, optax.EmptyState(), p, max_logit_LH=s))(
        updates, params, max_logit_LH
    )
    return out


def float64(layer):
    return {name: np.asarray(w, np.float64)[0] for name, w in layer.items()}


def apply(params, updates):
    return jax.tree.map(np.asarray, optax.apply_updates(params, updates))


@pytest.fixture
def inputs(normal):
    x = normal({"x": (T, D), "c": (T, Q)}, 5)
    return x["x"].astype(np.float64), x["c"].astype(np.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_mla_scales_a_heads_logits_by_gamma_and_nothing_else(alpha, normal, inputs):
    params = {"moe": {"attention": normal({name: (1, *shape) for name, shape in MLA_SHAPES.items()}, 0)}}
    before = mla_logits(float64(params["moe"]["attention"]), *inputs)
    max_H = largest(before)
    tau = float(np.sort(max_H)[0] * 1.01)  # one head stays
    config = OptimConfig(qk_tau=tau, qk_alpha=alpha)
    after_params = apply(params, clipped(config, MLA, params, {"moe": max_H[None].astype(np.float32)}))["moe"]["attention"]
    after = mla_logits(float64(after_params), *inputs)
    gamma = tau / np.maximum(tau, max_H)
    assert (gamma < 1).sum() == 2
    np.testing.assert_allclose(after, gamma[:, None, None] * before, rtol=1e-5, atol=1e-5 * np.abs(before).max())
    np.testing.assert_allclose(largest(after), np.minimum(max_H, tau), rtol=1e-5)

    old, still = params["moe"]["attention"], gamma == 1
    for name in ("kv_down_DC", "k_rope_DR", "v_CHV", "o_HVD"):
        np.testing.assert_array_equal(after_params[name], old[name])
    for name in ("q_nope_QHN", "q_rope_QHR", "k_nope_CHN"):
        np.testing.assert_array_equal(after_params[name][:, :, still], old[name][:, :, still])
    for name, power in (("q_nope_QHN", alpha), ("q_rope_QHR", 1), ("k_nope_CHN", 1 - alpha)):
        np.testing.assert_allclose(after_params[name], old[name] * gamma[:, None] ** power, rtol=1e-5)


def test_the_naive_clip_scales_every_head_of_a_layer_by_its_worst(normal, inputs):
    params = {"moe": {"attention": normal({name: (2, *shape) for name, shape in MLA_SHAPES.items()}, 0)}}
    logits = {"moe": np.array([[10, 40, 5], [1, 2, 3]], np.float32)}
    out = clipped(OptimConfig(qk_tau=20.0, qk_scope="layer"), MLA, params, logits)
    old, new = params["moe"]["attention"], apply(params, out)["moe"]["attention"]
    for name, power in (("q_nope_QHN", 0.5), ("q_rope_QHR", 1), ("k_nope_CHN", 0.5), ("k_rope_DR", 0), ("v_CHV", 0)):
        np.testing.assert_allclose(new[name][0], old[name][0] * 0.5**power, rtol=1e-6)  # innocent heads too
        np.testing.assert_array_equal(new[name][1], old[name][1])  # the other layer is its own


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_mha_caps_every_head_at_tau(alpha, normal, inputs):
    x = inputs[0]
    params = {"dense": {"attention": normal({"q_DHR": (1, D, 4, 6), "k_DGR": (1, D, 4, 6), "v_DGV": (1, D, 4, 5)}, 1)}}
    old = params["dense"]["attention"]
    max_H = largest(gqa_logits(float64(old), x))
    tau = float(np.median(max_H))
    config = OptimConfig(qk_tau=tau, qk_alpha=alpha)
    new = apply(params, clipped(config, gqa(4, 4), params, {"dense": max_H[None].astype(np.float32)}))["dense"]["attention"]
    np.testing.assert_allclose(largest(gqa_logits(float64(new), x)), np.minimum(max_H, tau), rtol=1e-5)
    gamma = tau / np.maximum(tau, max_H)
    np.testing.assert_allclose(new["q_DHR"], old["q_DHR"] * gamma[:, None] ** alpha, rtol=1e-5)
    np.testing.assert_array_equal(new["v_DGV"], old["v_DGV"])
    for name in ("q_DHR", "k_DGR"):
        np.testing.assert_array_equal(new[name][:, :, gamma == 1], old[name][:, :, gamma == 1])


@pytest.mark.parametrize("mode", ["group", "query"])
def test_gqa_bounds_the_logits_in_both_modes(mode, normal, inputs):
    x = inputs[0]
    params = {"dense": {"attention": normal({"q_DHR": (1, D, 6, 6), "k_DGR": (1, D, 2, 6)}, 3)}}
    old = params["dense"]["attention"]
    before = gqa_logits(float64(old), x)
    max_H = largest(before)
    # Above tau: two heads of the first group, if it holds the hottest, and none of the other.
    hot = int(np.argmax([max_H[:3].max(), max_H[3:].max()]))
    tau = float(max(max_H.reshape(2, 3)[1 - hot].max(), np.sort(max_H.reshape(2, 3)[hot])[0]) * 1.001)
    assert 0 < (max_H > tau).sum() < 3
    config = OptimConfig(qk_tau=tau, qk_gqa=mode)
    new = apply(params, clipped(config, gqa(6, 2), params, {"dense": max_H[None].astype(np.float32)}))["dense"]["attention"]
    after = gqa_logits(float64(new), x)
    assert (largest(after) <= tau * (1 + 1e-5)).all()

    own = tau / np.maximum(tau, max_H)
    gamma = own if mode == "query" else np.repeat(own.reshape(2, 3).min(1), 3)
    np.testing.assert_allclose(after, gamma[:, None, None] * before, rtol=1e-5, atol=1e-5 * np.abs(before).max())
    np.testing.assert_array_equal(new["q_DHR"][:, :, gamma == 1], old["q_DHR"][:, :, gamma == 1])
    if mode == "query":
        np.testing.assert_array_equal(new["k_DGR"], old["k_DGR"])
    else:
        np.testing.assert_array_equal(new["k_DGR"][:, :, 1 - hot], old["k_DGR"][:, :, 1 - hot])
        assert (new["k_DGR"][:, :, hot] != old["k_DGR"][:, :, hot]).any()


LAYERS = {
    "mla": AttentionConfig(n_heads=3, n_kv_heads=3, q_rank=7, kv_rank=5, d_nope=4, d_rope=6, d_value=3, block=4),
    "mla, soft cap": AttentionConfig(
        n_heads=3, n_kv_heads=3, q_rank=7, kv_rank=5, d_nope=4, d_rope=6, d_value=3, block=4, soft_cap=0.5
    ),
    "gqa": AttentionConfig(kind="gqa", n_heads=6, n_kv_heads=2, d_nope=0, d_rope=6, d_value=3, block=4),
}


@functools.cache
def attention_layer(name):
    """The model's own layer: a weight tree with it alone, and the jitted `(tree, x, segments) -> max_logit_LH`."""
    config = ModelConfig(d_model=12, dtype="float32", attention=LAYERS[name])
    graphdef, state = nnx.split(build(lambda: (mla.MLA if name.startswith("mla") else mla.GQA)(config), 0.4, 0))
    weights = nnx.to_pure_dict(state)

    @jax.jit
    def max_logit_LH(params, x_BTD, segments_BT):
        layer = fill(graphdef, state, jax.tree.map(lambda w: w[0], params["moe"]["attention"]))
        positions = jnp.tile(jnp.arange(x_BTD.shape[1]), (x_BTD.shape[0], 1))
        context = mla.Context(segments_BT, *look_up(config.attention.rope, 6, x_BTD.shape[1], positions))
        return {"moe": layer(x_BTD, context)[1][None]}

    return {"moe": {"attention": jax.tree.map(lambda w: np.asarray(w)[None], weights)}}, max_logit_LH


@pytest.mark.parametrize(("name", "mode"), [("mla", "group"), ("mla, soft cap", "group"), ("gqa", "group"), ("gqa", "query")])
def test_a_layer_run_again_on_its_inputs_has_its_hot_heads_at_tau(name, mode, normal):
    """The real layer, forward, clip, forward: what the report's algorithm promises of the batch it saw, to rounding."""
    (params, forward), x = attention_layer(name), normal({"x": (2, 9, 12)}, 5)["x"]
    segments = np.repeat([[1, 1, 1, 1, 2, 2, 2, 0, 0]], 2, 0)
    before = np.asarray(forward(params, x, segments)["moe"][0])
    tau = float(np.sort(before)[-2] * 0.9)  # two heads are over it
    config = OptimConfig(qk_tau=tau, qk_gqa=mode)
    new = apply(params, clipped(config, LAYERS[name], params, {"moe": before[None]}))
    after = np.asarray(forward(new, x, segments)["moe"][0])
    own = tau / np.maximum(tau, before)
    gamma = np.repeat(own.reshape(2, 3).min(1), 3) if (name, mode) == ("gqa", "group") else own
    assert (own < 1).sum() == 2
    np.testing.assert_allclose(after[own < 1].max(), tau, rtol=1e-5)
    np.testing.assert_allclose(after, gamma * before, rtol=1e-5)
    np.testing.assert_array_equal(after[gamma == 1], before[gamma == 1])
    if name == "mla, soft cap":
        assert before.max() > LAYERS[name].soft_cap  # the clip goes by what the cap is given
    old, new = params["moe"]["attention"], new["moe"]["attention"]
    scaled = {"q_nope_QHN", "q_rope_QHR", "k_nope_CHN", "q_DHR"} | ({"k_DGR"} if mode == "group" else set())
    for leaf in old:
        if leaf not in scaled:
            np.testing.assert_array_equal(new[leaf], old[leaf])
        elif leaf != "k_DGR":
            np.testing.assert_array_equal(new[leaf][:, :, gamma == 1], old[leaf][:, :, gamma == 1])


def test_heads_with_only_negative_logits_or_none_are_left_alone(normal):
    (params, forward), x = attention_layer("gqa"), normal({"x": (2, 9, 12)}, 5)["x"]
    layer = params["moe"]["attention"]
    k_DGR = -layer["q_DHR"][:, :, ::3]  # a document of one token has the logit -|q|^2 in the head that shares it
    params = {"moe": {"attention": layer | {"q_DHR": np.repeat(-k_DGR, 3, 2), "k_DGR": k_DGR}}}
    for segments in (np.tile(np.arange(1, 10), (2, 1)), np.zeros((2, 9), int)):
        logits = forward(params, 30 * x, segments)
        assert (logits["moe"] < -100).all() and np.isfinite(logits["moe"]).all()
        for scope in ("head", "layer"):
            new = apply(params, clipped(OptimConfig(qk_tau=1e-3, qk_scope=scope), LAYERS["gqa"], params, logits))
            jax.tree.map(np.testing.assert_array_equal, new, params)


def test_every_stack_is_clipped_by_its_own_rows(shapes, normal):
    """Dense, expert and MTP layers at once, and an update in the making: the sum is clipped, other heads' updates are
    passed on bit for bit, and a hot head in one layer leaves the same head of the next alone."""
    params, updates = normal(shapes, 0), normal(shapes, 1)
    logits = {
        "dense": np.array([[50, 100, -3]], np.float32),
        "moe": np.array([[90, 400, 7], [1, 2, 900]], np.float32),
        "mtp": np.array([[101, 0, -np.inf]], np.float32),
    }
    hot = {("dense", 0): {}, ("moe", 0): {1: 4.0}, ("moe", 1): {2: 9.0}, ("mtp", 0): {0: 1.01}}
    out = clipped(OptimConfig(qk_tau=100.0, qk_alpha=0.5), MLA, params, logits, updates)
    scaled = {"q_nope_QHN": 0.5, "k_nope_CHN": 0.5, "q_rope_QHR": 1}
    for (stack, layer), factors in hot.items():
        block = "block" if stack == "mtp" else None
        got, u, w = ((tree[stack][block] if block else tree[stack])["attention"] for tree in (out, updates, params))
        for name in got:
            for head in range(3) if name in scaled else ():
                at = (layer, slice(None), head)
                if head in factors:
                    want = factors[head] ** -scaled[name] * (w[name][at] + u[name][at])
                    np.testing.assert_allclose(w[name][at] + got[name][at], want, rtol=1e-5, atol=1e-6)
                else:
                    np.testing.assert_array_equal(got[name][at], u[name][at])
            if name not in scaled:
                np.testing.assert_array_equal(got[name], u[name])
    rest = jax.tree.map(np.array_equal, out, updates)
    for stack in ("dense", "moe"):
        rest[stack].pop("attention")
    rest["mtp"]["block"].pop("attention")
    assert all(jax.tree.leaves(rest))


def test_a_statistic_that_matches_no_layer_is_refused(shapes, normal):
    params = normal(shapes, 0)
    good = {"dense": np.zeros((1, 3)), "moe": np.zeros((2, 3)), "mtp": np.zeros((1, 3))}

    def update(params, logits, attention=MLA):
        qk_clip(OptimConfig(), attention).update(params, optax.EmptyState(), params, max_logit_LH=logits)

    update(params, good)
    with pytest.raises(ValueError, match="no entry for the attention of 'mtp'; it has"):
        update(params, {"dense": good["dense"], "moe": good["moe"]})
    with pytest.raises(ValueError, match=r"has \['extra'\]"):
        update(params, good | {"extra": np.zeros((1, 3))})
    for wrong in ((3,), (3, 2), (1, 3), (2, 4)):
        with pytest.raises(ValueError, match=r"max_logit_LH\['moe'\] must have .* \(2, 3\); got"):
            update(params, good | {"moe": np.zeros(wrong)})
    with pytest.raises(ValueError, match="dense/attention has no q_DHR, k_DGR"):
        update(params, good, gqa(3, 3))
    with pytest.raises(ValueError, match="mtp/second/attention is the second attention of 'mtp'"):
        update(params | {"mtp": params["mtp"] | {"second": params["mtp"]["block"]}}, good)
    with pytest.raises(ValueError, match="needs params"):
        qk_clip(OptimConfig(), MLA).update(params, optax.EmptyState(), max_logit_LH=good)
