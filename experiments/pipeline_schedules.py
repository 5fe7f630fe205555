"""Pipeline schedules side by side: what interleaved 1F1B hides, and what it costs in bubble and memory (report 2.4.2, figure 7).

The claims: with one more warm-up forward, interleaved 1F1B pairs a forward and a backward of different microbatches in its steady
phase, and each hides the other's expert exchanges; its bubble falls with the chunks v a stage as 1 / v; what it keeps does not grow
with the microbatches; DualPipe would need a second copy of parameters and gradients.

    python -m experiments.pipeline_schedules                             K2's pipeline; 1 minute, 3 with the measurement
    python -m experiments.pipeline_schedules --no-measure                simulation alone
    python -m experiments.pipeline_schedules --stages 8 --chunks 2 --microbatches 32 --exchange 6

Simulated are GPipe, 1F1B, ZB-H1, DualPipe, interleaved 1F1B (Megatron-LM) and ours, the lock-step program of `k2jax.parallel`, from
the costs of a layer, which come from the FLOPs and bytes of a K2 layer at stated rates unless given; all are held against their
published formulas. Measured is the temporary memory of our compiled training step against the number of microbatches, on eight fake
devices, beside that of a GPipe-ordered one. The folder --out gets timelines.png (who does what when), figure.png (bubble and memory
against chunks and microbatches) and summary.json.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import _costs, _pipeline_memory, _schedules, _timelines
from experiments._costs import Machine
from experiments._schedules import Schedule, Sizes
from experiments._simulator import Costs, Idle, Timeline, idle, peak_residuals, simulate
from k2jax.parallel import schedule
from k2jax.train.folder import write


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. Costs are in ms for a microbatch and a layer; those not given are K2's."""

    stages: int = 16  # P
    chunks: int = 4  # v, of a stage; must divide layers
    microbatches: int = 64  # M, a multiple of the stages
    layers: int = 4  # of a stage; K2's 61 fill 64 places of 16 stages
    forward: float | None = None
    backward: float | None = None  # input gradients
    weights: float | None = None  # weight gradients
    exchange: float | None = None  # one of the four expert exchanges of a layer
    transfer: float | None = None  # of a microbatch to the next stage, whatever the layers
    copy: float | None = None  # of what a layer keeps to the host, and as long back; 0 keeps it on the device
    recompute: bool = False  # keep a layer's input alone, as k2jax.parallel does: forward and dispatch are repeated
    expert: int = 16  # devices that share a layer's experts
    machine: Machine = field(default_factory=Machine)
    picture: tuple[int, int, int] = (4, 2, 8)  # stages, chunks and microbatches of the timelines: more can hardly be read
    measure: bool = True  # compile the training step for several numbers of microbatches
    out: Path = Path("runs/pipeline_schedules")

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


class Row(NamedTuple):
    """A schedule's step. Times in ms, residuals in layers of one microbatch on the fullest device."""

    name: str
    step: float
    work: float  # that each device computes
    idle: Idle
    bubble: float  # simulated without communication
    bubble_formula: float
    residuals: int
    residuals_formula: int
    copies: int
    timeline: Timeline

    @property
    def bubble_error(self) -> float:
        """Difference of simulation and formula, over a step without communication."""
        return abs(self.bubble - self.bubble_formula) / (self.work + self.bubble)


def run(plan: Schedule, costs: Costs) -> Row:
    """Simulates a schedule with and without communication."""
    silent, real = simulate(plan, costs.silent()), simulate(plan, costs)
    stage = plan.layers * len(plan.device_of) // (len(plan.items) * plan.copies)
    formula = plan.bubble(stage * costs.forward, stage * costs.backward, stage * costs.weights)
    kept = max(peak_residuals(real))
    bubble = silent.makespan - silent.work
    idle_of = idle(real)
    return Row(plan.name, real.makespan, real.work, idle_of, bubble, formula, kept, plan.residuals, plan.copies, real)


