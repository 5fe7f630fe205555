import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k2jax.axes import axes_of
from k2jax.config import AttentionConfig, ModelConfig, MoEConfig
from k2jax.model.block import Block
from k2jax.model.mla import Context
from k2jax.model.norm import rms_norm
from k2jax.model.rope import look_up
from k2jax.model.transformer import abstract, init
from k2jax.model.transformer import apply as eager_apply
from k2jax.model.weights import fill

TINY = ModelConfig(
    n_words=50,
    d_model=16,
    n_layers=3,
    n_dense=1,
    d_dense=20,
    n_mtp=1,
    context=32,
    dtype="float32",
    init_std=0.3,
    attention=AttentionConfig(n_heads=2, n_kv_heads=2, q_rank=8, kv_rank=6, d_nope=4, d_rope=4, d_value=4, block=8),
    moe=MoEConfig(n_experts=6, n_active=2, d_expert=5, routed_scale=0.0),
)

apply = jax.jit(eager_apply, static_argnums=0)


@pytest.fixture(scope="module")
def weights():
    return init(TINY, 0)


def batch(B=2, T=9, seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (B, T + 1), 0, TINY.n_words)
    return tokens, jnp.ones((B, T + 1), jnp.int32), jnp.tile(jnp.arange(T + 1), (B, 1))


def layer(params, l):
    return jax.tree.map(lambda w: w[l], params)


def test_forward_equals_its_layers_in_order(weights):
    """The scanned stacks against plain calls of single blocks, MTP included."""
    params, bias = weights
    bias = jax.tree.map(lambda b: b + 0.1 * jnp.arange(6.0).reshape(1, 6), bias)
    tokens, segments, positions = batch()
    context = Context(segments[:, :-1], *look_up(TINY.attention.rope, 4, 9, positions[:, :-1]))

    @functools.partial(jax.jit, static_argnames="experts")
    def block(weights, x, bias_E, *, experts):
        module = nnx.eval_shape(lambda: Block(TINY, experts=experts))
        return fill(*nnx.split(module), weights)(x, bias_E, context)

    x = params["embed_WD"][tokens[:, :-1]]
    x, seen = block(layer(params["dense"], 0), x, None, experts=False)
    logits, loads = [seen[0]], []
    for l in range(2):
        x, seen = block(layer(params["moe"], l), x, bias["moe"][l], experts=True)
        logits.append(seen[0])
        loads.append(seen[1].load_E)
    m = params["mtp"]
    pair = [rms_norm(x, m["hidden_norm_D"], 1e-6), rms_norm(params["embed_WD"][tokens[:, 1:]], m["embed_norm_D"], 1e-6)]
    z, seen = block(layer(m["block"], 0), jnp.concatenate(pair, -1) @ m["project_JD"], bias["mtp"][0], experts=True)

    out = apply(TINY, params, bias, tokens, segments, positions)
    np.testing.assert_allclose(out.hidden_BTD, rms_norm(x, params["norm_D"], 1e-6), atol=2e-5)
    np.testing.assert_allclose(out.mtp_BTD, rms_norm(z, m["norm_D"], 1e-6), atol=2e-5)
    np.testing.assert_allclose(out.aux.max_logit_LH["dense"][0], logits[0], rtol=1e-5)
    np.testing.assert_allclose(out.aux.max_logit_LH["moe"], jnp.stack(logits[1:]), rtol=1e-5)
    np.testing.assert_allclose(out.aux.max_logit_LH["mtp"][0], seen[0], rtol=1e-5)
    np.testing.assert_array_equal(out.aux.load_LE["moe"], jnp.stack(loads))
    np.testing.assert_array_equal(out.aux.load_LE["mtp"][0], seen[1].load_E)
    assert out.aux.load_LE["moe"].sum() == 2 * 2 * 9 * 2  # layers x tokens x choices


