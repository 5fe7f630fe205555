"""What is the least time of each part of a layer? Run: python -m experiments.roofline

One K2 layer with experts on one device: one sequence of 4096 tokens, the experts of 16-way expert parallelism with a balanced
load. For every part, forward and backward: FLOPs, bytes if each array crosses memory once, and the floor, whichever of compute
and memory takes longer, on an H800, an H200 and a TPU v5p at data-sheet rates. The head, and Muon's work on one expert matrix,
stand below the layer. Prints a table and draws it, at full widths, in `runs/roofline.png`.

On a GPU or TPU each part is timed too, and its share of the floor given. On a CPU ask for that with --measure, and for smaller
widths with --divide: the rates are then measured here. `python -m experiments.roofline --measure --divide 16 --seq-len 512`
takes half a minute on two cores.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from configs import k2
from experiments import _figures
from experiments._timing import interleaved, matmul_rate
from k2jax.allocator import keep_freed_memory
from k2jax.config import ModelConfig
from k2jax.kernels import newton_schulz
from k2jax.kernels.flash_attention import attention
from k2jax.kernels.grouped_matmul import routed_swiglu
from k2jax.model import moe
from k2jax.model.mla import project
from k2jax.model.norm import rms_norm
from k2jax.model.rope import softmax_scale
from k2jax.train.loss import cross_entropy


class Chip(NamedTuple):
    """A device's peaks."""

    flops: float  # FLOP/s of a product in bfloat16, dense
    bandwidth: float  # bytes/s of its memory