class Claim(NamedTuple):
    claim: str
    measured: str
    verdict: str  # pass, fail, untested


def claims(options: Options, rows: dict[str, Row], costs: Costs, by_chunks: dict[int, Row], memory: dict | None) -> list[Claim]:
    """What the report says of the schedule, and what came out."""
    ours, plain = rows["ours"], rows["interleaved"]
    worst = max(rows.values(), key=lambda row: row.bubble_error)
    P, v, M = options.sizes[:3]
    found = [
        Claim(
            "every schedule's bubble is the published one, within 1% of a step",
            f"largest difference {worst.bubble_error:.2%}, of {worst.name}",
            _verdict(worst.bubble_error < 0.01),
        ),
        Claim(
            "one more warm-up forward hides the expert exchanges of the steady phase",
            f"{ours.idle.hidden:.1%} hidden, {plain.idle.hidden:.1%} without it; an exchange takes {costs.exchange:.2f} ms, "
            f"up to {costs.cover:.2f} ms are hidden; step {1 - ours.step / plain.step:.0%} shorter",
            _verdict(ours.idle.hidden > 0.99),
        ),
        Claim(
            "chunks shorten the bubble as 1 / v",
            ", ".join(f"v = {n}: {row.bubble:.0f} ms" for n, row in by_chunks.items()),
            _verdict(all(abs(row.bubble * n / by_chunks[1].bubble - 1) < 1e-6 for n, row in by_chunks.items() if P > 1)),
        ),
        Claim(
            "what a stage keeps does not grow with the microbatches",
            f"{schedule.n_slots(P, v, M)} slots at M = {M}, {schedule.n_slots(P, v, 2 * M)} at {2 * M}; at most v P + P = {v * P + P}",
            _verdict(schedule.n_slots(P, v, 2 * M) <= schedule.n_slots(P, v, 2 * P) <= v * P + P),
        ),
    ]
    dual = rows.get("DualPipe")
    name = "interleaved 1F1B is as fast as DualPipe, without its second copy of parameters and gradients"
    if dual:
        gb = _costs.states_gb(P, options.expert)
        told = f"{ours.step:.0f} ms with {gb:.1f} GB of K2's states a device, DualPipe {dual.step:.0f} ms with {2 * gb:.1f} GB"
        found.append(Claim(name, told, _verdict(ours.step <= dual.step)))
    else:
        found.append(Claim(name, "DualPipe needs even stages and microbatches, of these at least two a stage", "untested"))
    name = "the compiled step's temporary memory does not grow with the microbatches, within 2%"
    if memory is None or "error" in memory:
        return [*found, Claim(name, memory["error"] if memory else "not measured", "untested")]
    spread = max(memory["ours"].values()) / min(memory["ours"].values()) - 1
    return [*found, Claim(name, f"{_memory_text(memory)}; ours grows by {spread:.2%}", _verdict(spread < 0.02))]


def _verdict(holds: bool) -> str:
    return "pass" if holds else "fail"


def _memory_text(memory: dict) -> str:
    lines = []
    for name, label in (("ours", "ours"), ("gpipe", "GPipe order")):
        sizes = memory[name]
        lines.append(f"{label} {', '.join(f'{n / 2**20:.2f}' for n in sizes.values())} MiB")
    return f"M = {', '.join(memory['ours'])}: {'; '.join(lines)}"


