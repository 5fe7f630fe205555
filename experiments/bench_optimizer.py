"""How long does an optimizer step take: MuonClip, `optax.contrib.muon`, AdamW? Run: python -m experiments.bench_optimizer

All three update the same leaves from the same gradients, in turn within every round: `sweep`, the sparsity sweep's largest
model (512 experts); `100m`, K2's architecture in 100M weights (64 experts of 512 x 128 a layer); `k2_experts`, a tall and a
wide matrix, gate and down, of one of K2's experts, 7168 x 2048. optax's Muon is told our matrices (stacks are batches, heads
stay together) and our scale, and that its first update of them is ours is checked. Then Newton-Schulz alone in each form and
with each set of coefficients, and what QK-Clip and its statistic add to a training step. Seven minutes on two idle cores;
`--trees sweep` half a minute.

Prints medians and spreads. `ratio_to_optax` has each side's default precision (ours: K2's bfloat16 operands with float32 sums;
optax: the gradient's float32), `ratio_equal_precision` float32 on both.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

from configs import ladder
from experiments import _record
from experiments._timing import interleaved
from k2jax.allocator import keep_freed_memory
from k2jax.axes import axes_of
from k2jax.config import AttentionConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig
from k2jax.kernels import newton_schulz as ns
from k2jax.kernels import symmetric
from k2jax.kernels.flash_attention import attention
from k2jax.model import transformer
from k2jax.optim.muon import HEADS, blocks_of, by_path, nested
from k2jax.optim.muonclip import muonclip, rule_of
from k2jax.optim.qk_clip import qk_clip
from k2jax.train.step import init_state, make_step

Name = Literal["sweep", "100m", "k2_experts"]
ROUNDS = {"sweep": 8, "100m": 2, "k2_experts": 1}  # of a tree, for each round asked for
RATE, DECAY, RMS = 1e-2, 0.1, 0.2
FLOAT32 = OptimConfig(rule="muon", weight_decay=DECAY, clip_norm=0.0, ns_dtype="float32", update_rms=RMS)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Trees and rounds."""

    trees: tuple[Name, ...] = ("sweep", "100m", "k2_experts")  # which parameters to update
    rounds: int = 2  # timings of each program, interleaved; smaller trees get more, as ROUNDS says
    json: bool = False  # print one JSON object instead of tables

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1; got {self.rounds}")


def model_of(name: Name) -> ModelConfig:
    """The model whose weights a tree holds."""
    if name == "sweep":
        return ladder.config(64, "default").model
    if name == "100m":
        attention = AttentionConfig(n_heads=8, n_kv_heads=8, q_rank=192, kv_rank=64, d_nope=32, d_rope=16, d_value=32)
        moe = MoEConfig(n_experts=64, d_expert=128)
        shape = {"n_words": 8192, "d_model": 512, "n_layers": 8, "n_dense": 1, "d_dense": 9 * 128}
        return ModelConfig(**shape, dtype="float32", attention=attention, moe=moe)
    return ModelConfig()


def tree_of(name: Name) -> dict:
    """A tree's shapes."""
    if name == "k2_experts":
        d, f = model_of(name).d_model, model_of(name).moe.d_expert
        shapes = {"gate_EDF": (1, 1, d, f), "down_EFD": (1, 1, f, d)}
        return {"moe": {"ffn": {leaf: jax.ShapeDtypeStruct(shape, jnp.float32) for leaf, shape in shapes.items()}}}
    return transformer.abstract(model_of(name))[0]


def drawn(shapes: dict, seed: int) -> dict:
    """Arrays of these shapes with normal entries."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), shapes)


def dimensions(path: tuple[str, ...], ndim: int) -> optax.contrib.MuonDimensionNumbers | None:
    """optax's word for the matrices of a leaf: which axes are its rows, which its columns; None for AdamW's leaves."""
    if rule_of(FLOAT32, path) == "adamw":
        return None
    letters = axes_of(path[-1]).removeprefix("E")
    first, last = ndim - len(letters), ndim - 1
    if len(letters) == 2:
        return optax.contrib.MuonDimensionNumbers(first, last)
    joined = (first, first + 1) if letters[0] in HEADS else (first + 1, last)
    rows, columns = (joined, last) if letters[0] in HEADS else (first, joined)
    return optax.contrib.MuonDimensionNumbers(rows, columns)


def optimizers(name: Name) -> dict[str, optax.GradientTransformation]:
    """Name -> optimizer; ours in its default precision and in float32."""
    model = model_of(name)

    def ours(config: OptimConfig) -> optax.GradientTransformation:
        tx = muonclip(config, model)
        return optax.GradientTransformation(tx.init, lambda g, s, p: tx.update(g, s, p, learning_rate=RATE, max_logit_LH={}))

    numbers = nested({path: dimensions(path, x.ndim) for path, x in by_path(tree_of(name)).items()})
    adam = {"adam_b1": FLOAT32.adam_b1, "adam_b2": FLOAT32.adam_b2, "adam_weight_decay": DECAY}
    return {
        "ours": ours(replace(FLOAT32, ns_dtype=OptimConfig.ns_dtype)),
        "ours_float32": ours(FLOAT32),
        "optax_muon": optax.contrib.muon(
            RATE, weight_decay=DECAY, consistent_rms=RMS, muon_weight_dimension_numbers=lambda _: numbers, **adam
        ),
        "adamw": optax.adamw(RATE, FLOAT32.adam_b1, FLOAT32.adam_b2, weight_decay=DECAY),
    }


def stepper(tx: optax.GradientTransformation, params: dict, grads: dict) -> Callable[[], tuple[dict, optax.OptState]]:
    """One update of the weights as a function of nothing."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    return lambda: step(params, state, grads)


