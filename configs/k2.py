"""Kimi K2: 1.026T parameters, 32.9B active, 384 experts of which a token uses 8 (report, table 2 and section 2.5).

`python -m k2jax.train configs.k2` is the pre-training recipe at a context of 4096, without YaRN.
"""

from dataclasses import replace
from pathlib import Path

from k2jax.config import AttentionConfig, MeshConfig, ModelConfig, MoEConfig, OptimConfig, RopeConfig, RunConfig, ScheduleConfig


def config() -> RunConfig:
    """The pre-training run: 15.96T tokens, 67M a step."""
    return RunConfig(
        name="k2",
        out=Path("runs/k2"),
        steps=237_821,
        batch=16_384,
        seq_len=4096,
        microbatches=0,  # a sequence at a time
        mesh=MeshConfig(pipeline=16, expert=16, chunks=4),  # any multiple of 32 nodes with 8 GPUs; the report gives no chunks
        model=_model(),
        optim=OptimConfig(
            rule="muonclip",
            learning_rate=2e-4,
            weight_decay=0.1,
            qk_tau=100.0,
            schedule=ScheduleConfig(
                warmup=500 * 2.0**26,
                stable=10e12 - 500 * 2.0**26,
                decay=5.5e12,
                anneal=460e9,
                decay_shape="cosine",
                decay_to=0.1,
                anneal_to=0.035,
            ),
        ),
    )


def released() -> ModelConfig:
    """The model as released: YaRN stretches the 4096 tokens of pre-training to 131,072."""
    model = _model()
    rope = replace(model.attention.rope, yarn_factor=32.0)
    return replace(model, attention=replace(model.attention, rope=rope))


def _model() -> ModelConfig:
    return ModelConfig(
        n_words=163_840,
        d_model=7168,
        n_layers=61,
        n_dense=1,
        d_dense=18_432,
        n_mtp=0,  # 1 adds the 17.2B that the report's total of 1043B contains
        context=131_072,
        norm_eps=1e-6,
        init_std=0.006,
        attention=AttentionConfig(
            kind="mla",
            n_heads=64,
            n_kv_heads=64,
            q_rank=1536,
            kv_rank=512,
            d_nope=128,
            d_rope=64,
            d_value=128,
            rope=RopeConfig(
                theta=50_000.0,
                layout="interleaved",
                yarn_factor=1.0,
                original_context=4096,
                beta_fast=1.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
        moe=MoEConfig(
            n_experts=384,
            n_active=8,
            n_shared=1,
            d_expert=2048,
            n_groups=1,
            n_active_groups=1,
            routed_scale=2.827,
        ),
    )
