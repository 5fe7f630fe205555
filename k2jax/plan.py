"""What a run needs of a cluster before it runs: `python -m k2jax.plan PRESET --nodes N [--search] [--json]`.

Memory of a device by part, ticks and bubble, bytes that travel and the time they take, the optimizer's balance, and the most
tokens a second that all this allows. Weights, gradients, moments and residuals are counted exactly, as the training step lays
them out; temporaries are estimated; `experiments.aot_k2` holds the sum against XLA's own figure for the compiled step. Times
are bytes and FLOPs over the rates of `--machine`: what can be hidden is taken as hidden, so they are bounds, not forecasts.

    python -m k2jax.plan configs.k2 --nodes 64
    python -m k2jax.plan configs.k2 --nodes 32 --mesh.offload
    python -m k2jax.plan configs.k2 --nodes 64 --search            the meshes that fit, the fastest first
"""

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console
from rich.progress import track

from k2jax import command
from k2jax.config import MeshConfig, RunConfig
from k2jax.model.weights import working_dtype
from k2jax.optim.muonclip import aligned
from k2jax.parallel import activations, expert, mesh, ownership, schedule, stage
from k2jax.parallel.layout import IDENTITY
from k2jax.scaling import flops

USABLE = 0.9  # of a device's memory; with less left XLA rematerializes and makes every exchange wait, and says nothing
EXCHANGES = 14  # arrays the size of all rows of an exchange that a steady tick holds at once, found from compiled programs
ROWS_FORWARD, ROWS_BACKWARD = 2, 2  # times a token's row crosses the expert axis: there and back; once more if not stored


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and its links; rates are those that are reached, by default assumed for an H800 and not measured.

    35% of 989 TFLOP/s and 85% of each link put the exchange of 16 devices just below what covers it.
    """

    memory: float = 80.0  # GB of a device
    devices: int = 8  # devices of a node
    tflops: float = 346.0  # of a device, bf16
    network: float = 42.5  # GB/s a device sends to other nodes: 400 Gb/s a device
    nvlink: float = 170.0  # GB/s a device sends to others in its node
    host: float = 54.0  # GB/s each way between a device and its host

    def __post_init__(self):
        for name in ("memory", "devices", "tflops", "network", "nvlink", "host"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--machine.{name} must be positive; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run on a cluster."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)  # its fields have no prefix
    nodes: int = 32  # of `machine.devices` each
    machine: Machine = field(default_factory=Machine)
    search: bool = False  # list the meshes that fit instead
    json: bool = False  # print one JSON object

    def __post_init__(self):
        if self.nodes < 1:
            raise ValueError(f"--nodes must be at least 1; got {self.nodes}")


class Memory(NamedTuple):
    """Bytes of a device, or, `on_host`, of its share of the host."""

    weights: int  # working copies
    gradients: int  # float32 accumulators
    optimizer: int  # float32 master weights and moments, if they are on the device
    activations: int  # what units in flight store for their backward pass
    temporaries: int  # exchange buffers, a layer's activations; estimated
    on_host: int

    @property
    def states(self) -> int:
        """Of weights and gradients: the report's 30 GB (2.4.2)."""
        return self.weights + self.gradients

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(self) - self.on_host


class Traffic(NamedTuple):
    """Bytes that a device sends in a step along one mesh axis or to its host, and the seconds they take."""

    sent: float
    seconds: float


class Plan(NamedTuple):
    """What a run needs."""

    sizes: MeshConfig
    devices: int
    microbatches: int
    slots: int  # layer slots a stage
    empty: int  # slots of all stages without a layer
    memory: Memory
    ticks: int
    bubble: float  # idle time over busy time of a stage: (P - 1) / (v M)
    compute: float  # seconds of forward, backward and recomputation, bubble and empty slots left out
    recomputed: float  # FLOPs of layers done again over those of their forward pass
    traffic: dict[str, Traffic]  # expert, pipeline, data; host, of the optimizer and of activations
    newton_schulz: float  # seconds of the busiest rank
    balance: float  # its FLOPs over an equal share
    step: float  # seconds, at the least
    tokens_per_second: float  # at the most
    utilization: float  # of the machine's rate, by the model's FLOPs without recomputation


class _Parts(NamedTuple):
    """How a run lies on a mesh, wherever the optimizer's state is."""

    pipe: stage.Pipeline
    owners: ownership.Plan


