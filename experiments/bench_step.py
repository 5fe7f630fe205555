"""How long does a training step take, and what in it? Run: python -m experiments.bench_step

Every figure is of real runs: `k2jax.train` in a process of its own, on prepared text, with data, metrics and log. Shapes and
rules are run in turn within every round. A round's first process compiles into an empty cache, the second finds the programs
there. Then the parts of a step (attention, experts, router, head, optimizer) are timed alone, in turn, beside the whole step,
all on one device.

Shapes: `peer`, that of MaxText's deepseek3-tiny with 4 layers, 16 experts and 512 tokens a step; `sweep8` and `sweep64`, the
sparsity sweep's smallest and largest; `experts512`, 512 experts and 8,192 tokens. With --peer PYTHON, an interpreter that has
MaxText 0.2.5, its run of the same shape takes its turn too. A round takes about ten minutes on two cores. A sweep gives
each run one core: `taskset -c 0 python -m experiments.bench_step` measures that, against that core's rate.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console

from configs import ladder
from experiments import _step_parts
from experiments._runner import last_step
from experiments._timing import interleaved, matmul_rate
from k2jax.allocator import keep_freed_memory
from k2jax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, to_dict
from k2jax.data.corpora import prepare
from k2jax.scaling.flops import training_flops
from k2jax.train import metrics

RULES = ("adamw", "muonclip")
SKIP = 10  # first steps of a run, which no median counts
AFTER = 3  # steps beyond those that are timed: a row is written when the next step is under way


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is run, and how often."""

    shapes: tuple[str, ...] = ("peer", "sweep8", "sweep64", "experts512")
    steps: int = 40  # of every run
    rounds: int = 3
    devices: int = 0  # that a run splits its batch over; 0 is a core each, as training does by itself
    peer: Path | None = None  # a Python with MaxText 0.2.5 installed
    parts: bool = True  # time the parts of a step too
    part_rounds: int = 9  # timings of each part, interleaved
    json: bool = False  # print one JSON object instead of tables


def peer_shape(rule: str) -> RunConfig:
    """MaxText's deepseek3-tiny at 4 layers: width 64, 4 heads of 128 + 64, 16 experts of width 64, top-8, 1 shared."""
    return RunConfig(
        name="peer",
        batch=4,
        seq_len=128,
        model=ModelConfig(
            **{"n_words": 1024, "d_model": 64, "n_layers": 4, "n_dense": 1, "d_dense": 64, "context": 128},
            init_std=0.02,
            dtype="float32",
            attention=AttentionConfig(
                **{"n_heads": 4, "n_kv_heads": 4, "q_rank": 32, "kv_rank": 16, "d_nope": 128, "d_rope": 64, "d_value": 128},
                block=64,
            ),
            moe=MoEConfig(n_experts=16, n_active=8, d_expert=64, routed_scale=0.0),
        ),
        optim=OptimConfig(rule=rule, learning_rate=1e-3, ns_dtype="float32"),
        data=DataConfig(vocab=1024),
    )


def _sweep(sparsity: int, batch: int):
    def shape(rule: str) -> RunConfig:
        config = ladder.config(sparsity, "default")
        return replace(config, batch=batch, optim=replace(config.optim, rule=rule))

    return shape


SHAPES = {"peer": peer_shape, "sweep8": _sweep(8, 16), "sweep64": _sweep(64, 16), "experts512": _sweep(64, 64)}


def run_of(bench: Bench, shape: str, rule: str, out: Path) -> RunConfig:
    """The training run that is timed."""
    steps = bench.steps + AFTER
    mesh = MeshConfig(data=bench.devices)
    return replace(SHAPES[shape](rule), mesh=mesh, out=out, steps=steps, eval_every=0, eval_batches=1, checkpoint_every=0)


class Timing(NamedTuple):
    """One run."""

    step_s: list[float]  # seconds of every step that counts
    start_s: float  # from the start of the process to the end of step `Bench.steps`


