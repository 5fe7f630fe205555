"""DeepSeek-V3: 671.03B parameters, what Kimi K2's report compares itself with (report, table 2).

Against K2: 256 experts in 8 groups of which a token may use 4, 128 heads, three dense layers, AdamW (arXiv 2412.19437, 4.2).
"""

from pathlib import Path

from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, OptimConfig, RopeConfig, RunConfig, ScheduleConfig


def config() -> RunConfig:
    """The pre-training run of 14.8T tokens at a context of 4096, at its final batch size (it grew from 3072 sequences)."""
    batch, seq_len = 15_360, 4096
    return RunConfig(
        name="deepseek_v3",
        out=Path("runs/deepseek_v3"),
        steps=235_240,
        batch=batch,
        seq_len=seq_len,
        model=_model(),
        optim=OptimConfig(
            rule="adamw",
            learning_rate=2.2e-4,
            weight_decay=0.1,
            schedule=ScheduleConfig(
                warmup=2000.0 * batch * seq_len,
                stable=10e12 - 2000.0 * batch * seq_len,
                decay=4.3e12,
                anneal=500e9,  # a line in place of two constant stretches, 2.2e-5 and 7.3e-6
                decay_shape="cosine",
                decay_to=0.1,
                anneal_to=7.3e-6 / 2.2e-4,
            ),
        ),
    )


def _model() -> ModelConfig:
    return ModelConfig(
        n_words=129_280,
        d_model=7168,
        n_layers=61,
        n_dense=3,
        d_dense=18_432,
        n_mtp=0,  # 1 as trained; the published 671B leave it out
        context=131_072,
        norm_eps=1e-6,
        init_std=0.006,
        attention=AttentionConfig(
            kind="mla",
            n_heads=128,
            n_kv_heads=128,
            q_rank=1536,
            kv_rank=512,
            d_nope=128,
            d_rope=64,
            d_value=128,
            rope=RopeConfig(
                theta=10_000.0,
                layout="interleaved",
                yarn_factor=1.0,  # 40 in the two long-context stages after pre-training
                original_context=4096,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
        moe=MoEConfig(
            n_experts=256,
            n_active=8,
            n_shared=1,
            d_expert=2048,
            n_groups=8,
            n_active_groups=4,
            routed_scale=2.5,
            bias_speed=1e-3,
            bias_centered=False,
            balance_weight=1e-4,
        ),
    )
