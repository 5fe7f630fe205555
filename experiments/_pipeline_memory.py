"""Temporary memory of the compiled training step against the number of microbatches, on eight fake devices.

`experiments.pipeline_schedules` starts this in a process of its own; it compiles, runs nothing and prints one JSON line. The
reference is a pipeline whose backward is left to jax.grad: a scan over forward ticks, so GPipe's order, with the layers of a
tick recomputed in the backward.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from k2jax.config import AttentionConfig, MeshConfig, ModelConfig, MoEConfig, RunConfig
from k2jax.model import transformer
from k2jax.model.block import Block, run_stack
from k2jax.model.mla import Context
from k2jax.model.rope import look_up
from k2jax.model.weights import fill, stack
from k2jax.parallel import mesh
from k2jax.train.loss import cross_entropy
from k2jax.train.step import abstract_state, make_step

SIZES = MeshConfig(pipeline=4, expert=2, data=1, chunks=2)
MULTIPLES = (1, 2, 4, 8)  # microbatches, in stages


def config(microbatches: int) -> RunConfig:
    """A run of eight small layers; a microbatch is a sequence on each rank."""
    model = ModelConfig(
        n_words=1024,
        d_model=128,
        n_layers=SIZES.pipeline * SIZES.chunks,
        n_dense=0,
        n_mtp=0,
        context=256,
        dtype="float32",
        attention=AttentionConfig(n_heads=2, n_kv_heads=2, q_rank=32, kv_rank=32, d_nope=16, d_rope=16, d_value=32, block=128),
        moe=MoEConfig(n_experts=8, n_active=2, d_expert=64),
    )
    return RunConfig(batch=microbatches * SIZES.expert, seq_len=256, microbatches=microbatches, model=model, mesh=SIZES)


def ours(run: RunConfig) -> int:
    """Temporary bytes of the training step on a device, optimizer included."""
    devices = mesh.make(run)
    total_tokens = jax.ShapeDtypeStruct((), jnp.float32)
    return _temporary(make_step(run, devices).lower(abstract_state(run, devices), _batch(run), total_tokens))


def gpipe(run: RunConfig) -> int:
    """Temporary bytes of the gradients alone, in GPipe's order. Stages have as many layers as ours, every rank all experts."""
    P, M, T = SIZES.pipeline, run.microbatches, run.seq_len
    model = replace(run.model, n_layers=run.model.n_layers // P)  # a stage, with an embedding and a head
    params, bias = transformer.abstract(model)

    def loss(params, bias, tokens_MBT):
        stage = lax.axis_index("pipeline")

        def tick(x_BTD, t):
            tokens_BT = tokens_MBT[jnp.clip(t, 0, M - 1)]
            x_BTD = jnp.where(stage == 0, params["embed_WD"][tokens_BT[:, :-1]], x_BTD)
            y_BTD = jax.checkpoint(lambda layers, x: _layers(model, layers, bias["moe"], x))(params["moe"], x_BTD)
            return lax.ppermute(y_BTD, "pipeline", [(p, (p + 1) % P) for p in range(P)]), y_BTD

        def head(total, given):
            x_BTD, tokens_BT = given
            every_BT = jnp.ones(x_BTD.shape[:2], bool)
            return total + cross_entropy(x_BTD, params["head_WD"], tokens_BT[:, 1:], every_BT, model.loss_chunk)[0], None

        x_BTD = jnp.zeros((tokens_MBT.shape[1], T, model.d_model))
        out_tBTD = lax.scan(tick, x_BTD, jnp.arange(M + P - 1))[1]
        total = lax.scan(head, jnp.zeros(()), (out_tBTD[P - 1 :], tokens_MBT))[0]
        return jnp.where(stage == P - 1, total, 0.0)

    def gradients(params, bias, tokens_BT):
        return jax.grad(loss)(params, bias, tokens_BT.reshape(M, -1, T + 1))

    whole = PartitionSpec()  # every stage with the same weights: memory does not ask which
    program = jax.shard_map(
        gradients, mesh=mesh.make(run), in_specs=(whole, whole, mesh.BATCH), out_specs=whole, check_vma=False
    )
    return _temporary(jax.jit(program).lower(params, bias, _batch(run)["tokens_BT"]))


def _layers(model: ModelConfig, weights: dict, bias_LE: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """The layers of a stage, all with experts, on one document."""
    structure = nnx.split(nnx.eval_shape(lambda: stack(lambda: Block(model, experts=True), model.n_moe)))
    (B, T, _), a = x_BTD.shape, model.attention
    cos_BTP, sin_BTP = look_up(a.rope, a.d_rope, T, jnp.broadcast_to(jnp.arange(T), (B, T)))
    context = Context(jnp.ones((B, T), jnp.int32), cos_BTP, sin_BTP)
    return run_stack(fill(*structure, weights), x_BTD, bias_LE, context)[0]


def _batch(run: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct((run.batch, run.seq_len + 1), jnp.int32)
    return {"tokens_BT": shape, "segments_BT": shape, "positions_BT": shape}


def _temporary(lowered: jax.stages.Lowered) -> int:
    return lowered.compile().memory_analysis().temp_size_in_bytes


def main() -> dict:
    """Bytes by program and microbatches, and what was compiled."""
    microbatches = [n * SIZES.pipeline for n in MULTIPLES]
    sizes = {program.__name__: {M: program(config(M)) for M in microbatches} for program in (ours, gpipe)}
    return sizes | {"pipeline": SIZES.pipeline, "chunks": SIZES.chunks, "expert": SIZES.expert}


if __name__ == "__main__":
    print(json.dumps(main()))
