"""The sparsity sweep's family: one model shape and token budget a rung, at 8 of 64 to 8 of 512 experts (report 2.3, figure 5).

K2's architecture in small: MLA, sigmoid router with selection bias, one shared expert, MuonClip. The large rungs begin with a
dense layer as K2 does, as wide as the nine experts a token uses; the small ones, of two layers, have experts in both. Within a
rung the active weights and the batches are the same for every sparsity.
"""

from pathlib import Path
from typing import NamedTuple

from k2jax.config import AttentionConfig, DataConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, ScheduleConfig

N_ACTIVE = 8
SPARSITIES = {"smoke": (8, 48), "default": (8, 16, 32, 48, 64), "full": (8, 16, 32, 48, 64)}


class Rung(NamedTuple):
    """A model size and a number of steps: one budget."""

    d_model: int
    n_layers: int  # the dense one included
    n_dense: int
    n_heads: int
    d_expert: int
    seq_len: int
    batch: int  # sequences a step
    steps: int
    vocab: int


def _small(steps: int) -> Rung:
    return Rung(d_model=64, n_layers=2, n_dense=0, n_heads=2, d_expert=16, seq_len=128, batch=16, steps=steps, vocab=1024)


def _large(d_model: int, n_layers: int, batch: int, steps: int) -> Rung:
    shape = {"n_dense": 1, "d_expert": 32, "seq_len": 256, "vocab": 2048}
    return Rung(d_model=d_model, n_layers=n_layers, n_heads=d_model // 32, batch=batch, steps=steps, **shape)


# At equal tokens more and smaller steps learn more, down to the 2,048 tokens of the small rungs; Muon's share of a step at 512
# experts forbids fewer. On two cores of 35 GFLOP/s each `default` takes 14 minutes and `full`, by estimate, 9 hours.
RUNGS = {
    "smoke": (_small(10), _small(20), _small(40)),
    "default": (_small(60), _small(180), _small(540)),
    "full": (_large(64, 3, 16, 300), _large(96, 3, 16, 450), _large(96, 3, 16, 900), _large(128, 3, 16, 1000)),
}
SEEDS = {"smoke": 1, "default": 1, "full": 2}
VALIDATION_TOKENS = 65_536  # of all four domains together, the same for every run


def config(sparsity: int = 48, preset: str = "default", rung: int = -1) -> RunConfig:
    """One run of the sweep.

    Args:
      sparsity: total over active experts.
      preset: smoke, default or full.
      rung: which budget of the preset, the smallest first.
    """
    if preset not in RUNGS:
        raise ValueError(f"preset must be one of {', '.join(RUNGS)}; got {preset!r}")
    if sparsity not in SPARSITIES["default"]:
        raise ValueError(f"sparsity must be one of {SPARSITIES['default']}; got {sparsity}")
    rung = range(len(RUNGS[preset]))[rung]
    shape = RUNGS[preset][rung]
    seq_len = shape.seq_len
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
        model=_model(shape, sparsity),
        optim=OptimConfig(
            rule="muonclip",
            learning_rate=1e-2,
            ns_dtype="float32",
            weight_decay=0.1,
            schedule=ScheduleConfig(
                warmup=5.0, stable=55.0, decay=40.0, anneal=0.0, decay_shape="linear", decay_to=0.05, anneal_to=0.05
            ),
        ),
        data=DataConfig(tokenizer="bpe", vocab=shape.vocab),
    )


def _model(shape: Rung, sparsity: int) -> ModelConfig:
    return ModelConfig(
        n_words=shape.vocab,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_dense=shape.n_dense,
        d_dense=(N_ACTIVE + 1) * shape.d_expert,
        context=shape.seq_len,
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
            block=64,  # skips the masked half of the logits, in cache-sized pieces
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
