"""What does the pipelined program cost where there is nothing to pipeline? Run: python -m experiments.bench_pipeline

On one device, times the gradients of a batch in microbatches three ways, in turn within every round: the plain accumulation
loop; the same with every layer recomputed in its backward pass; and the pipelined program on a mesh of 1 x 1 x 1, which also
recomputes every layer. The claim is that the pipelined program costs at most 5% more than the plain loop that does the same
work. Also the whole step, optimizer included, of the plain loop and of the mesh. Takes about three minutes on two CPU cores.
"""

import json
import statistics
from dataclasses import dataclass, replace

import jax
import numpy as np
import tyro
from jax.sharding import PartitionSpec

from configs import ladder
from experiments._record import machine, versions
from experiments._timing import interleaved
from k2jax.allocator import keep_freed_memory
from k2jax.config import MeshConfig, RunConfig
from k2jax.parallel import mesh as meshes
from k2jax.parallel import pipeline, stage, zero1
from k2jax.train import step as steps


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Shapes and rounds."""

    sparsity: int = 8  # total over active experts; the model is the sparsity sweep's, of two layers
    rows: int = 16  # sequences of 128 tokens
    microbatches: int = 4
    rounds: int = 15  # timings of each program, interleaved
    json: bool = False  # print one JSON object instead of a table


def programs(bench: Bench) -> dict:
    """Name -> function of nothing that runs one program."""
    config = _config(bench)
    mesh = meshes.make(config, jax.devices()[:1])
    sizes = replace(config.mesh, data=1)
    rng = np.random.default_rng(0)
    shape = (config.batch, config.seq_len + 1)
    batch = {
        "tokens_BT": rng.integers(0, config.model.n_words, shape).astype(np.int32),
        "segments_BT": np.ones(shape, np.int32),
        "positions_BT": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    }
    plain, owned = steps.init_state(config), steps.init_state(config, mesh)
    plan, pipe = zero1.plan(config, sizes), stage.pipeline(config, sizes, bench.microbatches)

    def pipelined(params, router_bias, batch):
        weights = zero1.working(plan, zero1.local(params), config.model.dtype)
        rows, _ = steps.rows_of(config, pipe, batch, divide=True)
        return pipeline.gradients(pipe, weights, router_bias, rows)

    everywhere = PartitionSpec()
    specs = zero1.specs(plan)[0], everywhere, everywhere
    pipelined = jax.shard_map(pipelined, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
    gradients = {
        "plain": (jax.jit(lambda *given: steps.gradients(config, *given)), plain),
        "plain, layers recomputed": (jax.jit(lambda *given: steps.gradients(config, *given, jax.checkpoint)), plain),
        "pipelined": (jax.jit(pipelined), owned),
    }
    run = {name: lambda f=f, s=s: f(s.params, s.router_bias, batch) for name, (f, s) in gradients.items()}
    states = {"plain step": [steps.make_step(config), plain], "mesh step": [steps.make_step(config, mesh), owned]}

    def advance(held):
        held[1], metrics = held[0](jax.tree.map(lambda x: x.copy(), held[1]), batch, np.float32(config.tokens))
        return metrics

    return run | {name: lambda held=held: advance(held) for name, held in states.items()}


def _config(bench: Bench) -> RunConfig:
    config = ladder.config(bench.sparsity)
    return replace(config, batch=bench.rows, seq_len=128, microbatches=bench.microbatches, mesh=MeshConfig(data=1))


def main(bench: Bench) -> dict:
    """Runs the rounds; returns milliseconds and ratios."""
    keep_freed_memory()
    times = interleaved(programs(bench), bench.rounds)
    quartiles = {name: statistics.quantiles(t, n=4) for name, t in times.items()}
    median = {name: q[1] for name, q in quartiles.items()}
    return {
        "ms": median,
        "ms_quartiles": {name: [q[0], q[2]] for name, q in quartiles.items()},
        "pipelined_over_recomputed": median["pipelined"] / median["plain, layers recomputed"],
        "pipelined_over_plain": median["pipelined"] / median["plain"],
        "mesh_step_over_plain_step": median["mesh step"] / median["plain step"],
        "machine": machine(),
        "versions": versions(("jax", "k2jax")),
    }


if __name__ == "__main__":
    bench = tyro.cli(Bench, description=__doc__)
    result = main(bench)
    if bench.json:
        print(json.dumps(result))
    else:
        for name, ms in result["ms"].items():
            low, high = result["ms_quartiles"][name]
            print(f"{name:26} {ms:8.1f} ms ({low:.1f}..{high:.1f})")
        for name in ("pipelined_over_recomputed", "pipelined_over_plain", "mesh_step_over_plain_step"):
            print(f"{name.replace('_', ' '):26} {result[name]:8.2f}")
        verdict = "pass" if result["pipelined_over_recomputed"] <= 1.05 else "FAIL"
        print(f"claim: pipelining costs at most 5% on one device: {result['pipelined_over_recomputed'] - 1:+.1%}: {verdict}")
