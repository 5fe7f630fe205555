"""Does one trillion parameters fit? Compiles K2's training step for the cluster on a machine without a GPU (report 2.4).

The program is the one that trains: 61 layers and MTP, MuonClip, a pipeline of 16 stages of 4 chunks, experts over 16 devices,
ZeRO-1 over the rest, sequences of 4096 tokens, one at a time. XLA compiles it for H100s of 80 GB from their description and
says what each device needs; nothing is run and no weight exists.

    python -m experiments.aot_k2 --nodes 32                   optimizer state on the host, where it has no room beside the rest
    python -m experiments.aot_k2 --nodes 64 --json
    python -m experiments.aot_k2 --nodes 256 --layers 16      a shallower model on more devices; widths stay
    python -m experiments.aot_k2 --nodes 64 --target v5p      for TPU v5p
    python -m experiments.aot_k2 --nodes 64 --optimizer device --table FILE
                                                              every policy of docs/memory.md, a JSON line each

Takes two to five minutes on two cores and under 8 GB of memory, however many the devices; needs `pip install -e '.[aot]'`. For
TPU v5p it takes about twenty minutes and needs `.[tpu]`. Printed are the arguments, temporaries and total of a device in GB
of 1e9 bytes, the planner's estimate (`python -m k2jax.plan`), the copies between device and host in a tick, and the collectives
of a step. Of a TPU's program only the memory is printed: it does not say how often its loops run.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the described devices are all that is needed

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.progress import track

from configs import k2
from k2jax import plan
from k2jax.config import ActivationConfig, RunConfig
from k2jax.optim.muonclip import aligned
from k2jax.parallel import activations, aot, hlo, mesh
from k2jax.train.step import TrainState, abstract_state, make_step


@dataclass(frozen=True, kw_only=True)
class Options:
    """The cluster, its devices and the model's depth."""

    target: Literal["h100", "v5p"] = "h100"  # what to compile for
    nodes: int = 32  # of 8 devices; a multiple of 32
    layers: int = 61  # of the trunk, the first one dense; MTP comes on top
    optimizer: Literal["auto", "device", "host"] = "auto"  # where its state lies; auto: on the device if the planner finds room
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    table: Path | None = None  # compile under each of `POLICIES` instead; a policy that the file holds is not compiled again
    json: bool = False  # print one JSON object instead of tables

    def __post_init__(self):
        for name in ("nodes", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; got {getattr(self, name)}")


class Target(NamedTuple):
    """What is compiled for."""

    name: str  # of several
    memory: float  # GB of a device, from its data sheet
    devices: Callable[[int], list[jax.Device]]


TARGETS = {"h100": Target("H100s", 80.0, aot.h100), "v5p": Target("TPU v5p chips", 95.0, aot.v5p)}

ON_HOST = "S(5)"  # in the layout of an array that lies there
# Operations that copy nothing.
PASSES_ON = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")


class Collective(NamedTuple):
    """Collectives of one kind over the same axes."""

    kind: str
    axes: str
    count: int  # in a step, by loops of known length alone
    gigabytes: float  # that a device puts into those
    synchronous: int  # of those, the ones that nothing runs beside
    further: int  # in loops of unknown length, one trip each: the vocabulary's turns, an exchange's second round


class Compiled(NamedTuple):
    """What the compiler says of a step; gigabytes of a device, or of its share of the host."""

    target: str
    devices: int
    layers: int
    optimizer: str
    arguments_gb: float
    temp_gb: float
    host_arguments_gb: float
    host_temp_gb: float
    total_gb: float  # of the device
    peak_gb: float  # most of it in use at a time, by XLA's own account
    planner_gb: float
    lower_s: float
    compile_s: float
    host_copies: int  # that a steady tick makes between device and host
    host_copies_alone: int  # of those, the ones that nothing runs beside
    collectives: list[Collective]


def _machine(options: Options) -> plan.Machine:
    return plan.Machine(memory=TARGETS[options.target].memory)


def configuration(options: Options) -> tuple[RunConfig, plan.Plan]:
    """The run, and its plan; a number of nodes that does not fit raises ValueError."""
    run, machine = k2.config(), _machine(options)
    model = replace(run.model, n_layers=options.layers, n_mtp=1)
    run = replace(run, model=model, activations=options.activations)
    devices = options.nodes * machine.devices
    places = {"auto": (False, True), "device": (False,), "host": (True,)}[options.optimizer]
    for offload in places:
        run = replace(run, mesh=replace(run.mesh, offload=offload))
        planned = plan.plan(run, devices, machine)
        if plan.fits(planned, machine):
            break
    return run, planned


def lower(run: RunConfig, devices: Mesh) -> jax.stages.Lowered:
    """The training step, traced and lowered for described devices."""
    rows = jax.ShapeDtypeStruct((run.batch, run.seq_len + 1), jnp.int32, sharding=NamedSharding(devices, mesh.BATCH))
    batch = {name: rows for name in ("tokens_BT", "segments_BT", "positions_BT")}
    return make_step(run, devices).lower(_state(run, devices), batch, jnp.float32(run.tokens))


def _state(run: RunConfig, devices: Mesh) -> TrainState:
    """The state's shapes and places. A described device lists no memories, so jax forgets the host there: an abstract mesh
    keeps it."""
    state = abstract_state(run, devices)
    if not run.mesh.offload:
        return state

    def on_host(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kind = "pinned_host" if x.ndim else None
        sharding = NamedSharding(devices.abstract_mesh, x.sharding.spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return state._replace(params=jax.tree.map(on_host, state.params), opt_state=jax.tree.map(on_host, state.opt_state))


def compile_step(options: Options) -> Compiled:
    """Compiles the step and reads what it needs."""
    run, planned = configuration(options)
    devices = mesh.make(run, TARGETS[options.target].devices(planned.devices))
    start = time.perf_counter()
    lowered = lower(run, devices)
    middle = time.perf_counter()
    on_gpu = options.target == "h100"
    away = activations.any_on_host(activations.actions(run.activations, cut=True))
    # What does not fit is compiled as if it did: the figure is what it needs, not what XLA computes again to need less.
    unlimited = aot.HOST if away or not plan.fits(planned, _machine(options)) else {}
    program = lowered.compile(compiler_options=aot.OVERLAP | unlimited if on_gpu else {})
    end = time.perf_counter()
    found = program.memory_analysis()
    scheduled = hlo.parse(program.as_text()) if on_gpu else None
    copies = host_copies(scheduled) if scheduled and away else []
    device = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return Compiled(
        target=options.target,
        devices=planned.devices,
        layers=options.layers,
        optimizer="host" if run.mesh.offload else "device",
        arguments_gb=found.argument_size_in_bytes / 1e9,
        temp_gb=found.temp_size_in_bytes / 1e9,
        host_arguments_gb=found.host_argument_size_in_bytes / 1e9,
        host_temp_gb=found.host_temp_size_in_bytes / 1e9,
        total_gb=device / 1e9,
        peak_gb=found.peak_memory_in_bytes / 1e9,
        planner_gb=planned.memory.total / 1e9,
        lower_s=middle - start,
        compile_s=end - middle,
        host_copies=len(copies),
        host_copies_alone=copies.count(False),
        collectives=collectives(scheduled, dict(devices.shape)) if scheduled else [],
    )


def collectives(program: hlo.Program, sizes: dict[str, int]) -> list[Collective]:
    """The collectives of a step by kind and axes."""
    found: dict[tuple[str, str], list] = {}
    for exchange, times, sure in program.exchanges_run(program.entry):
        entry = found.setdefault((exchange.kind, " x ".join(exchange.axes(sizes))), [0, 0.0, 0, 0])
        entry[0] += times * sure
        entry[1] += times * sure * exchange.bytes / 1e9
        entry[2] += times * sure * exchange.is_sync
        entry[3] += times * (not sure)
    return sorted((Collective(*key, *entry) for key, entry in found.items()), key=lambda one: -one.gigabytes)


# The rows of docs/memory.md: what is not the policy's own is named.
POLICIES = (
    "full",
    "full input=fp8",
    "full input=offload",
    "full latents=keep",
    "full heads=keep",
    "full attention=keep",
    "full attention=fp8",
    "full stream=keep",
    "full gates=keep",
    "full gates=fp8",
    "full expert_gates=keep",
    "full expert_gates=fp8",
    "full expert_gates=fp8+offload",
    "full expert_rows=keep",
    "full expert_rows=fp8",
    "full norms=keep",
    "full attention=keep stream=keep",
    "full attention=offload stream=offload latents=offload",
    "k2",
    "k2 expert_gates=recompute",
    "k2 expert_rows=recompute",
    "k2 input=keep latents=keep attention=keep stream=keep gates=fp8 expert_rows=fp8 expert_gates=fp8",
    "none",
)


def table(options: Options) -> list[dict]:
    """The lines of the file `options.table` once it holds every policy: the policy and what `compile_step` says.

    Raises ValueError if the file holds another target's, cluster's or model's lines.
    """
    path = options.table
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    asked = {"target": options.target, "devices": options.nodes * _machine(options).devices, "layers": options.layers}
    for other in lines:
        if found := {name: other[name] for name in asked if other[name] != asked[name]}:
            raise ValueError(f"{path} holds lines of {found}; a table of {asked} needs a file of its own")
    there = {line["policy"] for line in lines}
    for policy in track([p for p in POLICIES if p not in there], "policies", console=Console(stderr=True), transient=True):
        name, *actions = policy.split()
        chosen = ActivationConfig(policy=name, **dict(action.split("=") for action in actions))
        one = compile_step(replace(options, activations=chosen))._asdict()
        lines.append({"policy": policy} | {key: value for key, value in one.items() if key != "collectives"})
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    return lines


def show_table(lines: list[dict]) -> None:
    """Prints what the compiler and the planner say, policy by policy."""
    rows = [("policy, GB a device", "temporaries", "total", "planner", "host, temporaries", "compiled in")]
    keys = ("temp_gb", "total_gb", "planner_gb", "host_temp_gb")
    rows += [(line["policy"], *(f"{line[key]:.2f}" for key in keys), f"{line['compile_s']:.0f} s") for line in lines]
    print(aligned(rows, left={0}))


def host_copies(program: hlo.Program) -> list[bool]:
    """Of every copy between device and host in a tick with a unit each way: whether a matrix product runs beside it."""
    ticks = [i for i in program.loops() if any(e.kind == "collective-permute" for e in program.exchanges(i.calls[0]))]
    steady = max(ticks, key=lambda loop: loop.trips)  # before those units go forward alone, after them backward alone
    covered = []
    for i in program.walk(steady.calls[0]):
        lines = program.computations[i.computation]
        moved = [i.shape, *(j.shape for j in lines if j.name in i.operands)]
        if i.opcode.endswith("-done") or i.opcode in PASSES_ON or not any(ON_HOST in shape for shape in moved):
            continue
        end = next((j.index for j in lines if j.opcode.endswith("-done") and j.operands[0] == i.name), i.index)
        covered.append(any(map(program.is_compute, lines[i.index + 1 : end])))
    return covered


def show(one: Compiled) -> None:
    """Prints the tables."""
    rows = [
        ("arguments", f"{one.arguments_gb:.2f}"),
        ("temporaries", f"{one.temp_gb:.2f}"),
        ("total of a device", f"{one.total_gb:.2f}"),
        ("its peak, by XLA", f"{one.peak_gb:.2f}"),
        ("planner", f"{one.planner_gb:.2f}"),
        ("on the host: arguments", f"{one.host_arguments_gb:.2f}"),
        ("on the host: temporaries", f"{one.host_temp_gb:.2f}"),
    ]
    name = TARGETS[one.target].name
    print(f"K2 with {one.layers} layers and MTP on {one.devices} {name}, optimizer state on the {one.optimizer}; GB")
    print(aligned(rows, left={0}))
    print(f"traced and lowered in {one.lower_s:.0f} s, compiled in {one.compile_s:.0f} s")
    if one.host_copies:
        print(f"copies between device and host in a tick: {one.host_copies}, nothing beside {one.host_copies_alone} of them")
    if not one.collectives:
        return
    rows = [("collective", "over", "a step", "GB a device", "nothing beside it", "further")]
    rows += [(c.kind, c.axes, str(c.count), f"{c.gigabytes:,.2f}", str(c.synchronous), str(c.further)) for c in one.collectives]
    print("\n" + aligned(rows, left={0, 1}))


def main(options: Options) -> int:
    """Compiles, prints; returns 0 if the step fits, 1 if it does not."""
    if options.table:
        lines = table(options)
        print(json.dumps(lines)) if options.json else show_table(lines)
        return 0
    minutes = {"h100": "two to five", "v5p": "about twenty"}[options.target]
    waiting = contextlib.nullcontext() if options.json else Console(stderr=True).status(f"compiling, {minutes} minutes")
    with waiting:
        one = compile_step(options)
    if options.json:
        print(json.dumps(one._asdict() | {"collectives": [c._asdict() for c in one.collectives]}))
    else:
        show(one)
    return 0 if one.total_gb <= plan.USABLE * _machine(options).memory else 1


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, prog="python -m experiments.aot_k2", description=__doc__)))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