def time_run(bench: Bench, shape: str, rule: str, home: Path, cache: Path) -> Timing:
    """Trains in a process of its own, with compiled programs kept in `cache`. Raises RuntimeError if it fails."""
    config = run_of(bench, shape, rule, home / "run")
    job = home / "job.json"
    job.write_text(json.dumps({"config": to_dict(config), "core": None}))
    kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    log, path = home / "log", config.out / "metrics.jsonl"
    start = time.perf_counter()
    with log.open("wb") as output:
        command = [sys.executable, "-m", "experiments._runner", str(job), str(os.getpid())]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | kept)
    while process.poll() is None and last_step(path) < bench.steps:
        time.sleep(0.02)
    start_s = time.perf_counter() - start
    if process.wait():
        raise RuntimeError(f"the run of {shape} with {rule} failed: {log.read_text(errors='replace')[-500:]}")
    rows = [row["seconds"] for row in metrics.read(path) if SKIP < row["step"] <= bench.steps]
    return Timing(rows, start_s)


MAXTEXT = (
    "run_name=t model_name=deepseek3-tiny override_model_config=True base_num_decoder_layers=4 first_num_dense_layers=1 "
    "vocab_size=1024 dataset_type=synthetic per_device_batch_size=4 max_target_length=128 dtype=float32 weight_dtype=float32 "
    "enable_checkpointing=false attention=dot_product hardware=cpu skip_jax_distributed_system=True "
    "enable_goodput_recording=false sparse_matmul=False"
)
MAXTEXT_RULES = {
    "adamw": "",
    "muonclip": "opt_type=muon muon_consistent_rms=0.2 muon_weight_decay=0.1 use_qk_clip=True qk_clip_threshold=100",
}


def time_peer(bench: Bench, rule: str, home: Path) -> Timing:
    """MaxText's run of the shape `peer`, by the times that it prints. Raises RuntimeError if it fails."""
    assert bench.peer is not None
    python = str(bench.peer)
    where = subprocess.run([python, "-c", "import maxtext; print(maxtext.__path__[0])"], capture_output=True, text=True)
    if where.returncode:
        raise RuntimeError(f"{python} has no MaxText: {where.stderr[-300:]}")
    base = Path(where.stdout.split()[-1]) / "configs" / "base.yml"
    options = f"{MAXTEXT} {MAXTEXT_RULES[rule]} steps={bench.steps} base_output_directory={home} metrics_file={home}/m.txt"
    command = [python, "-m", "maxtext.trainers.pre_train.train", str(base), *options.split()]
    environment = os.environ | {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}
    start, start_s, seconds, lines = time.perf_counter(), float("nan"), [], []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, cwd=home)
    for line in process.stdout or ():
        lines.append(line)
        if found := re.search(r"completed step: (\d+), seconds: ([\d.]+)", line):
            seconds.append(float(found[2]))
            start_s = time.perf_counter() - start
    if process.wait() or len(seconds) < bench.steps:
        raise RuntimeError(f"MaxText's run failed: {''.join(lines[-5:])}")
    return Timing(seconds[SKIP:], start_s)


def _turn(bench: Bench, timings: dict, console: Console) -> None:
    """One round: every shape and rule once with an empty cache and once with a full one, then the peer."""
    for shape in bench.shapes:
        for rule in RULES:
            with tempfile.TemporaryDirectory() as folder:
                for kind in ("cold", "warm"):
                    home = Path(folder) / kind
                    home.mkdir()
                    timings.setdefault((shape, rule, kind), []).append(
                        time_run(bench, shape, rule, home, Path(folder) / "programs")
                    )
                if shape == "peer" and bench.peer:
                    timings.setdefault(("maxtext", rule, "cold"), []).append(time_peer(bench, rule, Path(folder)))
            last = timings[shape, rule, "cold"][-1]
            console.print(f"{shape} {rule}: {statistics.median(last.step_s):.3f} s a step, {last.start_s:.1f} s to the last")


def _median(timings: list[Timing]) -> float:
    return statistics.median(s for t in timings for s in t.step_s)


def _quartiles(timings: list[Timing]) -> list[float]:
    low, _, high = statistics.quantiles([s for t in timings for s in t.step_s], n=4)
    return [low, high]


