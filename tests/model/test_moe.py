from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.config import ModelConfig, MoEConfig
from k2jax.model.moe import MoE, balance_loss, keep_groups, route, routed_scale, swiglu, update_bias
from k2jax.model.weights import build

SMALL = MoEConfig(n_experts=12, n_active=3, d_expert=5, routed_scale=2.0, balance_weight=0.0)


def routed(config, x_BTD, router_DE, bias_E=None, real_BT=None):
    bias_E = jnp.zeros(config.n_experts) if bias_E is None else bias_E
    real_BT = jnp.ones(x_BTD.shape[:2], bool) if real_BT is None else real_BT
    return route(config, x_BTD, router_DE, bias_E, real_BT)


def test_router_matches_its_formula_token_by_token():
    x, router, bias = (
        jax.random.normal(k, s)
        for k, s in zip(jax.random.split(jax.random.key(0), 3), [(2, 5, 8), (8, 12), (12,)], strict=True)
    )
    routing = routed(SMALL, x, router, bias)
    scores = 1 / (1 + np.exp(-np.asarray(x.reshape(10, 8), np.float64) @ np.asarray(router, np.float64)))
    for token in range(10):
        chosen = np.argsort(-(scores[token] + np.asarray(bias)))[:3]
        gates = 2.0 * scores[token][chosen] / scores[token][chosen].sum()
        np.testing.assert_array_equal(routing.expert_XK[token], chosen)
        np.testing.assert_allclose(routing.weight_XK[token], gates, rtol=1e-5)
    np.testing.assert_array_equal(routing.load_E, np.bincount(np.asarray(routing.expert_XK).ravel(), minlength=12))
    assert routing.load_E.dtype == jnp.int32


