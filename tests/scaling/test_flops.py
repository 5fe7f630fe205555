from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from configs import deepseek_v3, k2
from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from k2jax.model import transformer
from k2jax.scaling.flops import count_params, decode_flops, sparsity, training_flops


def small(**changes) -> ModelConfig:
    mla = AttentionConfig(n_heads=3, n_kv_heads=3, q_rank=20, kv_rank=12, d_nope=8, d_rope=4, d_value=10)
    moe = MoEConfig(n_experts=16, n_active=2, n_shared=1, d_expert=24)
    base = ModelConfig(n_words=300, d_model=32, n_layers=3, n_dense=1, d_dense=48, context=64, attention=mla, moe=moe)
    return replace(base, **changes)


GQA = AttentionConfig(kind="gqa", n_heads=4, n_kv_heads=2, d_nope=0, d_rope=8, d_value=6)


def test_k2_counts_are_the_exact_integers():
    model = k2.config().model
    count = count_params(model)
    assert count.total == 1_026_408_232_448
    assert count.experts == 1_014_686_023_680
    assert count.total - count.experts == 11_722_208_768
    assert count.active_layers == 30_512_660_480
    assert count.active_with_head == 31_687_065_600
    assert count.active == 32_861_470_720
    assert count.active == pytest.approx(32.6e9, rel=0.01)  # as the report prints it
    assert count.bf16_bytes == 2 * count.total

    with_mtp = count_params(replace(model, n_mtp=1))
    assert with_mtp.total == 1_043_570_379_648
    assert with_mtp.mtp == 17_162_147_200
    assert (with_mtp.trunk, with_mtp.active) == (count.total, count.active)


def test_deepseek_v3_has_671_billion():
    count = count_params(deepseek_v3.config())
    assert round(count.total / 1e9, 2) == 671.03
    assert count.active == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        small(),
        small(n_mtp=1),
        small(n_dense=0),
        small(n_dense=3),
        small(attention=GQA),
        small(attention=replace(GQA, qk_norm=True)),
        small(attention=replace(small().attention, qk_norm=True), n_mtp=1),
        small(moe=MoEConfig(n_experts=8, n_active=8, n_shared=0, d_expert=16)),
        small(moe=MoEConfig(n_experts=8, n_active=4, n_shared=2, n_groups=4, n_active_groups=2, d_expert=16)),
        k2.config().model,
        replace(k2.config().model, n_mtp=1),
        deepseek_v3.config().model,
    ],
)
def test_counts_agree_with_the_shapes_of_the_model(model):
    params, router_bias = transformer.abstract(model)
    leaves = jax.tree.leaves((params, router_bias))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)  # nothing was allocated
    assert count_params(model).total == sum(leaf.size for leaf in leaves)


def test_doubling_the_heads_costs_83_percent_at_128k_and_25_at_4k():
    model = k2.config().model
    doubled = replace(model, attention=replace(model.attention, n_heads=128, n_kv_heads=128))

    def increase(context):
        return 100 * (decode_flops(doubled, context) / decode_flops(model, context) - 1)

    assert increase(131_072) == pytest.approx(83.3, abs=0.5)
    assert increase(32_768) == pytest.approx(58.1, abs=0.5)
    assert increase(4096) == pytest.approx(25.5, abs=0.5)


def test_sparsity_is_total_over_active_experts():
    assert sparsity(k2.config()) == 48
    assert sparsity(deepseek_v3.config().model) == 32


def test_training_flops_of_k2_are_six_a_weight_plus_the_attention_core():
    model = k2.config().model
    per_token = training_flops(model, 4096)
    norms = model.n_layers * (2 * 7168 + 1536 + 512)
    matmuls = count_params(model).active_with_head - norms
    assert per_token.total - per_token.attention_core == 6 * matmuls
    assert per_token.attention_core == 3 * 61 * 64 * (128 + 64 + 128) * 4097
    assert per_token.router == per_token.total - per_token.without_router == 6 * 60 * 7168 * 384


def test_experts_that_are_not_used_cost_only_their_router():
    few, many = small(), small(moe=replace(small().moe, n_experts=64))
    a, b = training_flops(few, 64), training_flops(many, 64)
    assert a.without_router == b.without_router
    assert b.router == 4 * a.router


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_training_flops_agree_with_what_the_compiler_counts(kind):
    """One dense layer in one block, since the compiler counts the body of a loop once."""
    T = 64
    mla = AttentionConfig(
        n_heads=4, n_kv_heads=4, q_rank=96, kv_rank=64, d_nope=32, d_rope=16, d_value=32, block=T, rope=RopeConfig()
    )
    gqa = AttentionConfig(kind="gqa", n_heads=8, n_kv_heads=4, d_nope=0, d_rope=32, d_value=32, block=T)
    model = small(
        n_words=512, d_model=256, n_layers=1, n_dense=1, d_dense=768, dtype="float32", attention=mla if kind == "mla" else gqa
    )
    params, router_bias = transformer.abstract(model)
    batch = jax.ShapeDtypeStruct((2, T + 1), jnp.int32)

    def loss(params, tokens_BT, segments_BT, positions_BT):
        hidden_BTD = transformer.apply(model, params, router_bias, tokens_BT, segments_BT, positions_BT).hidden_BTD
        return (hidden_BTD.reshape(2 * T, -1) @ params["head_WD"].T).sum()

    lowered = jax.jit(jax.grad(loss)).lower(params, batch, batch, batch)
    per_token = training_flops(model, T)
    # The program's square of queries and keys has no causal saving.
    square = per_token.total - per_token.attention_core + per_token.attention_core * 2 * T / (T + 1)
    assert lowered.cost_analysis()["flops"] == pytest.approx(2 * T * square, rel=0.05)
