"""Pipeline schedules side by side: what interleaved 1F1B hides, and its price in bubble and memory (report 2.4.2, figure 7).

The claims: with one more warm-up forward, interleaved 1F1B pairs a forward and a backward of different microbatches in its
steady phase, and each hides the other's expert exchanges; its bubble falls with the chunks v of a stage as 1 / v; what a stage
keeps does not grow with the microbatches; DualPipe would need a second copy of parameters and gradients.

    python -m experiments.pipeline_schedules                K2's pipeline: a minute, and four more for the measurement
    python -m experiments.pipeline_schedules --no-measure   simulation alone
    python -m experiments.pipeline_schedules --no-measure --stages 8 --chunks 2 --microbatches 32 --exchange 6

Simulated are GPipe, 1F1B, ZB-H1, DualPipe, interleaved 1F1B (Megatron-LM's) and ours, the lock-step program of k2jax.parallel.
The costs of a layer come from the FLOPs and bytes of a K2 layer at stated rates, unless they are given; every schedule is held
against its published formulas. Measured is the temporary memory of our compiled training step by the number of microbatches, on
eight fake devices, beside that of a program in GPipe's order. The folder --out gets timelines.png (who does what when),
figure.png (waiting and memory by chunks and microbatches) and summary.json; the last lines say which claims held.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments import _costs, _record, _schedules, _timelines
from experiments._schedules import Sizes
from experiments._simulator import CAUSES, PHASES, Costs, Row, idle, run, simulate
from k2jax.config import MeshConfig
from k2jax.parallel import schedule
from k2jax.plan import Machine
from k2jax.train.folder import write

FASTER = 1.3  # of the device in the claims' second figure: faster devices leave less time to hide an exchange in
FAKE_DEVICES = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. Times are in ms for one layer and one microbatch; those not given are computed for K2."""

    stages: int = 16  # devices along the pipeline, P
    chunks: int = 4  # chunks of layers on each stage, v; must divide its layers
    microbatches: int = 64  # of a step, M; a multiple of the stages
    layers: int = 4  # on each stage; K2's 61 fill 64 places on 16 stages
    forward: float | None = None  # ms of a forward pass
    backward: float | None = None  # ms of the input gradients
    weights: float | None = None  # ms of the weight gradients
    exchange: float | None = None  # ms of an expert exchange; there are two forward and two backward
    transfer: float | None = None  # ms of passing a microbatch to the next stage
    copy: float | None = None  # ms of copying what is kept for the backward to the host, and as long back; 0: it stays
    recompute: bool = False  # in all schedules: keep a layer's input alone; the backward repeats forward and dispatch
    expert: int = 16  # devices over which a layer's experts are spread
    machine: Machine = field(default_factory=Machine)
    picture: tuple[int, int, int] = (4, 2, 8)  # stages, chunks, microbatches of timelines.png; of more, little can be read
    measure: bool = True  # compile our training step for 4 to 32 microbatches and read its memory
    out: Path = Path("runs/pipeline_schedules")  # folder of the results

    def __post_init__(self):
        for sizes in (self.sizes, Sizes(*self.picture, self.layers)):
            schedule.ticks(sizes.P, sizes.v, sizes.M)  # raises
            if self.layers < 1 or self.layers % sizes.v:
                raise ValueError(f"chunks must divide the layers of a stage; got {sizes.v} chunks and {self.layers} layers")
        for name in ("forward", "backward", "weights", "exchange", "transfer", "copy"):
            value = getattr(self, name)
            if value is not None and not (0 < value < 1e9 or (value == 0 and name in ("exchange", "transfer", "copy"))):
                raise ValueError(f"--{name} is a time in ms and must be positive; got {value}")
        if self.expert not in (fits := [n for n in range(1, 385) if 384 % n == 0]):
            raise ValueError(f"--expert must divide K2's 384 experts; got {self.expert}, it can be {', '.join(map(str, fits))}")

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.stages, self.chunks, self.microbatches, self.layers)


def costs_of(options: Options) -> Costs:
    """K2's costs, those that were given in their place. A given total is split over attention and experts as K2's is."""
    found = _costs.layer(options.machine, options.expert, options.recompute)
    for name, suffix in (("forward", ""), ("backward", "_back"), ("weights", "_weights")):
        if (given := getattr(options, name)) is not None:
            parts = {part + suffix: getattr(found, part + suffix) for part in ("attention", "experts")}
            found = found._replace(**{k: given * ms / sum(parts.values()) for k, ms in parts.items()})
    for name in ("exchange", "transfer", "copy"):
        if (given := getattr(options, name)) is not None:
            found = found._replace(**{name: given})
    return found


