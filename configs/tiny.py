"""Every part of K2 in small, for a look at a whole run: two minutes on two cores.

`python -m k2jax.train configs.tiny`: a dense layer, a layer with 32 experts, MTP, MLA, MuonClip, byte-pair encoding.
"""

from pathlib import Path

from k2jax.config import AttentionConfig, DataConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig


def config() -> RunConfig:
    """200 steps of 2048 tokens."""
    return RunConfig(
        name="tiny",
        out=Path("runs/tiny"),
        steps=200,
        batch=16,
        seq_len=128,
        eval_every=50,
        eval_batches=4,
        checkpoint_every=50,
        model=_model(),
        optim=OptimConfig(
            learning_rate=1e-2,
            ns_dtype="float32",
            schedule=ScheduleConfig(warmup=5.0, stable=55.0, decay=40.0, anneal=0.0, decay_shape="linear", decay_to=0.05),
        ),
        data=DataConfig(tokenizer="bpe", vocab=1024),
    )


def _model() -> ModelConfig:
    return ModelConfig(
        n_words=1024,
        d_model=64,
        n_layers=2,
        n_dense=1,
        d_dense=160,
        n_mtp=1,
        context=512,
        init_std=0.02,
        dtype="float32",
        loss_chunk=1024,
        attention=AttentionConfig(n_heads=2, n_kv_heads=2, q_rank=32, kv_rank=32, d_nope=16, d_rope=16, d_value=32, block=128),
        moe=MoEConfig(n_experts=32, n_active=4, d_expert=32, routed_scale=0.0, bias_speed=5e-3),
    )