def test_output_depends_on_no_later_token(weights):
    """Causality by gradient: d hidden_t / d embedding_s is 0 for s > t, and not for s <= t; MTP sees one token further."""
    params, bias = weights
    tokens, segments, positions = batch(B=1, T=6)
    tokens = jnp.arange(7)[None]  # every position its own row of the embedding

    @jax.jit
    def reach(t):
        def states(embed_WD):
            out = apply(TINY, {**params, "embed_WD": embed_WD}, bias, tokens, segments, positions)
            return jnp.stack([jnp.sin(out.hidden_BTD[0, t]).sum(), jnp.sin(out.mtp_BTD[0, t]).sum()])

        return jnp.abs(jax.jacrev(states)(params["embed_WD"])[:, :7]).max(2) > 0

    for t in (0, 3, 5):
        hidden, mtp = reach(t)
        np.testing.assert_array_equal(hidden, np.arange(7) <= t)
        np.testing.assert_array_equal(mtp, np.arange(7) <= t + 1)


def test_abstract_has_the_shapes_of_init(weights):
    shapes = jax.tree.map(lambda w: (w.shape, w.dtype), weights)
    assert jax.tree.map(lambda w: (w.shape, w.dtype), abstract(TINY)) == shapes


def test_every_weight_is_named_by_its_axes(weights):
    """Names give the rank, and a letter has one size throughout, but for F and V-like widths that differ by layer kind."""
    for path, w in jax.tree_util.tree_leaves_with_path(weights[0]):
        keys = [p.key for p in path]
        stacked = keys[0] in ("dense", "moe") or "block" in keys
        assert len(axes_of(keys[-1])) == w.ndim - stacked, keys
        assert w.shape[stacked:].count(TINY.d_model) >= axes_of(keys[-1]).count("D"), keys


def test_seeds_differ_and_repeat():
    a, b, again = init(TINY, 0)[0], init(TINY, 1)[0], init(TINY, 0)[0]
    jax.tree.map(np.testing.assert_array_equal, a, again)
    assert not jnp.allclose(a["embed_WD"], b["embed_WD"])
    stacked = a["moe"]["ffn"]["gate_EDF"]
    assert not jnp.allclose(stacked[0], stacked[1])  # every layer is drawn on its own
    wider = init(replace(TINY, moe=replace(TINY.moe, n_experts=8)), 0)[0]  # other experts leave every other weight as it was
    np.testing.assert_array_equal(a["moe"]["attention"]["o_HVD"], wider["moe"]["attention"]["o_HVD"])
    assert jnp.std(stacked) == pytest.approx(TINY.init_std, rel=0.05)


def test_dense_only_and_experts_only_models_run():
    for changes in ({"n_dense": 3, "n_mtp": 0}, {"n_dense": 0, "n_mtp": 0}):
        config = replace(TINY, **changes)
        params, bias = init(config, 0)
        out = apply(config, params, bias, *batch())
        assert out.mtp_BTD is None
        assert set(out.aux.max_logit_LH) == ({"dense"} if changes["n_dense"] else {"moe"})
        assert set(bias) == ({"moe"} if not changes["n_dense"] else set())
        assert set(params) == {"embed_WD", "head_WD", "norm_D", *out.aux.max_logit_LH}


def test_bfloat16_stays_close_and_keeps_router_and_norms_in_float32(weights):
    params, bias = weights
    config = replace(TINY, dtype="bfloat16")
    low, high = apply(config, params, bias, *batch()), apply(TINY, params, bias, *batch())
    assert low.hidden_BTD.dtype == jnp.bfloat16
    assert low.aux.max_logit_LH["moe"].dtype == jnp.float32
    error = jnp.abs(low.hidden_BTD.astype(jnp.float32) - high.hidden_BTD)
    assert jnp.median(error) < 0.03


def test_full_size_declares_no_array_beyond_shapes():
    config = ModelConfig(n_mtp=1)
    leaves = jax.tree.leaves(abstract(config))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(int(np.prod(leaf.shape, dtype=object)) for leaf in leaves) == 1_043_570_379_648