def same_work(ours: dict, theirs: dict, before: dict) -> float:
    """How far optax's first update is from ours in float32, relative, at the worst of Muon's leaves; ValueError beyond 1e-3.

    The three are weights. AdamW's leaves of optax's Muon take Nesterov's form, which is another update of the same cost.
    """
    ours, theirs, before = map(by_path, (ours, theirs, before))
    matrices = [path for path in before if rule_of(FLOAT32, path) == "muon"]
    moved = {path: (ours[path] - before[path], theirs[path] - before[path]) for path in matrices}
    apart = {path: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for path, (a, b) in moved.items()}
    path, worst = max(apart.items(), key=lambda item: item[1])
    if worst > 1e-3:
        raise ValueError(f"optax's first update differs from ours by {worst:.1e} at {'/'.join(path)}: not the same work")
    return worst


def time_tree(name: Name, rounds: int) -> dict:
    """Milliseconds a step of each optimizer on one tree."""
    shapes = tree_of(name)
    params, grads = drawn(shapes, 0), drawn(shapes, 1)
    moved: dict[str, dict] = {}

    def kept(key: str, step: Callable) -> Callable:
        def run():
            moved[key], state = step()
            return moved[key], state

        return run

    times = interleaved({key: kept(key, stepper(tx, params, grads)) for key, tx in optimizers(name).items()}, rounds)
    ms = {key: statistics.median(x) for key, x in times.items()}
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        "ours_ms": ms["ours"],
        "ours_float32_ms": ms["ours_float32"],
        "optax_muon_ms": ms["optax_muon"],
        "adamw_ms": ms["adamw"],
        "ratio_to_optax": _paired(times["ours"], times["optax_muon"]),
        "ratio_equal_precision": _paired(times["ours_float32"], times["optax_muon"]),
        "spread_ms": {key: [min(x), max(x)] for key, x in times.items()},
        "first_update_apart": same_work(moved["ours_float32"], moved["optax_muon"], params),
    }