def test_bias_changes_the_choice_and_never_the_weights():
    x, router = jax.random.normal(jax.random.key(0), (1, 6, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    bias = jnp.zeros(12).at[7].set(10.0)
    routing = routed(SMALL, x, router, bias)
    assert (routing.expert_XK[:, 0] == 7).all()  # chosen by everyone
    score_XE = jax.nn.sigmoid(x.reshape(6, 8) @ router)
    chosen = jnp.take_along_axis(score_XE, routing.expert_XK, 1)
    np.testing.assert_allclose(routing.weight_XK, 2.0 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(routing.weight_XK.sum(1), 2.0, rtol=1e-6)


def test_bias_has_no_gradient():
    x, router = jax.random.normal(jax.random.key(0), (1, 6, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    grad = jax.grad(lambda b: routed(replace(SMALL, balance_weight=1.0), x, router, b).weight_XK[:, 0].sum())(jnp.zeros(12))
    assert (grad == 0).all()


def test_lower_index_wins_a_tie():
    routing = routed(SMALL, jnp.ones((1, 4, 8)), jnp.zeros((8, 12)))
    np.testing.assert_array_equal(routing.expert_XK, np.tile([0, 1, 2], (4, 1)))


@pytest.mark.parametrize(("experts", "active", "expected"), [(384, 8, 2.827), (64, 6, 2.446)])
def test_routed_scale_by_monte_carlo(experts, active, expected):
    assert routed_scale(experts, active, 1) == pytest.approx(expected, abs=2e-3)


def test_groups_match_brute_force():
    config = replace(SMALL, n_experts=16, n_groups=4, n_active_groups=2)
    biased = np.asarray(jax.random.normal(jax.random.key(3), (20, 16)))
    kept = np.asarray(keep_groups(config, jnp.asarray(biased)))
    for token in range(20):
        groups = biased[token].reshape(4, 4)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(1))[:2]
        expected = np.where(np.isin(np.arange(4), best)[:, None], groups, -np.inf).ravel()
        np.testing.assert_array_equal(kept[token], expected)


def test_one_group_is_plain_top_k():
    x, router = jax.random.normal(jax.random.key(0), (1, 6, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    all_groups = replace(SMALL, n_groups=3, n_active_groups=3)
    np.testing.assert_array_equal(routed(SMALL, x, router).expert_XK, routed(all_groups, x, router).expert_XK)


def test_balance_loss_is_alpha_at_perfect_balance():
    config = replace(SMALL, n_experts=4, n_active=2, balance_weight=0.25)
    even = balance_loss(config, jnp.full((3, 8, 4), 0.5), jnp.full((3, 4), 4, jnp.int32), jnp.ones((3, 8), bool))
    assert even == pytest.approx(0.25, rel=1e-6)


def test_balance_loss_matches_its_formula_and_differentiates_through_scores_alone():
    config = replace(SMALL, balance_weight=0.1)
    x, router = jax.random.normal(jax.random.key(0), (2, 7, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    real = jnp.ones((2, 7), bool).at[1, 5:].set(False)
    routing = routed(config, x, router, real_BT=real)

    def formula(router, f):
        total = 0.0
        for b, length in ((0, 7), (1, 5)):
            s = jax.nn.sigmoid(x[b, :length] @ router)
            total += 0.1 * (f[b] * (s / s.sum(1, keepdims=True)).mean(0)).sum() / 2
        return total

    chosen = np.asarray(routing.expert_XK).reshape(2, 7, 3)
    f = [12 / (3 * n) * np.bincount(chosen[b, :n].ravel(), minlength=12) for b, n in ((0, 7), (1, 5))]
    np.testing.assert_allclose(routing.balance, formula(router, f), rtol=1e-5)
    got = jax.grad(lambda r: routed(config, x, r, real_BT=real).balance)(router)
    np.testing.assert_allclose(got, jax.grad(formula)(router, f), atol=1e-7)


def test_padding_enters_no_load():
    x, router = jax.random.normal(jax.random.key(0), (2, 7, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    real = jnp.zeros((2, 7), bool).at[0].set(True)
    np.testing.assert_array_equal(routed(SMALL, x, router, real_BT=real).load_E, routed(SMALL, x[:1], router).load_E)


@pytest.mark.parametrize("n_shared", [0, 1])
def test_layer_equals_a_loop_over_experts_plus_the_shared_one(n_shared):
    config = ModelConfig(d_model=8, dtype="float32", moe=replace(SMALL, n_shared=n_shared))
    layer = build(lambda: MoE(config), 0.5, 0)
    x = jax.random.normal(jax.random.key(0), (2, 9, 8))
    real = jnp.ones((2, 9), bool)
    y, routing = layer(x, jnp.zeros(12), real)
    expected = swiglu(x, layer.shared_gate_DF[...], layer.shared_up_DF[...], layer.shared_down_FD[...]) if n_shared else 0 * x
    for e in range(12):
        weight = jnp.where(routing.expert_XK == e, routing.weight_XK, 0).sum(1).reshape(2, 9, 1)
        expected += weight * swiglu(x, layer.gate_EDF[...][e], layer.up_EDF[...][e], layer.down_EFD[...][e])
    np.testing.assert_allclose(y, expected, atol=3e-6)


@pytest.mark.parametrize("centered", [False, True])
def test_bias_update_evens_out_a_skewed_load(centered):
    """Tokens that all prefer a few experts: the spread of the loads shrinks, for both sign rules."""
    x = jax.random.normal(jax.random.key(0), (1, 512, 8)) + 1.0
    router = jax.random.normal(jax.random.key(1), (8, 12))
    bias, loads = jnp.zeros(12), []
    step = jax.jit(lambda bias: routed(SMALL, x, router, bias).load_E)
    for _ in range(200):
        loads.append(step(bias))
        bias = update_bias(bias, loads[-1], speed=0.01, centered=centered)
    assert loads[-1].std() < 0.25 * loads[0].std()
    if centered:
        assert abs(float(bias.mean())) < 1e-5  # does not drift


def test_bias_update_is_the_sign_of_the_missing_load():
    load = jnp.array([[4, 0, 2, 2]], jnp.int32)
    np.testing.assert_allclose(update_bias(jnp.zeros((1, 4)), load, speed=0.1, centered=False), [[-0.1, 0.1, 0, 0]])
    load = jnp.array([[8, 0, 0, 0]], jnp.int32)
    np.testing.assert_allclose(
        update_bias(jnp.zeros((1, 4)), load, speed=0.1, centered=True), [[-0.15, 0.05, 0.05, 0.05]], rtol=1e-6
    )