def _parts(run: RunConfig, sizes: MeshConfig) -> _Parts:
    return _Parts(stage.pipeline(run, sizes, mesh.microbatches(run, sizes)), ownership.plan(run, sizes))


def plan(run: RunConfig, devices: int, machine: Machine) -> Plan:
    """Plans a run on so many devices. A number or a shape that does not fit raises ValueError with those that would."""
    sizes = mesh.sizes(run, devices)
    return _plan(run, sizes, machine, _parts(run, sizes))


def _plan(run: RunConfig, sizes: MeshConfig, machine: Machine, parts: _Parts) -> Plan:
    pipe, owners = parts
    M, memory = pipe.microbatches, memory_of(run, sizes, pipe, owners)
    per_device = run.batch * run.seq_len / (sizes.expert * sizes.data)  # tokens that a stage's device sees
    found, n = flops.training_flops(run, run.seq_len), run.model.n_layers + run.model.n_mtp
    rate = machine.tflops * 1e12
    slot = (found.total - found.head) / n
    # Three passes, and what the policy recomputes. All stages take the ticks of the fullest.
    held = _held(run, sizes, pipe)
    layers = per_device * pipe.layout.slots * slot * (3 + held.recomputed) / 3 / rate
    head = per_device * found.head / sizes.pipeline / rate
    bubble = (sizes.pipeline - 1) / (sizes.chunks * M)
    traffic = traffic_of(run, sizes, machine, pipe, owners)
    newton_schulz = float(owners.load_ZR.max()) / rate
    hidden = max(layers * (1 + bubble) + head, *(traffic[name].seconds for name in ("expert", "pipeline", "host, activations")))
    step = hidden + traffic["data"].seconds + max(newton_schulz, traffic["host"].seconds)
    tokens = run.batch * run.seq_len
    return Plan(
        sizes=sizes,
        devices=mesh.count(sizes),
        microbatches=M,
        slots=pipe.layout.slots,
        empty=int((pipe.layout.kind_ZL == IDENTITY).sum()),
        memory=memory,
        ticks=schedule.ticks(sizes.pipeline, sizes.chunks, M),
        bubble=bubble,
        compute=layers * n / (pipe.layout.slots * sizes.pipeline) + head,
        recomputed=held.recomputed,
        traffic=traffic,
        newton_schulz=newton_schulz,
        balance=owners.balance,
        step=step,
        tokens_per_second=tokens / step,
        utilization=found.total * tokens / (step * mesh.count(sizes) * rate),
    )


def fits(one: Plan, machine: Machine) -> bool:
    """Whether a device holds it and leaves the compiler room."""
    return one.memory.total <= USABLE * machine.memory * 1e9


def memory_of(run: RunConfig, sizes: MeshConfig, pipe: stage.Pipeline, owners: ownership.Plan) -> Memory:
    """Bytes of a device as the training step lays them out; all stages are alike."""
    model, a, rows = run.model, run.model.attention, mesh.table(run, sizes)
    weights, gradients = sum(r.weight for r in rows), sum(r.gradient for r in rows)
    optimizer = sum(ownership.rank_bytes(owners).values())
    element = 2 if model.dtype == "bfloat16" else 4
    tokens = run.batch // (pipe.microbatches * sizes.expert * sizes.data) * run.seq_len
    stream = tokens * model.d_model * element
    held, units = _held(run, sizes, pipe), (pipe.slots + 1) * pipe.layout.layers * tokens
    exchange = sizes.expert * pipe.shape.exchange.capacity * model.d_model * element if sizes.expert > 1 else stream
    hidden = 3 * pipe.shape.keep * pipe.shape.block * model.moe.d_expert * element
    heads = 2 * tokens * (a.n_heads + a.n_kv_heads) * (a.d_nope + a.d_rope + a.d_value) * element // 2
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=0 if sizes.offload else optimizer,
        activations=round(held.device * units),
        temporaries=EXCHANGES * exchange + hidden + heads + 4 * stream + round(2 * held.host * tokens * pipe.layout.layers),
        on_host=(optimizer if sizes.offload else 0) + round(held.host * units),
    )