def _paired(a: list[float], b: list[float]) -> float:
    """The median over rounds of one time over the other."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def time_forms(name: Name, rounds: int) -> dict[str, dict]:
    """Milliseconds of Newton-Schulz alone over the stack that costs most, by form, set of coefficients and operands' dtype.

    Of the larger trees a few matrices: more of them only take longer. Those of K2 have half their sides.
    """
    leaves = {path: x for path, x in by_path(tree_of(name)).items() if rule_of(FLOAT32, path) == "muon"}
    block = max(blocks_of(nested(leaves), "split"), key=lambda b: b.count * ns.flops(b.n, b.m, 5, "standard"))
    n, m = (block.n // 2, block.m // 2) if name == "k2_experts" else (block.n, block.m)
    count = {"sweep": block.count, "100m": 32, "k2_experts": 1}[name]
    x = jnp.asarray(np.random.default_rng(2).standard_normal((count, n, m), np.float32))
    programs = {}
    for form, kernel in (("standard", ns.standard), ("gram", ns.gram)):
        for products, side in (("symmetric products", symmetric.MIN_SIDE), ("plain products", sys.maxsize)):
            if products == "plain products" or min(n, m) >= symmetric.MIN_SIDE:
                with mock.patch.object(symmetric, "MIN_SIDE", side):
                    programs[f"{form}, {products}"] = _compiled(kernel, x, ns.coefficients("jordan", 5), "float32")
    for table, steps in (("you", 5), ("polar_express", 5), ("eight_two", 10)):
        programs[f"{table}, {steps} steps"] = _compiled(ns.newton_schulz, x, ns.coefficients(table, steps), "float32")
    for dtype in ("bfloat16", "float16"):
        programs[dtype] = _compiled(ns.newton_schulz, x, ns.coefficients("jordan", 5), dtype)
    times = interleaved(programs, rounds)
    return {key: {"ms": statistics.median(t), "matrices": f"{count} of {n} x {m}"} for key, t in times.items()}


def _compiled(kernel: Callable, x: jax.Array, table: ns.Table, dtype: str) -> Callable[[], jax.Array]:
    program = jax.jit(lambda x: ns.map_chunks(lambda x: (kernel(x, table, dtype),), x))  # in chunks, as in training
    jax.block_until_ready(program(x))
    return lambda: program(x)


def time_clip(rounds: int) -> dict[str, float]:
    """What QK-Clip and its statistic cost beside a training step of the sweep's smallest model, milliseconds.

    The clip is timed alone. The statistic is the difference between attention that returns it and attention that does not, so
    small that its sign is chance.
    """
    config: RunConfig = ladder.config(8, "default")
    model, a = config.model, config.model.attention
    step, state = make_step(config), init_state(config)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.n_words, (config.batch, config.seq_len + 1), np.int32))
    batch = {"tokens_BT": ids, "segments_BT": jnp.ones_like(ids), "positions_BT": jnp.arange(ids.shape[1])[None] + 0 * ids}
    keep = jax.tree.map(jnp.copy, state)

    def train():
        nonlocal keep
        keep, metrics = step(keep, batch, jnp.float32(1e9))
        return metrics["loss"]

    params = state.params
    logits = {"moe": jnp.full((model.n_moe, a.n_heads), 200.0)}  # every head fires
    tx = qk_clip(config.optim, a)
    clip = jax.jit(lambda u, p: tx.update(u, optax.EmptyState(), p, max_logit_LH=logits)[0])
    updates = jax.tree.map(jnp.zeros_like, params)
    bare = jax.jit(lambda u: jax.tree.map(lambda x: 1.0 * x, u))  # the copy that any jitted function of the tree makes

    rng, width = np.random.default_rng(1), a.d_nope + a.d_rope
    q, k = (jnp.asarray(rng.standard_normal((config.batch, config.seq_len, a.n_heads, width), np.float32)) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((config.batch, config.seq_len, a.n_heads, a.d_value), np.float32))

    def attend(q, k, v, told: bool):
        how = {"scale": width**-0.5, "block": a.block, "soft_cap": 0.0}
        o, max_logit_H = attention(q, k, v, batch["segments_BT"][:, : config.seq_len], **how)
        return jnp.square(o).sum(), max_logit_H if told else None

    with_it, without = (
        jax.jit(jax.grad(lambda q, k, v, told=told: attend(q, k, v, told), argnums=(0, 1, 2), has_aux=True))
        for told in (True, False)
    )
    programs = {
        "step": train,
        "clip": lambda: clip(updates, params),
        "copy": lambda: bare(updates),
        "attention with": lambda: with_it(q, k, v),
        "attention without": lambda: without(q, k, v),
    }
    times = interleaved(programs, rounds)
    apart = [x - y for x, y in zip(times["attention with"], times["attention without"], strict=True)]
    step_ms = statistics.median(times["step"])
    clip_ms = statistics.median(x - y for x, y in zip(times["clip"], times["copy"], strict=True))
    statistic_ms = model.n_layers * statistics.median(apart)
    share = (max(clip_ms, 0) + max(statistic_ms, 0)) / step_ms
    return {"step_ms": step_ms, "clip_ms": clip_ms, "statistic_ms": statistic_ms, "share_of_step": share}


def main(bench: Bench) -> dict:
    """Runs the rounds; progress goes to stderr."""
    keep_freed_memory()
    console = Console(stderr=True)
    trees, forms = {}, {}
    with console.status("") as status:
        for name in bench.trees:
            rounds = bench.rounds * ROUNDS[name]
            status.update(f"{name}: {rounds} rounds of four optimizers")
            trees[name] = time_tree(name, rounds)
            status.update(f"{name}: Newton-Schulz by form")
            forms[name] = time_forms(name, rounds)
        status.update("QK-Clip and its statistic")
        clip = time_clip(15)
    versions = _record.versions(("jax", "optax", "k2jax"))
    return {"trees": trees, "forms": forms, "clip": clip, "machine": _record.machine(), "versions": versions}


def show(result: dict) -> None:
    """Prints the tables."""
    print("tree          weights     ours ms (float32)   optax Muon ms   AdamW ms   ours/optax   equal precision")
    for name, r in result["trees"].items():
        print(
            f"{name:12s}{r['parameters'] / 1e6:7.1f}M{r['ours_ms']:13,.1f} ({r['ours_float32_ms']:,.1f})"
            f"{r['optax_muon_ms']:16,.1f}{r['adamw_ms']:11,.1f}{r['ratio_to_optax']:13.2f}{r['ratio_equal_precision']:18.2f}"
        )
        spread = ", ".join(f"{key} {low:,.1f} to {high:,.1f}" for key, (low, high) in r["spread_ms"].items())
        print(f"            spread: {spread}")
    for name, found in result["forms"].items():
        print(f"\nNewton-Schulz, float32 and Jordan's set unless said, {name}: {next(iter(found.values()))['matrices']}")
        for key, r in found.items():
            print(f"  {key:32s}{r['ms']:10,.1f} ms")
    c = result["clip"]
    print(
        f"\ntraining step {c['step_ms']:.1f} ms; QK-Clip takes {c['clip_ms']:.2f} and its statistic {c['statistic_ms']:.2f}, "
        f"together {c['share_of_step']:.1%}"
    )


if __name__ == "__main__":
    try:
        bench = tyro.cli(Bench, prog="python -m experiments.bench_optimizer", description=__doc__)
        result = main(bench)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if bench.json:
        print(json.dumps(result))
    else:
        show(result)
