"""The sparsity sweep's family: one model shape and token budget a rung, at 8 of 64 to 8 of 512 experts (report 2.3, figure 5).

K2's architecture in small: MLA, a dense layer first whose width equals the nine experts a token uses, sigmoid router with
selection bias, one shared expert, MuonClip. Within a rung the active weights and the batches are the same for every sparsity.
"""

from pathlib import Path
from typing import NamedTuple

from k2jax.config import AttentionConfig, DataConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig

SPARSITIES = (8, 16, 32, 48, 64)
N_ACTIVE = 8


class Rung(NamedTuple):
    """A model size and a number of steps: one budget."""

    d_model: int
    n_layers: int  # the dense one included
    n_heads: int
    d_expert: int
    batch: int  # sequences of 256 tokens a step
    steps: int
    vocab: int


RUNGS = {
    "smoke": (
        Rung(d_model=32, n_layers=2, n_heads=1, d_expert=16, batch=8, steps=30, vocab=1024),
        Rung(d_model=32, n_layers=2, n_heads=1, d_expert=16, batch=8, steps=60, vocab=1024),
        Rung(d_model=32, n_layers=2, n_heads=1, d_expert=16, batch=8, steps=120, vocab=1024),
    ),
    "default": (
        Rung(d_model=64, n_layers=3, n_heads=2, d_expert=32, batch=16, steps=200, vocab=1024),
        Rung(d_model=64, n_layers=3, n_heads=2, d_expert=32, batch=16, steps=400, vocab=1024),
        Rung(d_model=64, n_layers=3, n_heads=2, d_expert=32, batch=16, steps=800, vocab=1024),
    ),
    "full": (
        Rung(d_model=96, n_layers=3, n_heads=3, d_expert=32, batch=16, steps=900, vocab=2048),
        Rung(d_model=128, n_layers=3, n_heads=4, d_expert=32, batch=32, steps=700, vocab=2048),
        Rung(d_model=128, n_layers=4, n_heads=4, d_expert=32, batch=32, steps=1050, vocab=2048),
        Rung(d_model=192, n_layers=4, n_heads=6, d_expert=32, batch=64, steps=760, vocab=2048),
    ),
}
SEEDS = {"smoke": 1, "default": 1, "full": 2}
VALIDATION_TOKENS = 131_072  # of all four domains together; the error of a loss over them is below the noise of a seed


def config(sparsity: int = 48, preset: str = "default", rung: int = -1) -> RunConfig:
    """One run of the sweep.

    Args:
      sparsity: total over active experts.
      preset: smoke, default or full.
      rung: which budget of the preset, the smallest first.
    """
    if preset not in RUNGS:
        raise ValueError(f"preset must be one of {', '.join(RUNGS)}; got {preset!r}")
    if sparsity not in SPARSITIES:
        raise ValueError(f"sparsity must be one of {SPARSITIES}; got {sparsity}")
    rung = range(len(RUNGS[preset]))[rung]
    shape = RUNGS[preset][rung]
    seq_len = 256
    name = f"{preset}_rung{rung}_sparsity{sparsity}"
    return RunConfig(
        name=name,
        out=Path("runs") / name,
        steps=shape.steps,
        batch=shape.batch,
        seq_len=seq_len,
        eval_every=0,
        eval_batches=max(1, VALIDATION_TOKENS // (4 * shape.batch * seq_len)),
        checkpoint_every=200,
        model=_model(shape, sparsity, seq_len),
        optim=OptimConfig(
            rule="muonclip",
            learning_rate=1e-2,
            weight_decay=0.1,
            schedule=ScheduleConfig(
                warmup=5.0, stable=55.0, decay=40.0, anneal=0.0, decay_shape="linear", decay_to=0.05, anneal_to=0.05
            ),
        ),
        data=DataConfig(tokenizer="bpe", vocab=shape.vocab),
    )


def _model(shape: Rung, sparsity: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        n_words=shape.vocab,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_dense=1,
        d_dense=(N_ACTIVE + 1) * shape.d_expert,
        context=seq_len,
        init_std=0.02,
        dtype="float32",
        attention=AttentionConfig(
            kind="mla",
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_heads,
            q_rank=shape.d_model // 2,
            kv_rank=shape.d_model // 2,
            d_nope=16,
            d_rope=16,
            d_value=32,
            block=seq_len,
        ),
        moe=MoEConfig(
            n_experts=N_ACTIVE * sparsity,
            n_active=N_ACTIVE,
            n_shared=1,
            d_expert=shape.d_expert,
            routed_scale=0.0,
            bias_speed=5e-3,  # a run of hundreds of steps has no time for K2's 1e-3
        ),
    )
