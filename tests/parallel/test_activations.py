"""Activation policies: stored, rounded, moved or recomputed, the gradients are those of keeping all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

from k2jax.config import ActivationConfig, MeshConfig
from k2jax.model import rope, transformer
from k2jax.model.mla import Context
from k2jax.parallel import activations, layer, stage
from k2jax.parallel.layout import MOE
from k2jax.parallel.pairing import Done, alone
from k2jax.train.step import gradients

FP8 = "float8_e4m3fn"
K2_UNROUNDED = ActivationConfig(policy="k2", gates="offload")


@pytest.fixture(scope="module")
def problem(run_of, make_batch):
    config = run_of(MeshConfig(data=1), n_layers=3, microbatches=1, batch=4)
    params, bias = transformer.init(config.model, 0)
    return config, params, bias, make_batch(0, config.batch, config.seq_len + 1, 64)


def program(problem, policy):
    config, *given = problem
    return jax.jit(lambda *given: gradients(replace(config, activations=policy), *given)), given


@pytest.fixture(scope="module")
def kept(problem):
    f, given = program(problem, ActivationConfig(policy="none"))
    return jax.tree.map(np.asarray, f(*given))


def apart(a, b):
    """The worst leaf's largest difference over its largest value."""
    return max(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("policy", [ActivationConfig(policy="full"), K2_UNROUNDED], ids=["full", "k2 without FP8"])
def test_recomputing_and_the_host_change_nothing(problem, kept, policy):
    f, given = program(problem, policy)
    grads, parts, total = jax.tree.map(np.asarray, f(*given))
    assert apart(grads, kept[0]) < 1e-6
    np.testing.assert_allclose(total, kept[2], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, parts.max_logit_LH, kept[1].max_logit_LH)  # noted once, in the forward pass


def test_fp8_rounds_gradients_and_not_the_loss(problem, kept):
    f, given = program(problem, ActivationConfig(policy="k2"))
    grads, _, total = jax.tree.map(np.asarray, f(*given))
    np.testing.assert_allclose(total, kept[2], rtol=1e-6)
    assert 1e-4 < apart(grads, kept[0]) < 0.1


def equations(jaxpr):
    """All equations, those of inner functions too, with the dtypes that each touches."""
    for equation in jaxpr.eqns:
        yield equation, {v.aval.dtype.name for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "dtype")}
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def products(jaxpr):
    """The dtypes of each product."""
    names = "dot_general", "ragged_dot", "conv_general_dilated"
    return [dtypes for equation, dtypes in equations(jaxpr) if equation.primitive.name in names]


def test_no_fp8_number_enters_a_product(problem):
    f, given = program(problem, replace(K2_UNROUNDED, gates="fp8", norms="fp8", latents="fp8", stream="fp8"))
    jaxpr = jax.make_jaxpr(f)(*given).jaxpr
    assert sum(FP8 in dtypes for _, dtypes in equations(jaxpr)) > 4
    assert len(products(jaxpr)) > 20 and not any(FP8 in dtypes for dtypes in products(jaxpr))


@pytest.fixture(scope="module")
def one_layer(run_of, make_batch):
    """A layer of the pipeline there and back, by what becomes of its experts' gates, and what it is given."""
    config = run_of(MeshConfig(data=1), n_layers=1, n_dense=0, n_mtp=0, microbatches=1, batch=2)
    pipe, a = stage.pipeline(config, config.mesh, 1), config.model.attention
    params, bias = transformer.init(config.model, 0)
    batch = make_batch(0, 2, config.seq_len, 64)
    angles = rope.look_up(a.rope, a.d_rope, config.seq_len, jnp.asarray(batch["positions_BT"]))
    context = Context(jnp.asarray(batch["segments_BT"]), *angles)
    x_BTD, d_y_BTD = jax.random.normal(jax.random.key(0), (2, 2, config.seq_len, config.model.d_model))

    def under(action):
        shape = pipe.shape._replace(actions=pipe.shape.actions | {"expert_gates": action})
        of = shape.actions

        def run(steps):
            def unit():
                return Done(None, (yield from steps))

            return alone(shape.exchange.travel, unit()).rest

        def f(weights, x_BTD, d_y_BTD):
            slot = layer.Slot(jnp.int32(0), jnp.int32(MOE), weights, bias["moe"])
            y_BTD, _, stored = run(layer.forward(shape, slot, context, x_BTD))
            stored = activations.fetch(of, activations.put_away(of, stored))
            total = jax.tree.map(jnp.zeros_like, layer.experts_of(weights))
            back = run(layer.backward(shape, slot, context, x_BTD, stored, d_y_BTD, jnp.zeros(()), total))
            return y_BTD, back.d_x_BTD, back.d_weights, back.finish()

        return f

    return under, (params["moe"], x_BTD, d_y_BTD)


