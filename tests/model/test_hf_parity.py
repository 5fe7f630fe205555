"""Our forward on published checkpoints against the public classes (golden files) and a second implementation (NumPy)."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from k2jax.model import hf, store, transformer
from k2jax.model.block import Block
from k2jax.model.mla import Context
from k2jax.model.norm import rms_norm
from k2jax.model.rope import look_up
from k2jax.model.tensor_files import read_header
from k2jax.model.weights import fill
from tests.model import reference

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "plain": ("deepseek_v3", "config.json"),
    "yarn": ("deepseek_v3", "config_yarn.json"),
    "llama": ("llama", "config.json"),
}

apply = jax.jit(transformer.apply, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_layer(config, experts, weights, x_BTD, bias_E, context):
    """A layer's output, and its router's choice."""
    layer = fill(*nnx.split(nnx.eval_shape(lambda: Block(config, experts=experts))), weights)
    chosen = None
    if experts:
        z_BTD = layer.attend(x_BTD, context)[1]
        chosen = layer.ffn.route(z_BTD, bias_E, context.segments_BT > 0).expert_XK
    return layer(x_BTD, bias_E, context)[0], chosen


def trace(weights, tokens):
    """Logits [T, W], every layer's output [L, T, D], the sorted choices [n, T, K] and MTP's states of one sequence."""
    config, params, bias = weights
    a, T = config.attention, len(tokens)
    positions_BT = jnp.arange(T)[None]
    context = Context(jnp.ones_like(positions_BT), *look_up(a.rope, a.d_rope, T, positions_BT))
    x_BTD, hidden, choices = params["embed_WD"][tokens][None], [], []
    for stack, experts, n in (("dense", False, config.n_dense), ("moe", True, config.n_moe)):
        for l in range(n):
            of_layer = jax.tree.map(lambda w, l=l: w[l], params[stack])
            x_BTD, chosen = one_layer(config, experts, of_layer, x_BTD, bias["moe"][l] if experts else None, context)
            hidden.append(x_BTD[0])
            choices += [np.sort(chosen, -1)] if experts else []
    states = rms_norm(x_BTD, params["norm_D"], config.norm_eps)[0]
    # The layers one by one are what `apply` runs.
    padded = (jnp.append(jnp.asarray(x), 0)[None] for x in (tokens, jnp.ones(T, jnp.int32), jnp.arange(T)))
    whole = apply(config, params, bias, *padded)
    np.testing.assert_allclose(states, whole.hidden_BTD[0], atol=1e-5)
    return states @ params["head_WD"].T, np.stack(hidden), choices, whole.mtp_BTD


def imported(source, config_file, target):
    shutil.copytree(source, target / "published")
    shutil.copyfile(source / config_file, target / "published" / "config.json")
    hf.import_weights(target / "published", target / "ours")
    weights = store.load(target / "ours", "float32")
    return weights._replace(config=replace(weights.config, dtype="float32"))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_public_class(case, tmp_path):
    folder, config_file = CASES[case]
    expected = dict(np.load(GOLDEN / folder / "expected.npz"))
    expected = {key.removeprefix(f"{case}_"): x for key, x in expected.items() if case == "llama" or key.startswith(case)}
    tokens = expected["tokens"][0]
    every = 1 if case == "llama" else 16
    logits, hidden, choices, _ = trace(imported(GOLDEN / folder, config_file, tmp_path), tokens)
    np.testing.assert_allclose(hidden[:, ::every], expected["hidden"][:, 0], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(logits[::every], expected["logits"][0], rtol=1e-4, atol=2e-5)
    if case != "llama":
        np.testing.assert_array_equal(np.stack(choices)[:, ::every], expected["choice"][:, 0])


@pytest.mark.parametrize("case", CASES)
def test_the_reference_equals_the_public_class(case):
    """So that it may stand for it where there are no golden files."""
    folder, config_file = CASES[case]
    expected = dict(np.load(GOLDEN / folder / "expected.npz"))
    prefix = "" if case == "llama" else f"{case}_"
    config = json.loads((GOLDEN / folder / config_file).read_text())
    w = {name: x.map().astype(np.float64) for name, x in read_header(GOLDEN / folder / "model.safetensors").items()}
    logits, hidden, choices = reference.forward(config, w, expected[f"{prefix}tokens"][0])
    every = 1 if case == "llama" else 16
    np.testing.assert_allclose(hidden[:, ::every], expected[f"{prefix}hidden"][:, 0], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(logits[::every], expected[f"{prefix}logits"][0], rtol=1e-4, atol=2e-5)
    if choices:
        np.testing.assert_array_equal(np.stack(choices)[:, ::every], expected[f"{prefix}choice"][:, 0])


def test_an_exported_model_with_mtp_equals_the_reference(tmp_path):
    """K2's shape in small, its rope at 64 times the context (the golden files have 32), MTP: our forward on what we export."""
    rope = RopeConfig(yarn_factor=64.0, original_context=8)
    attention = AttentionConfig(
        n_heads=3, n_kv_heads=3, q_rank=10, kv_rank=8, d_nope=6, d_rope=8, d_value=4, block=32, rope=rope
    )
    config = ModelConfig(
        **{"n_words": 40, "d_model": 16, "n_layers": 2, "n_dense": 1, "d_dense": 20, "n_mtp": 1, "context": 512},
        **{"init_std": 0.25, "dtype": "float32", "attention": attention},
        moe=MoEConfig(n_experts=6, n_active=2, d_expert=5, routed_scale=0.0),
    )
    params, bias = transformer.init(config, 0)
    params = jax.tree.map_with_path(
        lambda path, w: (
            w + 0.1 * jnp.cos(jnp.arange(w.size, dtype=jnp.float32)).reshape(w.shape) if "norm" in path[-1].key else w
        ),
        params,
    )
    bias = jax.tree.map(lambda b: b + 0.05 * jnp.arange(6.0).reshape(1, 6), bias)
    ours = tmp_path / "ours"
    store.save(ours, store.Weights(config, params, bias))
    hf.export_weights(ours, tmp_path / "published", dtype="float32")
    fields = json.loads((tmp_path / "published" / "config.json").read_text())
    w = {name: x.map().astype(np.float64) for name, x in read_header(tmp_path / "published" / "model.safetensors").items()}
    tokens = np.random.default_rng(0).integers(0, 40, 150, np.int32)

    logits, hidden, choices = reference.forward(fields, w, tokens)
    ours_logits, ours_hidden, ours_choices, mtp_BTD = trace(store.Weights(config, params, bias), tokens)
    np.testing.assert_allclose(ours_hidden, hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours_logits, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours_choices, choices)

    mtp_TD = mtp_BTD[0, :-1]  # the last place has no next token
    np.testing.assert_allclose(mtp_TD @ params["head_WD"].T, reference.mtp(fields, w, tokens), rtol=1e-4, atol=1e-5)