# NVIDIA's data sheets of H100 (of which an H800 has the compute and memory) and H200, SXM; Google's page of the v5p.
CHIPS = {"H800": Chip(989e12, 3.35e12), "H200": Chip(989e12, 4.8e12), "v5p": Chip(459e12, 2.765e12)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Shapes, and whether to time."""

    seq_len: int = 4096  # tokens of the one sequence
    expert: int = 16  # devices that share a layer's experts
    divide: int = 1  # K2's widths by this, for a machine that cannot hold them
    measure: bool = False  # time the parts on a CPU too
    rounds: int = 7  # timings of each part, interleaved
    json: bool = False  # print one JSON object instead of a table

    def __post_init__(self):
        for name in ("seq_len", "expert", "divide", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if k2.config().model.moe.n_experts % self.expert:
            raise ValueError(f"--expert must divide the 384 experts; got {self.expert}")


class Part(NamedTuple):
    """A part of a layer as a program.

    `function(inputs, weights, *fixed) -> array`; the backward pass has gradients of inputs and weights, the latter added to
    float32 accumulators.
    """

    name: str
    function: Callable
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    weights: tuple[jax.ShapeDtypeStruct, ...]
    fixed: tuple[np.ndarray, ...]
    flops: int  # forward
    flops_back: int
    joint: bool = False  # the gradients are formed in the forward pass


def model_of(options: Options) -> ModelConfig:
    """K2's layer with the experts of one device, all widths divided."""
    model, by = k2.config().model, options.divide
    a, m = model.attention, model.moe
    widths = {name: getattr(a, name) // by for name in ("q_rank", "kv_rank")}
    heads = {name: max(getattr(a, name) // by, 1) for name in ("n_heads", "n_kv_heads")}
    return replace(
        model,
        n_layers=1,
        n_dense=0,
        n_mtp=0,
        n_words=model.n_words // by,
        d_model=model.d_model // by,
        context=max(model.context, options.seq_len),
        attention=replace(a, **widths, **heads),
        moe=replace(m, d_expert=m.d_expert // by),
    )


def parts(options: Options, dtype: str) -> list[Part]:
    """The parts in the order of the forward pass."""
    model = model_of(options)
    both = _attention(model, options.seq_len, dtype), _feed_forward(model, options, dtype)
    return [*both[0], *both[1], *_outside(model, options.seq_len, dtype)]


def _product(name: str, X: int, n: int, out: tuple[int, ...], dtype: str) -> Part:
    """A projection of X tokens."""
    flops, (x, w) = 2 * X * n * int(np.prod(out)), _arrays(dtype, (1, X, n), (n, *out))
    return Part(name, lambda x, w: project(x[0], w[0]), (x,), (w,), (), flops, 2 * flops)


def _norm(name: str, X: int, model: ModelConfig, dtype: str) -> Part:
    x, gain = _arrays(dtype, (1, X, model.d_model)), _arrays("float32", (model.d_model,))
    return Part(name, lambda x, w: rms_norm(x[0], w[0], model.norm_eps), x, gain, (), 0, 0)


def _arrays(dtype: str, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _attention(model: ModelConfig, X: int, dtype: str) -> list[Part]:
    a, D = model.attention, model.d_model
    H, Y, V = a.n_heads, a.d_nope + a.d_rope, a.d_value

    def core(x, w, segments_BT):
        return attention(*x, segments_BT, scale=softmax_scale(a), block=a.block, soft_cap=a.soft_cap)[0]

    pairs = H * X * (X + 1) // 2  # of query and key, causal
    # Backward: the logits again, and the gradients of weights, values, queries and keys.
    work = 2 * pairs * (Y + V), 2 * pairs * (3 * Y + 2 * V)
    heads = _arrays(dtype, (1, X, H, Y), (1, X, H, Y), (1, X, H, V))
    return [
        _norm("attention norm", X, model, dtype),
        _product("query down", X, D, (a.q_rank,), dtype),
        _product("query up", X, a.q_rank, (H, Y), dtype),
        _product("key-value down", X, D, (a.kv_rank + a.d_rope,), dtype),
        _product("key-value up", X, a.kv_rank, (H, a.d_nope + V), dtype),
        Part("attention core", core, heads, (), (np.ones((1, X), np.int32),), *work),
        _product("output", X, H * V, (D,), dtype),
    ]


def _feed_forward(model: ModelConfig, options: Options, dtype: str) -> list[Part]:
    m, X, D, F = model.moe, options.seq_len, model.d_model, model.moe.d_expert
    local, shared = m.n_experts // options.expert, m.n_shared * F
    # A balanced load: of all ranks' tokens as many choices fall here as this rank's tokens make.
    expert_XK = (np.arange(X * m.n_active, dtype=np.int32) % local).reshape(X, m.n_active)

    def router(x, w, real_BT):
        return moe.route(m, x[0], w[0], jnp.zeros(m.n_experts), real_BT).weight_XK

    def experts(x, w, expert_XK):
        return routed_swiglu(x[0], expert_XK, x[1], *w)

    x, rows = _arrays(dtype, (1, X, D)), _arrays(dtype, (X, D)) + _arrays("float32", (X, m.n_active))
    of_experts = _arrays(dtype, (local, D, F), (local, D, F), (local, F, D))
    of_shared = _arrays(dtype, (D, shared), (D, shared), (shared, D))
    choose, routed, common = 2 * X * D * m.n_experts, 6 * X * m.n_active * D * F, 6 * X * D * shared
    return [
        _norm("feed-forward norm", X, model, dtype),
        Part("router", router, x, _arrays("float32", (D, m.n_experts)), (np.ones((1, X), bool),), choose, 2 * choose),
        Part("experts", experts, rows, of_experts, (expert_XK,), routed, 2 * routed),
        Part("shared expert", lambda x, w: moe.swiglu(x[0], *w), x, of_shared, (), common, 2 * common),
    ]


def _outside(model: ModelConfig, X: int, dtype: str) -> list[Part]:
    D, F, W = model.d_model, model.moe.d_expert, model.n_words
    polynomials = newton_schulz.coefficients("jordan", 5)

    def head(x, w, targets_BT):
        return cross_entropy(x[0], w[0], targets_BT, jnp.ones(targets_BT.shape, bool), model.loss_chunk)[0]

    def orthogonalize(x, w):
        return newton_schulz.newton_schulz(x[0], polynomials, dtype)

    (x, w), targets_BT, count = _arrays(dtype, (1, X, D), (W, D)), np.zeros((1, X), np.int32), 2 * X * D * W
    work = newton_schulz.flops(D, F, 5, newton_schulz.form(D, F, 5))
    return [
        Part("head", head, (x,), (w,), (targets_BT,), count, 2 * count, joint=True),
        Part("Newton-Schulz", orthogonalize, _arrays("float32", (1, D, F)), (), (), work, 0),
    ]


OUTSIDE = ("head", "Newton-Schulz")  # of the layer


class Pass(NamedTuple):
    """A part in one direction."""

    flops: int
    bytes: int

    def floor(self, chip: Chip) -> float:
        """Least seconds."""
        return max(self.flops / chip.flops, self.bytes / chip.bandwidth)


def passes(part: Part) -> dict[str, Pass]:
    """Work by direction, every array read or written once; weight gradients are read and written in float32."""
    out = jax.eval_shape(part.function, part.inputs, part.weights, *part.fixed)
    inputs, weights, fixed = _bytes(part.inputs), _bytes(part.weights), _bytes(part.fixed)
    gradients = inputs + 8 * sum(w.size for w in part.weights)
    if part.joint:
        return {"both": Pass(part.flops + part.flops_back, inputs + weights + fixed + _bytes(out) + gradients)}
    found = {"forward": Pass(part.flops, inputs + weights + fixed + _bytes(out))}
    if part.flops_back or part.weights:
        found["backward"] = Pass(part.flops_back, inputs + weights + fixed + _bytes(out) + gradients)
    return found


def _bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def programs(part: Part) -> dict[str, Callable[[], object]]:
    """The part's directions as functions of nothing, over drawn numbers. Backward is all of `jax.vjp` without the forward."""
    draws = np.random.default_rng(0)

    def filled(tree):
        return jax.tree.map(lambda s: jnp.asarray(0.02 * draws.standard_normal(s.shape, np.float32), s.dtype), tree)

    inputs, weights = filled(part.inputs), filled(part.weights)
    fixed = tuple(jnp.asarray(x) for x in part.fixed)
    if part.joint:
        both = jax.jit(jax.value_and_grad(lambda x, w: part.function(x, w, *fixed), argnums=(0, 1)))
        return {"both": lambda: both(inputs, weights)}
    forward = jax.jit(part.function)
    found = {"forward": lambda: forward(inputs, weights, *fixed)}
    if "backward" in passes(part):
        out, pull = jax.vjp(lambda x, w: part.function(x, w, *fixed), inputs, weights)
        back = jax.jit(lambda pull, cotangent: pull(cotangent))
        found["backward"] = lambda: back(pull, jnp.ones_like(out))
    return found


def here(rounds: int, dtype: str) -> Chip:
    """This machine's rates: a product of matrices, and a pass over 256 MB, read and written."""
    long, add = jnp.ones(1 << 26), jax.jit(lambda x: x + 1)
    seconds = 1e-3 * min(interleaved({"pass": lambda: add(long)}, rounds)["pass"])
    return Chip(matmul_rate(rounds, dtype), 2 * long.nbytes / seconds)


def measured_chip(options: Options, dtype: str) -> tuple[str, Chip]:
    """The chip that times are held against: by its data sheet if it is one of ours, else by its measured rates."""
    kind = jax.devices()[0].device_kind
    known = {"H800": "H800", "H100": "H800", "H200": "H200", "TPU v5": "v5p", "TPU v5p": "v5p"}
    name = next((chip for word, chip in known.items() if word in kind), None)
    return (kind, CHIPS[name]) if name else (f"{kind}, as measured", here(options.rounds, dtype))


def main(options: Options) -> dict:
    """Returns rows by part and direction, and sums of the layer."""
    keep_freed_memory()
    on_cpu = jax.default_backend() == "cpu"
    timed = options.measure or not on_cpu
    dtype = "float32" if on_cpu and timed else "bfloat16"  # in which a CPU has products
    result: dict = {"seq_len": options.seq_len, "expert": options.expert, "divide": options.divide, "dtype": dtype, "parts": []}
    chips = dict(CHIPS)
    if timed:
        result["device"], chip = measured_chip(options, dtype)
        chips = {"here": chip} if on_cpu else chips | {"here": chip}
        result["rates"] = chip._asdict()
    result["chips"] = {name: chip._asdict() for name, chip in chips.items()}
    for part in parts(options, dtype):
        found = passes(part)
        rows = [
            {"part": part.name, "direction": way, **work._asdict()}
            | {"floor_ms": {name: 1e3 * work.floor(chip) for name, chip in chips.items()}}
            | {"bound": {name: _bound(work, chip) for name, chip in chips.items()}}
            for way, work in found.items()
        ]
        if timed:
            times = interleaved(programs(part), options.rounds)
            for row in rows:
                row["ms"] = statistics.median(times[row["direction"]])
                row["share_of_floor"] = row["floor_ms"]["here"] / row["ms"]
        result["parts"] += rows
    inside = [row for row in result["parts"] if row["part"] not in OUTSIDE]
    result["layer"] = {
        "flops": sum(row["flops"] for row in inside),
        "bytes": sum(row["bytes"] for row in inside),
        "floor_ms": {name: sum(row["floor_ms"][name] for row in inside) for name in chips},
    }
    if timed:
        result["layer"]["ms"] = sum(row["ms"] for row in inside)
        result["layer"]["share_of_floor"] = result["layer"]["floor_ms"]["here"] / result["layer"]["ms"]
    return result


def _bound(work: Pass, chip: Chip) -> str:
    return "compute" if work.flops / chip.flops > work.bytes / chip.bandwidth else "memory"


def render(result: dict) -> str:
    """The rows as a table; c and m say whether compute or memory sets a floor."""
    chips = list(result["chips"])
    columns = "".join(f"{name + ' ms':>12}" for name in chips)
    lines = [f"{'part':18}{'direction':10}{'GFLOP':>10}{'MB':>9}{columns}"]
    timed = "ms" in result["layer"]
    lines[0] += f"{'ms':>10}{'of floor':>10}" if timed else ""
    for row in [*result["parts"], {"part": "layer", "direction": "", "bound": {}, **result["layer"]}]:
        floors = "".join(f"{row['floor_ms'][name]:>10.3f} {row['bound'].get(name, ' ')[0]}" for name in chips)
        line = f"{row['part']:18}{row['direction']:10}{row['flops'] / 1e9:>10.1f}{row['bytes'] / 1e6:>9.0f}{floors}"
        lines.append(line + (f"{row['ms']:>10.2f}{row['share_of_floor']:>10.0%}" if timed else ""))
    return "\n".join(lines)


def draw(result: dict, path: Path) -> None:
    """Saves the time that compute and memory take for each part of the layer, both directions, on each chip."""
    names = [name for name in dict.fromkeys(row["part"] for row in result["parts"]) if name not in OUTSIDE]
    work = {n: [sum(r[kind] for r in result["parts"] if r["part"] == n) for kind in ("flops", "bytes")] for n in names}
    figure, (axes,) = _figures.panels(1, len(result["chips"]), "A K2 layer, forward and backward: least time of each part")
    for ax, (name, chip) in zip(axes, result["chips"].items(), strict=True):
        _figures.dress(ax, f"{name}: {result['layer']['floor_ms'][name]:.1f} ms", "ms", "")
        place = np.arange(len(names))
        ax.barh(place - 0.2, [1e3 * work[n][0] / chip["flops"] for n in names], 0.4, label="compute")
        ax.barh(place + 0.2, [1e3 * work[n][1] / chip["bandwidth"] for n in names], 0.4, label="memory")
        ax.set_yticks(place, names)
        ax.invert_yaxis()
        _figures.legend(ax, "center right")
    _figures.save(figure, path)


if __name__ == "__main__":
    try:
        options = tyro.cli(Options, description=__doc__)
        result = main(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result) if options.json else render(result))
    if options.divide == 1:
        draw(result, Path("runs/roofline.png"))