def traffic_of(
    run: RunConfig, sizes: MeshConfig, machine: Machine, pipe: stage.Pipeline, owners: ownership.Plan
) -> dict[str, Traffic]:
    """What a device sends in a step. Experts' peers in its node are reached over NVLink, all others over the network."""
    model, M, EP, DP, P = run.model, pipe.microbatches, sizes.expert, sizes.data, sizes.pipeline
    element = 2 if model.dtype == "bfloat16" else 4
    tokens = run.batch // (M * EP * DP) * run.seq_len
    units = M * pipe.layout.slots  # of one layer
    times = ROWS_FORWARD + ROWS_BACKWARD + (pipe.shape.actions["expert_rows"] == "recompute")
    row = tokens * expert.share(model.moe, EP) * model.d_model * element * times * units
    near = min(EP, machine.devices)
    expert_seconds = max((EP - near) * row / machine.network, (near - 1) * row / machine.nvlink) / 1e9
    stream = tokens * model.d_model * element
    ring = 2 * schedule.ticks(P, sizes.chunks, M) * stream if P > 1 else 0
    rest, experts = _elements(owners)
    # Gradients are scattered in float32 and weights gathered in their own dtype; matrices also go to their owner and back.
    there = 4 + (2 if working_dtype("gate_EDF", model.dtype) == "bfloat16" else 4)
    R = EP * DP
    data = there * ((R - 1) / R * rest + (DP - 1) / DP * experts) + 2 * 4 * (R - 1) / R * owners.width * owners.ranks
    # Master weights are read for the working copy and for the update, moments for the update; both are written back.
    owned = sum(ownership.rank_bytes(owners).values()) if sizes.offload else 0
    away = _held(run, sizes, pipe).host * tokens * units  # and read back
    return {
        "expert": Traffic((EP - 1) * row, expert_seconds),
        "pipeline": Traffic(ring, ring / machine.network / 1e9),
        "data": Traffic(data, data / machine.network / 1e9),
        "host": Traffic(2.5 * owned, 1.5 * owned / machine.host / 1e9),
        "host, activations": Traffic(2 * away, away / machine.host / 1e9),
    }


def _held(run: RunConfig, sizes: MeshConfig, pipe: stage.Pipeline) -> activations.Cost:
    """What the policy costs a token of a layer on this mesh."""
    tokens = run.batch // (pipe.microbatches * sizes.expert * sizes.data) * run.seq_len
    rows, pairs = sizes.expert * pipe.shape.exchange.capacity / tokens, pipe.shape.keep * pipe.shape.block / tokens
    return activations.cost(run.model, pipe.shape.actions, run.seq_len, rows, pairs)


def _elements(owners: ownership.Plan) -> tuple[int, int]:
    """Weights of a stage outside its experts, and those of one device's experts."""
    sizes = {path: math.prod(shape) for path, shape in owners.stage.items()}
    experts = sum(n for path, n in sizes.items() if path in owners.experts.shapes)
    return sum(sizes.values()) - experts, experts


def search(run: RunConfig, devices: int, machine: Machine) -> list[Plan]:
    """Every mesh of these devices on which the run fits into memory, optimizer on the device or else on the host; the fastest
    first. Stages and expert ranks are powers of two, chunks those with which fewer slots are empty than there are layers."""
    found, powers, layers = [], [2**i for i in range(devices.bit_length())], run.model.n_layers + run.model.n_mtp
    shapes = [
        MeshConfig(pipeline=P, expert=EP, chunks=v, buffer=run.mesh.buffer)
        for P in powers
        for EP in powers
        for v in (1, 2, 4, 8)
        if devices % (P * EP) == 0 and P * v < 2 * layers and (v == 1 or P > 1)
    ]
    for sizes in track(shapes, "meshes", console=Console(stderr=True), transient=True):
        with contextlib.suppress(ValueError):  # experts, batch or vocabulary do not divide
            found += _first_fit(replace(run, mesh=sizes), devices, machine)
    return sorted(found, key=lambda one: one.step)


def _first_fit(run: RunConfig, devices: int, machine: Machine) -> list[Plan]:
    """The plan with the optimizer's state on the device or else on the host, if one fits."""
    sizes = mesh.sizes(run, devices)
    if sum(r.weight + r.gradient for r in mesh.table(run, sizes)) > USABLE * machine.memory * 1e9:
        return []  # most meshes, and the only ones that take long to lay out
    parts = _parts(run, sizes)
    both = (_plan(run, replace(sizes, offload=offload), machine, parts) for offload in (False, True))
    return [one for one in both if fits(one, machine)][:1]