class Claim(NamedTuple):
    """One sentence of the report, what came out, and pass, fail or untested."""

    claim: str
    measured: str
    verdict: str


class Results(NamedTuple):
    """All that a run found."""

    costs: Costs
    rows: dict[str, Row]  # by schedule
    built: Row  # ours with every layer recomputed and exchanges of the buffers' fixed size
    by_chunks: dict[int, Row]  # ours
    study: list[tuple[_costs.Choice, float]]  # sizes of the expert axis, and the share of exchanges that is hidden
    memory: dict | None  # `_pipeline_memory.main`, or an error; None if not asked for


def measure() -> dict:
    """What `_pipeline_memory` finds, in a process of its own: the number of devices is fixed when jax starts."""
    environment = os.environ | {"XLA_FLAGS": FAKE_DEVICES, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments._pipeline_memory"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": f"the programs did not compile: {reason}"}
    return json.loads(done.stdout.splitlines()[-1])


def collect(options: Options, console: Console) -> Results:
    """Simulates every schedule, every number of chunks and every size of the expert axis, then measures."""
    costs, plans = costs_of(options), _schedules.all_of(options.sizes)
    chunks = [v for v in range(1, options.layers + 1) if options.layers % v == 0]
    choices = _costs.expert_sizes(options.machine, options.stages, options.recompute)
    mine = _schedules.lock_step(*options.sizes)
    columns = TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(plans) + 1 + len(chunks) + len(choices) + options.measure)

        def part(name: str, job: Callable):
            progress.update(bar, description=name)
            found = job()
            progress.advance(bar)
            return found

        rows = {plan.name: part(plan.name, lambda plan=plan: run(plan, costs)) for plan in plans}
        as_built = costs._replace(recompute=True, exchange=costs.exchange * MeshConfig.buffer)
        built = part("ours as built", lambda: run(mine, as_built))
        by_chunks = {
            v: part(f"ours, v = {v}", lambda v=v: run(_schedules.lock_step(*options.sizes._replace(v=v)), costs))
            for v in chunks
        }
        study = [
            (c, part(f"experts on {c.expert}", lambda c=c: idle(simulate(mine, costs._replace(exchange=c.exchange))).hidden))
            for c in choices
        ]
        memory = part("memory of the compiled step", measure) if options.measure else None
    return Results(costs, rows, built, by_chunks, study, memory)


def claims(options: Options, found: Results) -> list[Claim]:
    """What is claimed, and whether it came out."""
    (P, v, M, _), rows = options.sizes, found.rows
    ours, plain = rows["ours"], rows["interleaved"]
    worst = max(row.bubble_error for row in rows.values())
    shorter = f"{plain.idle.hidden:.0%} without it; the step is {1 - ours.step / plain.step:.0%} shorter"
    as_built = f"since it recomputes each layer, with a first exchange twice as long, in {MeshConfig.buffer}x buffers"
    bubbles = ", ".join(f"{row.bubble:.0f} ms at v = {n}" for n, row in found.by_chunks.items())
    falls = all(abs(n * row.bubble - found.by_chunks[1].bubble) < 1e-6 * row.step for n, row in found.by_chunks.items())
    slots = {n: schedule.n_slots(P, v, n) for n in (M, 2 * M, 4 * M)}
    return [
        Claim(
            "every schedule's bubble is the published one",
            f"within {worst:.0e} of a step; ZB-H1's and DualPipe's at F = B = W, for which their formulas are",
            _verdict(worst < 1e-6),
        ),
        _hides("interleaved 1F1B with one more warm-up hides its steady exchanges", ours, shorter),
        _hides("the same of k2jax.parallel as built", found.built, as_built),
        Claim("chunks shorten the bubble as 1 / v", bubbles, _verdict(falls)),
        Claim(
            "the residuals that a stage keeps do not grow with the microbatches",
            f"{', '.join(f'{n} slots at M = {m}' for m, n in slots.items())}; v P + P = {v * P + P}",
            _verdict(max(slots.values()) <= v * P + P and slots[4 * M] == slots[2 * M]),
        ),
        _against_dualpipe(options, rows),
        _measured(found.memory),
    ]


def _hides(claim: str, row: Row, also: str) -> Claim:
    costs, plan = row.timeline.costs, row.timeline.schedule
    fast = idle(simulate(plan, costs.faster(FASTER))).hidden
    told = f"{row.idle.hidden:.1%} ({fast:.1%} on a device {FASTER} times as fast), {also}; "
    told += f"an exchange takes {costs.exchange:.2f} ms, and up to {costs.cover:.2f} ms are hidden"
    return Claim(claim, told, _verdict(row.idle.hidden > 0.99))