def test_experts_gates_are_not_computed_again_and_only_fp8_rounds_them(one_layer):
    under, given = one_layer
    expected = jax.tree.map(np.asarray, jax.jit(under("recompute"))(*given))
    again = products(jax.make_jaxpr(under("recompute"))(*given).jaxpr)
    for action in ("offload", "fp8+offload"):
        got = jax.tree.map(np.asarray, jax.jit(under(action))(*given))
        jaxpr = jax.make_jaxpr(under(action))(*given).jaxpr
        assert len(products(jaxpr)) == len(again) - 2 and not any(FP8 in dtypes for dtypes in products(jaxpr))
        assert any(FP8 in dtypes for _, dtypes in equations(jaxpr)) == ("fp8" in action)
        np.testing.assert_array_equal(got[0], expected[0])
        if "fp8" in action:
            assert 1e-4 < apart(got, expected) < 0.1
        else:
            jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_what_is_recomputed_by_compiled_flops(problem):
    """Attention's products are done again under `full` and not where its output is kept; nothing is under `none`."""

    def flops(policy):
        f, given = program(problem, policy)
        return f.lower(*given).compile().cost_analysis()["flops"]

    none, k2, full = (flops(ActivationConfig(policy=policy)) for policy in ("none", "k2", "full"))
    assert none < 0.95 * full and k2 < 0.98 * full and none < k2


def test_k2_stores_no_norm_no_head_and_no_swiglu_output(problem):
    config = problem[0]
    of = activations.actions(ActivationConfig(policy="k2"), cut=True)
    names = activations.stored_names(of)
    assert names == set(activations.NAMES) - {"norms", "heads", "hidden"} | {"attention_lse", "routing"}
    a, m = config.model.attention, config.model.moe
    model = replace(config.model, dtype="bfloat16")
    held = activations.cost(model, of, config.seq_len, rows=3.0, pairs=2.5)
    bf16 = 2 * config.model.d_model + a.q_rank + a.kv_rank + a.d_rope + a.n_heads * a.d_value
    fp8 = 2 * (m.n_shared + 2.5) * m.d_expert + 3 * config.model.d_model
    assert held.host == pytest.approx(2 * bf16 + 4 * a.n_heads + (1 + 4 / 128) * fp8)
    assert held.device == 8 * m.n_active


def test_fields_override_the_policy_and_auto_depends_on_the_mesh():
    assert set(activations.actions(ActivationConfig(), cut=False).values()) == {"keep"}
    full = activations.actions(ActivationConfig(heads="fp8"), cut=True)
    assert full["heads"] == "fp8" and full["norms"] == "recompute" and full["input"] == "keep"
    with pytest.raises(ValueError, match="input cannot be recomputed"):
        ActivationConfig(input="recompute")


def test_collect_and_replay_by_hand():
    def f(x, y):
        a = checkpoint_name(jnp.sin(x), "a")
        return jax.jit(lambda a: checkpoint_name(a * y, "b") ** 2)(a).sum()

    x, y = jnp.arange(3.0), jnp.full(3, 2.0)
    out, named = activations.collect(f, {"a", "b"})(x, y)
    assert out == f(x, y) and set(named) == {"a", "b"}
    given = {"a": (jnp.full(3, 5.0),), "b": (jnp.full(3, 7.0),)}
    value, (d_x, d_y) = jax.value_and_grad(activations.replay(f, given), (0, 1))(x, y)
    assert value == 3 * 49
    np.testing.assert_allclose(d_y, 2 * 7 * given["a"][0])  # d(b^2)/db at the given b, db/dy at the given a
    np.testing.assert_allclose(d_x, 2 * 7 * y * jnp.cos(x), rtol=1e-6)
