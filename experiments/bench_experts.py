"""Does a layer with experts cost by tokens, or by experts? Run: python -m experiments.bench_experts

Times forward and backward of one MoE layer (router, 8 routed experts of the number given, one shared) on 8,192 tokens, and
the MuonClip update of its weights, the numbers of experts in turn within every round. Takes about a minute on a CPU core.
Prints the median and the quartiles of each, the ratio to the smallest, and the optimizer's share of the sum.
"""

import json
import statistics
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from experiments._timing import interleaved
from k2jax.allocator import keep_freed_memory
from k2jax.config import ModelConfig, MoEConfig, OptimConfig
from k2jax.model.moe import MoE
from k2jax.model.weights import build
from k2jax.optim.muonclip import muonclip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Shapes and rounds."""

    experts: tuple[int, ...] = (64, 512)  # routed experts, 8 of which a token uses
    tokens: int = 8192
    d_model: int = 64
    d_expert: int = 32
    rounds: int = 15  # timings of each number of experts, interleaved
    json: bool = False  # print one JSON object instead of a table


def programs(bench: Bench, n_experts: int):
    """Forward and backward of the layer, and its optimizer's update, each as a function of nothing."""
    moe = MoEConfig(n_experts=n_experts, d_expert=bench.d_expert, routed_scale=0.0)
    config = ModelConfig(d_model=bench.d_model, dtype="float32", moe=moe)
    graphdef, weights = nnx.split(build(lambda: MoE(config), 0.1, 0))
    x_BTD = jax.random.normal(jax.random.key(1), (bench.tokens // 256, 256, bench.d_model))
    # A skewed router, as in training: popular experts take several times the mean load.
    bias_E = 0.1 * jax.random.normal(jax.random.key(2), (n_experts,))
    real_BT = jnp.ones(x_BTD.shape[:2], bool)

    def loss(weights, x_BTD, bias_E):
        y_BTD, routing = nnx.merge(graphdef, weights)(x_BTD, bias_E, real_BT)
        return jnp.square(y_BTD).mean() + routing.balance, routing.load_E

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    params = {"moe": {"ffn": nnx.to_pure_dict(weights)}}
    optimizer = muonclip(OptimConfig(rule="muon", ns_dtype="float32"), config)
    state = optimizer.init(params)
    update = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, learning_rate=1e-2))
    (grads, _), load_E = grad(weights, x_BTD, bias_E)
    grads = {"moe": {"ffn": nnx.to_pure_dict(grads)}}
    skew = float(load_E.max() / load_E.mean())
    return lambda: grad(weights, x_BTD, bias_E), lambda: update(grads, state, params), skew


def main(bench: Bench) -> dict:
    """Runs the rounds and returns milliseconds by number of experts."""
    keep_freed_memory()
    built = {n: programs(bench, n) for n in bench.experts}
    parts = {(n, name): part for n, (*both, _) in built.items() for name, part in zip(("layer", "update"), both, strict=True)}
    times = interleaved(parts, bench.rounds)
    first = statistics.median(times[bench.experts[0], "layer"])
    rows = {}
    for n in bench.experts:
        layer, update = times[n, "layer"], times[n, "update"]
        low, median, high = statistics.quantiles(layer, n=4)
        optimizer = statistics.median(update)
        rows[n] = {
            "layer_ms": median,
            "layer_ms_quartiles": [low, high],
            "ratio": median / first,
            "optimizer_ms": optimizer,
            "optimizer_share": optimizer / (optimizer + median),
            "max_over_mean_load": built[n][2],
        }
    return {"tokens": bench.tokens, "d_model": bench.d_model, "d_expert": bench.d_expert, "experts": rows}


if __name__ == "__main__":
    bench = tyro.cli(Bench, description=__doc__)
    result = main(bench)
    if bench.json:
        print(json.dumps(result))
    else:
        print("experts  layer fwd+bwd ms (quartiles)   ratio  optimizer ms  share  max/mean load")
        for n, r in result["experts"].items():
            low, high = r["layer_ms_quartiles"]
            print(
                f"{n:7d}  {r['layer_ms']:10.1f} ({low:.1f}..{high:.1f})  {r['ratio']:12.2f}  {r['optimizer_ms']:12.1f}"
                f"  {r['optimizer_share']:5.0%}  {r['max_over_mean_load']:13.1f}"
            )