def _against_dualpipe(options: Options, rows: dict[str, Row]) -> Claim:
    claim = "as fast as DualPipe, without its second copy of parameters and gradients"
    if "DualPipe" not in rows:
        return Claim(claim, "DualPipe needs even stages and microbatches, at least two microbatches a stage", "untested")
    ours, dual = rows["ours"].step, rows["DualPipe"].step
    gb = _costs.states_gb(options.stages, options.expert)
    told = (
        f"{ours:.0f} ms with {gb:.1f} GB of K2's parameters and gradients a device, against {dual:.0f} ms with {2 * gb:.1f} GB"
    )
    return Claim(claim, told, _verdict(ours <= dual))


def _measured(memory: dict | None) -> Claim:
    """A step of M = P microbatches has fewer residuals than slots, so the comparison starts at 2P."""
    claim = "the compiled step's temporary memory is flat in the microbatches from M = 2P on, within 2%"
    if memory is None or "error" in memory:
        return Claim(claim, memory["error"] if memory else "not measured", "untested")
    full = [size for M, size in memory["ours"].items() if int(M) >= 2 * memory["pipeline"]]
    spread = max(full) / min(full) - 1
    told = [
        f"{label} {', '.join(f'{size / 2**20:.2f}' for size in memory[name].values())} MiB"
        for name, label in (("ours", "ours"), ("gpipe", "GPipe's order"))
    ]
    return Claim(
        claim, f"M = {', '.join(memory['ours'])}: {', '.join(told)}; ours varies by {spread:.1%}", _verdict(spread < 0.02)
    )


def _verdict(holds: bool) -> str:
    return "pass" if holds else "fail"


def draw(options: Options, found: Results) -> None:
    """timelines.png and figure.png."""
    small = {plan.name: run(plan, found.costs) for plan in _schedules.all_of(Sizes(*options.picture, options.layers))}
    captions = [
        f"{row.name}: {row.step:.0f} ms; bubble {row.idle.total('bubble') / row.step:.0%}, exchanges not hidden "
        f"{row.idle.total('exchange') / row.step:.0%} of it; residuals of {row.residuals} layers"
        for row in small.values()
    ]
    title = "Pipeline schedules: {} stages of {} layers, {} chunks, {} microbatches".format(
        options.picture[0], options.layers, *options.picture[1:]
    )
    timelines = [row.timeline for row in small.values()]
    _timelines.plot_timelines(options.out / "timelines.png", title, timelines, captions, small["ours"].timeline)

    def curve(label: str, y: Callable[[Row], float]) -> _timelines.Curve:
        return _timelines.Curve(label, list(found.by_chunks), [y(row) for row in found.by_chunks.values()])

    others = [row for row in found.rows.values() if row.name not in ("ours", "interleaved")]
    waiting = [curve("bubble", lambda row: row.idle.total("bubble") / row.step), curve("bubble and communication", _waiting)]
    kept = [curve("ours", lambda row: row.residuals)]
    panels = [
        _timelines.Panel(
            "ours, not computing", "chunks a stage, v", "share of a step", waiting, [(r.name, _waiting(r)) for r in others]
        ),
        _timelines.Panel(
            "residuals on the fullest stage",
            "chunks a stage, v",
            "layers of a microbatch",
            kept,
            [(r.name, r.residuals) for r in others if r.name != "GPipe"],
        ),
    ]
    if found.memory and "error" not in found.memory:
        lines = [
            _timelines.Curve(label, [int(M) for M in found.memory[name]], [n / 2**20 for n in found.memory[name].values()])
            for name, label in (("ours", "ours, whole step"), ("gpipe", "GPipe's order, gradients"))
        ]
        panels.append(_timelines.Panel("temporary memory, measured", "microbatches, M", "MiB a device", lines))
    title = f"{options.stages} stages of {options.layers} layers, {options.microbatches} microbatches"
    _timelines.plot_panels(options.out / "figure.png", title, panels)


def _waiting(row: Row) -> float:
    return 1 - row.work / row.step


def summarize(options: Options, found: Results, told: list[Claim], seconds: float) -> dict:
    """`summary.json`. Times in ms but `seconds`; shares are of a step, mean over the devices."""
    return {
        "command": shlex.join(["python", "-m", "experiments.pipeline_schedules", *sys.argv[1:]]),
        "versions": _record.versions(("k2jax", "jax", "numpy", "matplotlib")),
        "machine": _record.machine(),
        "seconds": round(seconds, 1),
        "sizes": options.sizes._asdict(),
        "rates": asdict(options.machine),
        "costs": found.costs._asdict() | {"cover": found.costs.cover},
        "schedules": {name: _row_as_json(row) for name, row in found.rows.items()},
        "ours_as_built": _row_as_json(found.built),
        "ours_by_chunks": {v: _row_as_json(row) for v, row in found.by_chunks.items()},
        "expert_axis": [choice._asdict() | {"hidden": hidden} for choice, hidden in found.study],
        "memory": found.memory,
        "claims": [claim._asdict() for claim in told],
    }


