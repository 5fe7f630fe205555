"""Dense models of Llama's type on a ladder of sizes, for experiments that compare optimizers (Moonlight report 3.2, table 2).

SwiGLU of 8/3 the width, as many key heads as query heads, no experts. A rung's tokens are about 14 times its weights, the
embedding left out: at 1.8e11 FLOPs a model with a third of that learns less, by 0.06 nats. Steps are short, 1,024 tokens, since
the batch that is best grows with compute.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from k2jax.config import AttentionConfig, DataConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig

SEQ_LEN = 128
BATCH = 8  # sequences a step
VOCAB = 512  # small, so that what both rules leave to AdamW, embedding and head, is a small part
VALIDATION_TOKENS = 65_536  # of all four domains together


class Rung(NamedTuple):
    """A model size and a number of steps: one budget."""

    d_model: int
    n_layers: int
    steps: int


RUNGS = {
    "smoke": (Rung(24, 2, 10), Rung(24, 2, 20), Rung(24, 2, 40)),
    "default": (Rung(24, 2, 360), Rung(32, 2, 560), Rung(48, 2, 1000)),
    "full": (Rung(32, 2, 600), Rung(48, 3, 1500), Rung(64, 4, 3200), Rung(96, 4, 7600)),
}


def config(rung: int = -1, preset: str = "default", rule: Literal["muon", "adamw"] = "muon") -> RunConfig:
    """One run of the ladder, at a learning rate that is good for neither rule nor size in particular.

    Args:
      rung: which size of the preset, the smallest first.
      preset: smoke, default or full.
      rule: of the update.
    """
    if preset not in RUNGS:
        raise ValueError(f"preset must be one of {', '.join(RUNGS)}; got {preset!r}")
    rung = range(len(RUNGS[preset]))[rung]
    shape = RUNGS[preset][rung]
    name = f"{preset}_rung{rung}_{rule}"
    return RunConfig(
        name=name,
        out=Path("runs") / name,
        steps=shape.steps,
        batch=BATCH,
        seq_len=SEQ_LEN,
        eval_every=0,
        eval_batches=VALIDATION_TOKENS // (4 * BATCH * SEQ_LEN),
        checkpoint_every=0,
        model=model(shape.d_model, shape.n_layers),
        optim=OptimConfig(
            rule=rule,
            learning_rate=1e-2,
            ns_dtype="float32",
            weight_decay=0.1,
            schedule=ScheduleConfig(
                warmup=5.0, stable=55.0, decay=40.0, anneal=0.0, decay_shape="linear", decay_to=0.05, anneal_to=0.05
            ),
        ),
        data=DataConfig(tokenizer="bpe", vocab=VOCAB),
    )


def model(d_model: int, n_layers: int) -> ModelConfig:
    """A dense model of this width and depth."""
    n_heads = max(2, d_model // 16)
    d_head = d_model // n_heads
    return ModelConfig(
        n_words=VOCAB,
        d_model=d_model,
        n_layers=n_layers,
        n_dense=n_layers,
        d_dense=8 * d_model // 3 // 16 * 16,
        context=SEQ_LEN,
        init_std=0.02,
        dtype="float32",
        loss_chunk=BATCH * SEQ_LEN,
        attention=AttentionConfig(
            kind="gqa", n_heads=n_heads, n_kv_heads=n_heads, d_nope=0, d_rope=d_head, d_value=d_head, block=SEQ_LEN
        ),
        moe=MoEConfig(d_expert=d_model // 2),  # there are no experts; estimates of time take Newton-Schulz to cost this much
    )