def render(one: Plan, run: RunConfig, machine: Machine) -> str:
    """A plan as text."""
    s, m, params = one.sizes, one.memory, flops.count_params(run).total
    lines = [
        f"{run.name}: {params / 1e9:,.1f}B weights, {6 * params / 1e12:.2f} TB of bf16 weights and float32 gradients",
        f"mesh pipeline {s.pipeline} x expert {s.expert} x data {s.data} = {one.devices} devices; {s.chunks} chunks and "
        f"{one.slots} layer slots a stage, {one.empty} of all empty; {one.microbatches} microbatches",
        "",
        f"memory of a device, GB (of {machine.memory:g})",
    ]
    parts = [(name, value) for name, value in m._asdict().items() if name != "on_host"]
    rows = [(f"  {name}", f"{value / 1e9:.2f}") for name, value in parts]
    rows += [("  total", f"{m.total / 1e9:.2f}"), ("  states (weights, gradients)", f"{m.states / 1e9:.2f}")]
    rows += [("  on the host", f"{m.on_host / 1e9:.2f}")] if m.on_host else []
    lines += [aligned(rows, left={0}), "", "a step, bytes sent by a device and seconds at the least"]
    rows = [(f"  {name}", f"{t.sent / 1e9:,.1f} GB", f"{t.seconds:.2f} s") for name, t in one.traffic.items() if t.sent]
    rows += [
        (f"  compute, {one.recomputed:.0%} of a forward pass done again", "", f"{one.compute:.2f} s"),
        (f"  Newton-Schulz, busiest rank {one.balance:.2f} of its share", "", f"{one.newton_schulz:.2f} s"),
        ("  step", "", f"{one.step:.2f} s"),
    ]
    lines += [aligned(rows, left={0}), ""]
    lines += [
        f"{one.ticks} ticks, bubble {one.bubble:.1%}; at most {one.tokens_per_second:,.0f} tokens/s, "
        f"{one.utilization:.0%} of {machine.tflops:g} TFLOP/s"
    ]
    return "\n".join(lines) + ("" if fits(one, machine) else f"\n\n{_excess(one, machine)}")


def _excess(one: Plan, machine: Machine) -> str:
    """Why it does not fit, and what would help."""
    over = one.memory.total / 1e9 - USABLE * machine.memory
    said = f"does not fit: {over:.1f} GB a device above {USABLE:.0%} of its memory; with less left XLA hides no exchange"
    if one.memory.optimizer / 1e9 > over:
        said += "; --mesh.offload keeps the optimizer's state on the host"
    return said


def table(plans: Sequence[Plan]) -> str:
    """Plans side by side."""
    lines = [("pipeline", "expert", "data", "chunks", "optimizer on", "GB", "empty slots", "bubble", "step", "tokens/s")]
    for one in plans:
        s = one.sizes
        where = "host" if s.offload else "device"
        numbers = f"{one.memory.total / 1e9:.1f}", str(one.empty), f"{one.bubble:.1%}", f"{one.step:.1f} s"
        lines.append(
            (str(s.pipeline), str(s.expert), str(s.data), str(s.chunks), where, *numbers, f"{one.tokens_per_second:,.0f}")
        )
    return aligned(lines, left=())


def as_dict(one: Plan) -> dict:
    """A plan as JSON-able values: bytes, seconds, counts."""
    return one._asdict() | {
        "sizes": asdict(one.sizes),
        "memory": one.memory._asdict() | {"states": one.memory.states, "total": one.memory.total},
        "traffic": {name: t._asdict() for name, t in one.traffic.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns 0 if the run fits, 1 if it does not, 2 for a wrong command."""
    try:
        asked = command.parse(Command, "python -m k2jax.plan", __doc__, sys.argv[1:] if arguments is None else arguments)
        devices = asked.nodes * asked.machine.devices
        plans = (search if asked.search else lambda *given: [plan(*given)])(asked.run, devices, asked.machine)
    except (command.UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps([as_dict(one) for one in plans] if asked.search else as_dict(plans[0])))
    elif asked.search:
        print(table(plans) if plans else "no mesh of these devices holds this run")
    else:
        print(render(plans[0], asked.run, asked.machine))
    return 0 if plans and fits(plans[0], asked.machine) else 1


if __name__ == "__main__":
    sys.exit(main())
