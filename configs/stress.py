"""A small MLA model with many heads: under a learning rate at which attention logits explode, and at a healthy one.

`python -m k2jax.train configs.stress` is MuonClip under stress; with `--optim.rule muon` the largest logit passes ten times
tau within a run of minutes (report 2.1, figure 2, where it takes 9B active parameters). There is no weight decay: nothing but
the clip holds the query and key weights. Layers are dense, since experts have no part in this.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from k2jax.config import AttentionConfig, DataConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig


class Size(NamedTuple):
    """A model, its batches, and the two settings it is trained in."""

    d_model: int
    n_layers: int
    n_heads: int
    seq_len: int
    batch: int  # sequences a step
    steps: int
    stress: float  # learning rate that makes logits explode
    tau: float
    healthy: float  # learning rate at which Muon learns best
    healthy_steps: int
    low_tau: float  # what a good share of the healthy heads meets


# What Muon's largest logit came to at a rate, in `default`'s model: 0.025: 126 after 640 steps; 0.035: 800 after 560; 0.0375:
# 1,400 after 640; 0.04: 1,000 after 400; 0.08: 2,700 after 200. The slower the growth, the less gets past tau before the clip
# sees it; from batch to batch a head's largest logit varies by 6% even with fixed weights, so that some always does.
SIZES = {
    "smoke": Size(32, 2, 4, 32, 8, steps=40, stress=0.1, tau=5.0, healthy=0.02, healthy_steps=40, low_tau=0.3),
    "default": Size(64, 4, 8, 64, 16, steps=800, stress=0.035, tau=100.0, healthy=0.01, healthy_steps=400, low_tau=8.0),
    "full": Size(128, 6, 8, 128, 32, steps=2000, stress=0.03, tau=100.0, healthy=0.007, healthy_steps=2000, low_tau=12.0),
}


def config(preset: str = "default") -> RunConfig:
    """MuonClip under stress: a learning rate several times too high, constant after the warm-up, and no weight decay."""
    size = _size(preset)
    schedule = ScheduleConfig(warmup=5.0, stable=95.0, decay=0.0, anneal=0.0)
    optim = OptimConfig(
        rule="muonclip",
        learning_rate=size.stress,
        weight_decay=0.0,
        qk_tau=size.tau,
        ns_dtype="float32",
        schedule=schedule,
    )
    return RunConfig(
        name="stress",
        out=Path("runs/stress"),
        steps=size.steps,
        batch=size.batch,
        seq_len=size.seq_len,
        eval_every=0,
        eval_batches=max(1, 16_384 // (4 * size.batch * size.seq_len)),
        checkpoint_every=200,
        model=_model(size),
        optim=optim,
        data=DataConfig(tokenizer="bpe", vocab=1024),
    )


def healthy(preset: str = "default") -> RunConfig:
    """The same model at a learning rate that suits it, K2's weight decay and a decaying end; tau is low, so that it fires."""
    size, base = _size(preset), config(preset)
    schedule = ScheduleConfig(warmup=5.0, stable=55.0, decay=40.0, anneal=0.0, decay_shape="linear", decay_to=0.05)
    optim = replace(base.optim, learning_rate=size.healthy, weight_decay=0.1, qk_tau=size.low_tau, schedule=schedule)
    steps = size.healthy_steps
    return replace(base, name="healthy", out=Path("runs/healthy"), steps=steps, eval_every=steps // 10, optim=optim)


def _size(preset: str) -> Size:
    if preset not in SIZES:
        raise ValueError(f"preset must be one of {', '.join(SIZES)}; got {preset!r}")
    return SIZES[preset]


def _model(size: Size) -> ModelConfig:
    width = size.d_model // size.n_heads
    return ModelConfig(
        n_words=1024,
        d_model=size.d_model,
        n_layers=size.n_layers,
        n_dense=size.n_layers,
        d_dense=3 * size.d_model // 2,
        context=size.seq_len,
        init_std=0.02,
        dtype="float32",
        attention=AttentionConfig(
            kind="mla",
            n_heads=size.n_heads,
            n_kv_heads=size.n_heads,
            q_rank=size.d_model // 2,
            kv_rank=size.d_model // 2,
            d_nope=width,
            d_rope=width,
            d_value=width,
            block=64,
        ),
        moe=MoEConfig(n_experts=1, n_active=1, d_expert=16, routed_scale=1.0),  # of no layer
    )
