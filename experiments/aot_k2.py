"""Does one trillion parameters fit? Compiles K2's training step for the cluster on a machine without a GPU (report 2.4).

The program is the one that trains: 61 layers and MTP, MuonClip, a pipeline of 16 stages of 4 chunks, experts over 16 devices,
ZeRO-1 over the rest, sequences of 4096 tokens, one at a time. XLA compiles it for H100s of 80 GB from their description and
says what each device needs; nothing is run and no weight exists.

    python -m experiments.aot_k2 --nodes 32                   optimizer state on the host, where it has no room beside the rest
    python -m experiments.aot_k2 --nodes 64 --json
    python -m experiments.aot_k2 --nodes 256 --layers 16      a shallower model on more devices; widths stay

Takes two to five minutes on two cores and under 8 GB of memory, however many the devices; needs `pip install -e '.[aot]'`.
Printed are the arguments, temporaries and total of a device in GB of 1e9 bytes, the planner's estimate (`python -m k2jax.plan`)
and the collectives of a step.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the described devices are all that is needed

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding
from rich.console import Console

from configs import k2
from k2jax import plan
from k2jax.config import ActivationConfig, RunConfig
from k2jax.optim.muonclip import aligned
from k2jax.parallel import activations, aot, hlo, mesh
from k2jax.train.step import TrainState, abstract_state, make_step


@dataclass(frozen=True, kw_only=True)
class Options:
    """The cluster and the model's depth."""

    nodes: int = 32  # of 8 devices; a multiple of 32
    layers: int = 61  # of the trunk, the first one dense; MTP comes on top
    optimizer: Literal["auto", "device", "host"] = "auto"  # where its state lies; auto: on the device if the planner finds room
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    json: bool = False  # print one JSON object instead of tables

    def __post_init__(self):
        for name in ("nodes", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; got {getattr(self, name)}")


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

    devices: int
    layers: int
    optimizer: str
    arguments_gb: float
    temp_gb: float
    host_arguments_gb: float
    host_temp_gb: float
    total_gb: float  # of the device
    planner_gb: float
    lower_s: float
    compile_s: float
    collectives: list[Collective]


def configuration(options: Options) -> tuple[RunConfig, plan.Plan]:
    """The run, and its plan; a number of nodes that does not fit raises ValueError."""
    run, machine = k2.config(), plan.Machine()
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
    devices = mesh.make(run, aot.h100(planned.devices))
    start = time.perf_counter()
    lowered = lower(run, devices)
    middle = time.perf_counter()
    away = activations.any_on_host(activations.actions(run.activations, on_mesh=True))
    program = lowered.compile(compiler_options=aot.OVERLAP | (aot.HOST if away else {}))
    end = time.perf_counter()
    found = program.memory_analysis()
    device = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return Compiled(
        devices=planned.devices,
        layers=options.layers,
        optimizer="host" if run.mesh.offload else "device",
        arguments_gb=found.argument_size_in_bytes / 1e9,
        temp_gb=found.temp_size_in_bytes / 1e9,
        host_arguments_gb=found.host_argument_size_in_bytes / 1e9,
        host_temp_gb=found.host_temp_size_in_bytes / 1e9,
        total_gb=device / 1e9,
        planner_gb=planned.memory.total / 1e9,
        lower_s=middle - start,
        compile_s=end - middle,
        collectives=collectives(hlo.parse(program.as_text()), dict(devices.shape)),
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


def show(one: Compiled) -> None:
    """Prints the tables."""
    rows = [
        ("arguments", f"{one.arguments_gb:.2f}"),
        ("temporaries", f"{one.temp_gb:.2f}"),
        ("total of a device", f"{one.total_gb:.2f}"),
        ("planner", f"{one.planner_gb:.2f}"),
        ("on the host: arguments", f"{one.host_arguments_gb:.2f}"),
        ("on the host: temporaries", f"{one.host_temp_gb:.2f}"),
    ]
    print(f"K2 with {one.layers} layers and MTP on {one.devices} H100s, optimizer state on the {one.optimizer}; GB")
    print(aligned(rows, left={0}))
    print(f"traced and lowered in {one.lower_s:.0f} s, compiled in {one.compile_s:.0f} s\n")
    rows = [("collective", "over", "a step", "GB a device", "nothing beside it", "further")]
    rows += [(c.kind, c.axes, str(c.count), f"{c.gigabytes:,.2f}", str(c.synchronous), str(c.further)) for c in one.collectives]
    print(aligned(rows, left={0, 1}))


def main(options: Options) -> int:
    """Compiles, prints; returns 0 if the step fits, 1 if it does not."""
    waiting = contextlib.nullcontext() if options.json else Console(stderr=True).status("compiling, two to five minutes")
    with waiting:
        one = compile_step(options)
    if options.json:
        print(json.dumps(one._asdict() | {"collectives": [c._asdict() for c in one.collectives]}))
    else:
        show(one)
    return 0 if one.total_gb <= plan.USABLE * plan.Machine().memory else 1


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, prog="python -m experiments.aot_k2", description=__doc__)))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
