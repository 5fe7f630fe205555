"""Small models of every kind of cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from k2jax.model import transformer
from k2jax.model.store import Weights

MLA = ModelConfig(
    n_words=60,
    d_model=16,
    n_layers=2,
    n_dense=1,
    d_dense=20,
    context=256,
    init_std=0.3,
    dtype="float32",
    attention=AttentionConfig(
        **{"n_heads": 3, "n_kv_heads": 3, "q_rank": 7, "kv_rank": 5, "d_nope": 4, "d_rope": 6, "d_value": 3, "block": 32},
        rope=RopeConfig(yarn_factor=32.0, original_context=8),
    ),
    moe=MoEConfig(n_experts=5, n_active=2, d_expert=6, routed_scale=0.0),
)
BYTES = replace(MLA, n_words=260)
NORMED = replace(MLA, attention=replace(MLA.attention, qk_norm=True, soft_cap=2.0))
GQA = replace(
    MLA,
    n_dense=2,
    attention=AttentionConfig(kind="gqa", n_heads=4, n_kv_heads=2, d_nope=0, d_rope=6, d_value=3, block=32),
)


def weights(config: ModelConfig) -> Weights:
    """Drawn ones, with a selection bias."""
    params, bias = transformer.init(config, 0)
    return Weights(config, params, jax.tree.map(lambda b: b + 0.1 * jnp.arange(5.0).reshape(1, 5), bias))


@jax.jit
def _logits(hidden_BTD, head_WD):
    return hidden_BTD @ head_WD.T


_apply = jax.jit(transformer.apply, static_argnums=0)


def logits(weights: Weights, tokens_BT: jax.Array) -> jax.Array:
    """Of every place, by the forward pass of training."""
    B, T = tokens_BT.shape
    padded = [jnp.pad(x, ((0, 0), (0, 1))) for x in (tokens_BT, jnp.ones((B, T), jnp.int32), jnp.tile(jnp.arange(T), (B, 1)))]
    return _logits(_apply(*weights, *padded).hidden_BTD, weights.params["head_WD"])