def _row_as_json(row: Row) -> dict:
    plain = {k: v for k, v in row._asdict().items() if k not in ("idle", "timeline")}
    shares = {phase: {c: row.idle.by_phase[phase][c] / row.step for c in CAUSES} for phase in PHASES}
    return plain | {"not_computing": shares, "hidden_in_steady_phase": row.idle.hidden if row.idle.exchanged else None}


def _print_costs(options: Options, costs: Costs, console: Console) -> None:
    P, v, M, layers = options.sizes
    console.print(
        f"{P} stages of {layers} layers in {v} chunks, {M} microbatches, experts over {options.expert} devices", highlight=False
    )
    console.print(
        f"ms a layer and microbatch: forward {costs.forward:.2f} (attention {costs.attention:.2f}), input gradients "
        f"{costs.backward:.2f}, weight gradients {costs.weights:.2f}, an exchange {costs.exchange:.2f}, a transfer "
        f"{costs.transfer:.2f}, a copy to the host {costs.copy:.2f}",
        highlight=False,
    )


def _print_tables(found: Results, console: Console) -> None:
    rows, ours = found.rows.values(), found.rows["ours"]
    console.print(
        _table(
            "a step: why devices do not compute, and what a steady phase hides of its exchanges",
            ("schedule", "step ms", *CAUSES, "hidden"),
            [
                (r.name, f"{r.step:.0f}", *_shares(r, *PHASES), f"{r.idle.hidden:.1%}" if r.idle.exchanged else "-")
                for r in rows
            ],
        )
    )
    console.print(
        _table(
            "without communication, against the formulas (ZB-H1's and DualPipe's are for F = B = W): "
            "waiting ms, most layers kept, copies of the parameters",
            ("schedule", "bubble", "formula", "residuals", "formula", "copies"),
            [
                (
                    r.name,
                    f"{r.bubble:.1f}",
                    f"{r.bubble_formula:.1f}",
                    str(r.residuals),
                    str(r.residuals_formula),
                    str(r.copies),
                )
                for r in rows
            ],
        )
    )
    phases = [(phase, *_shares(ours, phase)) for phase in PHASES]
    console.print(_table("ours by phase, shares of the step", ("phase", *CAUSES), phases))
    console.print(
        _table(
            "ours by chunks",
            ("chunks", "step ms", "bubble ms", "waiting", "residuals"),
            [
                (str(v), f"{r.step:.0f}", f"{r.bubble:.1f}", f"{_waiting(r):.1%}", str(r.residuals))
                for v, r in found.by_chunks.items()
            ],
        )
    )
    study = [
        (
            *(str(c.expert), str(c.local), f"{c.reached:.2f}", f"{c.exchange:.2f}", f"{c.cover:.2f}"),
            *(f"{c.cover / c.exchange - 1:+.0%}", f"{hidden:.0%}", f"{c.uneven:.2f}", f"{c.states_gb:.1f}"),
        )
        for c, hidden in found.study
    ]
    title = "K2's experts over EP devices: experts on each, devices a token reaches, ms of an exchange and of what covers it, "
    title += "slack for uneven loads, share hidden, load of the fullest device over the mean, parameters and gradients"
    columns = ("EP", "experts", "reached", "ms", "cover", "slack", "hidden", "fullest", "GB")
    console.print(_table(title, columns, study))


def _shares(row: Row, *phases: str) -> list[str]:
    return [f"{sum(row.idle.by_phase[phase][cause] for phase in phases) / row.step:.1%}" for cause in CAUSES]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def main(options: Options) -> int:
    """Simulates, measures, draws; returns the exit status."""
    console, start = Console(), time.monotonic()
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder; {options.out} is a file")
    options.out.mkdir(parents=True, exist_ok=True)
    _print_costs(options, costs_of(options), console)
    found = collect(options, console)
    told = claims(options, found)
    _print_tables(found, console)
    draw(options, found)
    seconds = time.monotonic() - start
    summary = summarize(options, found, told, seconds)
    write(options.out / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
    for claim in told:
        colour = {"pass": "green", "fail": "red", "untested": "yellow"}[claim.verdict]
        console.print(f"[{colour}]{claim.verdict}[/]: {claim.claim}: {claim.measured}", highlight=False)
    console.print(f"{seconds:.0f} s; wrote timelines.png, figure.png and summary.json to {options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, prog="python -m experiments.pipeline_schedules", description=__doc__)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