def _shape_row(bench: Bench, shape: str, timings: dict, rate: float) -> dict:
    config = run_of(bench, shape, "muonclip", Path("."))
    step_s = {rule: _median(timings[shape, rule, "cold"] + timings[shape, rule, "warm"]) for rule in RULES}
    start_s = {
        kind: {rule: statistics.median(t.start_s for t in timings[shape, rule, kind]) for rule in RULES}
        for kind in ("cold", "warm")
    }
    tokens = config.batch * config.seq_len
    row = {
        "adamw_s": step_s["adamw"],
        "muonclip_s": step_s["muonclip"],
        "quartiles_s": {rule: _quartiles(timings[shape, rule, "cold"] + timings[shape, rule, "warm"]) for rule in RULES},
        "time_to_40_steps_s": start_s["cold"]["muonclip"],
        "time_to_steps_by_cache_and_rule_s": start_s,
        "steps": bench.steps,
        "tokens_per_s": tokens / step_s["muonclip"],
        "active_flops_per_s": tokens * training_flops(config.model, config.seq_len).total / step_s["muonclip"],
    }
    row["active_flops_fraction"] = row["active_flops_per_s"] / rate
    if shape == "peer" and bench.peer:
        theirs = {rule: timings["maxtext", rule, "cold"] for rule in RULES}
        row["maxtext_s"] = {rule: _median(t) for rule, t in theirs.items()}
        row["maxtext_quartiles_s"] = {rule: _quartiles(t) for rule, t in theirs.items()}
        row["maxtext_time_to_steps_s"] = {rule: statistics.median(x.start_s for x in t) for rule, t in theirs.items()}
        row["over_maxtext"] = {rule: step_s[rule] / row["maxtext_s"][rule] for rule in RULES}
        row["start_over_maxtext"] = {rule: start_s["cold"][rule] / row["maxtext_time_to_steps_s"][rule] for rule in RULES}
    return row


def _parts_row(bench: Bench, shape: str, run_s: float) -> dict[str, float]:
    """Seconds of each part, MuonClip, on one device; `rest` is what no part is, and `host`, of a run on one device too, what a
    step takes beyond the program."""
    config = SHAPES[shape]("muonclip")
    programs = {"step": _step_parts.step(config), **_step_parts.parts(config)}
    found = {name: 1e-3 * statistics.median(ms) for name, ms in interleaved(programs, bench.part_rounds).items()}
    step = found.pop("step")
    found |= {"rest": step - sum(found.values()), "step": step}
    return found | ({"host": run_s - step} if bench.devices == 1 else {})


def main(bench: Bench) -> dict:
    """Runs the rounds; returns the figures by shape."""
    unknown = set(bench.shapes) - set(SHAPES)
    if unknown:
        raise ValueError(f"shapes are {', '.join(SHAPES)}; got {', '.join(sorted(unknown))}")
    keep_freed_memory()
    console = Console(stderr=True, highlight=False)
    for data in {SHAPES[shape]("adamw").data: None for shape in bench.shapes}:
        prepare(data, console=console)
    rate, timings = matmul_rate(10), {}
    for n in range(bench.rounds):
        console.print(f"round {n + 1} of {bench.rounds}")
        _turn(bench, timings, console)
    rows = {shape: _shape_row(bench, shape, timings, rate) for shape in bench.shapes}
    if bench.parts:
        for shape, row in rows.items():
            console.print(f"parts of {shape}")
            row["parts_s"] = _parts_row(bench, shape, row["muonclip_s"])
            row["optimizer_share"] = row["parts_s"]["optimizer"] / row["parts_s"]["step"]
    return {"matmul_flops_per_s": rate, "shapes": rows}


def render(result: dict) -> str:
    """The figures as tables."""
    lines = ["shape       adamw s  muonclip s  tokens/s  active/matmul  to last step s: cold  warm"]
    for name, r in result["shapes"].items():
        start = r["time_to_steps_by_cache_and_rule_s"]
        lines.append(
            f"{name:10s}  {r['adamw_s']:7.3f}  {r['muonclip_s']:10.3f}  {r['tokens_per_s']:8.0f}  "
            f"{r['active_flops_fraction']:13.0%}  {start['cold']['muonclip']:20.1f}  {start['warm']['muonclip']:4.1f}"
        )
    for r in result["shapes"].values():
        for rule, over in r.get("over_maxtext", {}).items():
            start = r["start_over_maxtext"][rule]
            lines.append(f"over MaxText, {rule}: {over:.2f} a step, {start:.2f} to the last step from the process's start")
    for name, r in result["shapes"].items():
        if "parts_s" in r:
            parts = ", ".join(f"{part} {1e3 * s:.0f}" for part, s in r["parts_s"].items())
            lines.append(f"{name}, ms: {parts}; optimizer {r['optimizer_share']:.0%} of a step")
    return "\n".join(lines)


if __name__ == "__main__":
    bench = tyro.cli(Bench, description=__doc__)
    try:
        result = main(bench)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result) if bench.json else render(result))