def main(options: Options) -> int:
    """Simulates, measures, draws; returns the exit status."""
    console = Console()
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder; {options.out} is a file")
    options.out.mkdir(parents=True, exist_ok=True)
    costs, start = costs_of(options), time.monotonic()
    _print_costs(options, costs, console)
    plans = _schedules.all_of(options.sizes)
    chunks = [v for v in range(1, options.layers + 1) if options.layers % v == 0]
    study = _costs.expert_sizes(options.machine, options.stages, options.recompute)
    jobs = len(plans) + len(chunks) + len(study) + options.measure
    columns = TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=jobs)

        def at(name: str):
            progress.update(bar, description=name)

        rows = {}
        for plan in plans:
            at(plan.name)
            rows[plan.name] = run(plan, costs)
            progress.advance(bar)
        by_chunks = {}
        for v in chunks:
            at(f"ours, {v} chunks")
            by_chunks[v] = run(_schedules.lock_step(*options.sizes._replace(v=v)), costs)
            progress.advance(bar)
        hidden = {}
        for choice in study:
            at(f"experts over {choice.expert} devices")
            plan = _schedules.lock_step(*options.sizes)
            hidden[choice.expert] = idle(simulate(plan, costs._replace(exchange=choice.exchange))).hidden
            progress.advance(bar)
        memory = None
        if options.measure:
            at("compiled step's memory")
            memory = _pipeline_memory.measure()
            progress.advance(bar)
    found = claims(options, rows, costs, by_chunks, memory)
    draw(options, costs, rows, by_chunks, memory)
    _print_tables(options, rows, by_chunks, study, hidden, console)
    clock = time.monotonic() - start
    summary = summarize(options, costs, rows, by_chunks, study, hidden, memory, found, clock)
    write(options.out / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
    for claim in found:
        colour = {"pass": "green", "fail": "red", "untested": "yellow"}[claim.verdict]
        console.print(f"[{colour}]{claim.verdict}[/]  {claim.claim}: {claim.measured}", highlight=False)
    console.print(f"{clock:.0f} s; wrote timelines.png, figure.png and summary.json to {options.out}", highlight=False)
    return 0


def draw(options: Options, costs: Costs, rows: dict[str, Row], by_chunks: dict[int, Row], memory: dict | None) -> None:
    """timelines.png and figure.png."""
    small = {plan.name: run(plan, costs) for plan in _schedules.all_of(Sizes(*options.picture, options.layers))}
    P, v, M = options.picture
    captions = [
        f"{row.name}: {row.step:.0f} ms, of which bubble {row.idle.total('bubble') / row.step:.0%}, "
        f"exchanges not hidden {row.idle.total('exchange') / row.step:.0%}; residuals of {row.residuals} layers"
        for row in small.values()
    ]
    shape = f"{P} stages of {options.layers} layers, {v} chunks, {M} microbatches"
    timelines = [row.timeline for row in small.values()]
    title = f"Pipeline schedules: {shape}"
    _timelines.plot_timelines(options.out / "timelines.png", title, timelines, captions, small["ours"].timeline)

    others = [row for row in rows.values() if row.name not in ("ours", "interleaved")]
    curves = lambda y, name: [_timelines.Curve(name, list(by_chunks), [y(row) for row in by_chunks.values()], "o-")]
    panels = [
        _timelines.Panel(
            "time not computing",
            "chunks a stage, v",
            "share of a step",
            curves(lambda r: r.idle.total("bubble") / r.step, "ours, bubble")
            + curves(lambda r: 1 - r.work / r.step, "ours, bubble and communication"),
            [(row.name, 1 - row.work / row.step) for row in others],
        ),
        _timelines.Panel(
            "residuals on the fullest stage",
            "chunks a stage, v",
            "layers of one microbatch",
            curves(lambda r: r.residuals, "ours"),
            [(row.name, row.residuals) for row in others if row.name != "GPipe"],
        ),
    ]
    if memory and "error" not in memory:
        lines = [
            _timelines.Curve(label, [int(m) for m in memory[name]], [n / 2**20 for n in memory[name].values()], "o-")
            for name, label in (("ours", "ours"), ("gpipe", "GPipe order"))
        ]
        panels.append(_timelines.Panel("temporary memory, measured", "microbatches, M", "MiB a device", lines))
    P, v, M = options.sizes[:3]
    _timelines.plot_panels(options.out / "figure.png", f"{P} stages of {options.layers} layers, {M} microbatches", panels)
