"""The device mesh and the one table of what is split over it. There is no tensor parallelism: no matrix is cut.

Axes: `pipeline` (layers, vocabulary), `expert` (experts, rows of the batch), `data` (rows of the batch). Master weights and
optimizer state are owned matrix by matrix by the ranks of a stage (`k2jax.parallel.zero1`).
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k2jax.axes import axes_of
from k2jax.config import MeshConfig, ModelConfig, RunConfig
from k2jax.model import transformer
from k2jax.model.weights import working_dtype
from k2jax.optim.muon import by_path
from k2jax.optim.muonclip import aligned, rules
from k2jax.parallel.layout import layout

AXES = ("pipeline", "expert", "data")
RANKS = ("expert", "data")  # of a stage: they hold the same weights, experts apart; in the order in which they are counted
BATCH = PartitionSpec(("data", "expert"))  # rows of a batch; every stage has them all

ROWS = 64  # of an expert and microbatch, from which on a device a core is faster than one device: measured at 16, 64 and 128

# Axis letter of a weight -> mesh axis. L is the stack axis, layers or slots, that names leave out; other letters stay whole.
SHARD_OF = {"L": "pipeline", "W": "pipeline", "E": "expert"}
WHOLE = {"router_DE": "E"}  # exceptions, by full name: letters that stay whole. Every rank's router scores all experts


def sizes(config: RunConfig, n_devices: int) -> MeshConfig:
    """The mesh of a run on this many devices: `config.mesh` with `data` resolved.

    Raises ValueError, with the numbers that would fit, if devices, experts, batch, microbatches, vocabulary or the dense
    layers do not fit the mesh.
    """
    mesh = config.mesh
    group = mesh.pipeline * mesh.expert
    if n_devices < group * max(mesh.data, 1):
        fits = f"data={n_devices // group} would fit" if n_devices >= group else f"any multiple of {group} would fit"
        raise ValueError(f"{_shape(mesh)} needs {group * max(mesh.data, 1)} devices; there are {n_devices}; {fits}")
    if not mesh.data and n_devices % group:
        raise ValueError(
            f"the number of devices must be a multiple of pipeline * expert = {mesh.pipeline} * {mesh.expert} = {group}; "
            f"got {n_devices}; next to it are {_multiples(n_devices, group)}"
        )
    mesh = replace(mesh, data=mesh.data or n_devices // group)
    if count(mesh) > 1:
        _check_batch(config, mesh)
        _check_model(config.model, mesh)
    return mesh


def take_cores(config: RunConfig) -> None:
    """On a CPU, asks jax for a device a rank; where `mesh.data` is left open, for one a core, as far as the batch allows.

    XLA leaves cores idle in a step of small products, and ranks do not. But every rank has all experts' weights to read, so it
    must have `ROWS` rows for each. Call it before anything asks for devices: later, and where XLA_FLAGS or jax's own setting
    tells their number, it changes nothing.
    """
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices >= 0
    if told or jax.distributed.is_initialized():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mesh, group = config.mesh, config.mesh.pipeline * config.mesh.expert
    part = (config.microbatches or mesh.pipeline) * mesh.expert  # of the batch's rows, for each replica
    fitting = [n for n in range(1, cores // group + 1) if config.batch % (part * n) == 0 and (n == 1 or _is_busy(config, n))]
    with contextlib.suppress(RuntimeError):  # jax has its devices
        jax.config.update("jax_num_cpu_devices", group * (mesh.data or max(fitting, default=1)))


def _is_busy(config: RunConfig, replicas: int) -> bool:
    if not config.model.n_moe + config.model.n_mtp:
        return True
    rows = config.batch // (config.microbatches * replicas) if config.microbatches else 1
    return rows * config.seq_len * config.model.moe.n_active >= ROWS * config.model.moe.n_experts


def count(mesh: MeshConfig) -> int:
    """Devices of a mesh whose `data` is resolved."""
    return mesh.pipeline * mesh.expert * mesh.data


def cut(mesh: MeshConfig) -> bool:
    """Whether the model is cut, over a pipeline's stages or its experts over ranks. Else every rank runs the plain loop."""
    return mesh.pipeline * mesh.expert > 1


def microbatches(config: RunConfig, mesh: MeshConfig) -> int:
    """Parts in which a device's rows pass: `config.microbatches`, or, if that is 0, as many as it has sequences."""
    return config.microbatches or config.batch // (mesh.expert * mesh.data)


def _check_batch(config: RunConfig, mesh: MeshConfig) -> None:
    P, n, ranks = mesh.pipeline, config.microbatches, mesh.expert * mesh.data
    if n and n % P:
        raise ValueError(
            f"microbatches must be a multiple of the pipeline's stages; got microbatches={n}, mesh.pipeline={P}; "
            f"next to it are {_multiples(n, P)}"
        )
    parts = n or P  # one sequence at a time: as many microbatches as sequences, and so a multiple of the stages
    if config.batch % (parts * ranks):
        name = "microbatches" if n else "pipeline"
        raise ValueError(
            f"batch must be a multiple of {name} * expert * data = {parts} * {mesh.expert} * {mesh.data} = {parts * ranks}; "
            f"got {config.batch}; next to it are {_multiples(config.batch, parts * ranks)}"
        )


def _check_model(model: ModelConfig, mesh: MeshConfig) -> None:
    m = model.moe
    if m.n_experts % mesh.expert:
        raise ValueError(
            f"the expert axis must divide n_experts={m.n_experts}; got mesh.expert={mesh.expert}; "
            f"next to it are {_divisors(mesh.expert, m.n_experts)}"
        )
    if model.n_words % mesh.pipeline:
        raise ValueError(
            f"n_words must be a multiple of the pipeline's stages, which split the vocabulary; got n_words={model.n_words}, "
            f"mesh.pipeline={mesh.pipeline}; next to it are {_multiples(model.n_words, mesh.pipeline)}"
        )
    if cut(mesh) and not model.n_moe + model.n_mtp:
        raise ValueError(
            f"a model without experts runs on replicas alone, not over a pipeline or expert ranks; got "
            f"n_layers={model.n_layers} and n_dense={model.n_dense} with {_shape(mesh)}; mesh.data may be any number"
        )
    widths = [(m.n_shared + j) * m.d_expert for j in range(m.n_active + 1)]
    if cut(mesh) and model.n_dense and model.d_dense not in widths:
        raise ValueError(
            f"over a pipeline or expert ranks a dense layer runs as the shared expert and up to n_active={m.n_active} experts, "
            f"so d_dense must be (n_shared + j) * d_expert; got d_dense={model.d_dense}; "
            f"next to it are {_nearest(model.d_dense, widths)}"
        )


def _shape(mesh: MeshConfig) -> str:
    return f"a mesh of pipeline {mesh.pipeline} x expert {mesh.expert}" + (f" x data {mesh.data}" if mesh.data else "")


def _multiples(value: int, of: int) -> str:
    return _nearest(value, (of * (value // of), of * (value // of + 1)))


def _divisors(value: int, of: int) -> str:
    return _nearest(value, (d for d in range(1, of + 1) if of % d == 0))


def _nearest(value: int, fitting: Iterable[int]) -> str:
    """The fitting numbers, 0 left out, just below and just above a value: "4 and 8"."""
    fitting = sorted(n for n in fitting if n > 0)
    return " and ".join(map(str, [n for n in fitting if n <= value][-1:] + [n for n in fitting if n > value][:1]))


def make(config: RunConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run over these devices, by default all there are; automatic axes named as in `AXES`.

    Raises ValueError like `sizes`, or if a process would have no part in the mesh.
    """
    devices = sorted(jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id))
    mesh = sizes(config, len(devices))
    used = devices[: count(mesh)]
    if idle := {d.process_index for d in devices} - {d.process_index for d in used}:
        raise ValueError(
            f"every process must have a device in the mesh; {_shape(mesh)} takes {len(used)} of {len(devices)} devices and "
            f"leaves none to process {min(idle)}; data={len(devices) // (mesh.pipeline * mesh.expert)} would use all"
        )
    # Expert ranks are neighbours, inside a node first: they exchange every layer's tokens. Replicas exchange gradients, once a
    # step, and stages one activation a tick, the least: those may be far apart.
    grid = np.array(used, object).reshape(mesh.pipeline, mesh.data, mesh.expert).swapaxes(1, 2)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(name: str, ndim: int) -> PartitionSpec:
    """How a leaf of this name is split: its letters by `SHARD_OF`; an axis before them is the stack's, L."""
    letters = axes_of(name)
    whole = WHOLE.get(name, "")
    stack = "L" * (ndim - len(letters))
    return PartitionSpec(*(None if letter in whole else SHARD_OF.get(letter) for letter in stack + letters))


def local_rows(mesh: Mesh, batch: int) -> np.ndarray:
    """The rows of a batch that this process's devices hold, in order, int [n]."""
    held = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch,))
    return np.unique(np.concatenate([np.arange(batch)[index] for index in held.values()]))


def place(mesh: Mesh, batch: dict[str, np.ndarray], rows: np.ndarray, n_rows: int) -> dict[str, jax.Array]:
    """Global arrays, [n_rows, ...], from this process's `rows` of them, split over the mesh as `BATCH` says."""

    def one(local: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            wanted = np.arange(n_rows)[index[0]]
            first = np.searchsorted(rows, wanted[0])  # a device's rows are consecutive, and so they are among ours
            return local[first : first + len(wanted)]

        return jax.make_array_from_callback((n_rows, *local.shape[1:]), NamedSharding(mesh, BATCH), piece)

    return {name: one(local) for name, local in batch.items()}


class Row(NamedTuple):
    """One leaf of the model on a device: shape as the model has it, bytes as the device has them, the mean over the stages."""

    path: str
    shape: tuple[int, ...]
    split: tuple[str, ...]  # mesh axes over which the working weight is split
    weight: int  # bytes of the working weight, in the model's dtype; norms and the router in float32
    gradient: int  # bytes of its float32 accumulator
    optimizer: int  # bytes of the float32 master and the optimizer's moments, owned over the ranks and taken as balanced


def table(config: RunConfig, mesh: MeshConfig) -> list[Row]:
    """Every leaf of a run's model on one device of a mesh whose `data` is resolved; nothing is allocated.

    All stages run one program, so a slot takes the room of a layer with experts whatever it holds, and the last row is what
    layers leave of their slots: with it the sums are those of every device. A dense layer's feed-forward lies in the expert
    places of its slot; its matrices, and MTP's own leaves, have room in the optimizer state of every stage. Where the model is
    not cut, dense layers have no places for experts, and all three lie beside the slots.
    """
    places = layout(config.model, mesh)
    rows = _leaves(config, mesh, config.model)
    without = places.slots - len(places.moe_slots)
    full = replace(config.model, n_layers=places.slots * mesh.pipeline, n_dense=without, n_mtp=0)
    slots = _sum(r for r in _leaves(config, mesh, full) if r.path.startswith(("moe/", "dense/")) and "dense/ffn/" not in r.path)
    held = _sum(r for r in rows if r.path.startswith(("dense/", "moe/", "mtp/block/")))
    dense = _sum(r for r in rows if r.path.startswith("dense/ffn/"))
    beside = (0, 0, dense[2]) if cut(mesh) else dense
    left = [of_slots - (of_layers - apart) for of_slots, of_layers, apart in zip(slots, held, beside, strict=True)]
    return [*rows, Row("empty places of slots", (), (), *left)]


@functools.lru_cache
def shapes(model: ModelConfig) -> dict:
    """Shapes of a model's weights, float32: the same tree every time, not to be changed."""
    return transformer.abstract(model)[0]


def _leaves(config: RunConfig, mesh: MeshConfig, model: ModelConfig) -> list[Row]:
    params = shapes(model)
    rule, most = by_path(rules(config.optim, params)), layout(model, mesh).dense_ZJ.shape[1]

    def row(path: tuple[str, ...], shape: tuple[int, ...]) -> Row:
        # MTP's own leaves, not those of its block, are on every stage, though only the last one uses them.
        split = tuple(axis for axis in spec(path[-1], len(shape)) if axis)
        here = math.prod(shape) // math.prod(getattr(mesh, axis) for axis in split if axis != "pipeline")
        share = here / (mesh.pipeline if "pipeline" in split else 1)
        # Experts are owned by the replicas of their expert rank, all else by all ranks of a stage.
        kept = here // model.n_dense * most if path[:2] == ("dense", "ffn") else share
        owned = kept / (mesh.data if "expert" in split else mesh.expert * mesh.data)
        working = jnp.dtype(working_dtype(path[-1], model.dtype)).itemsize
        moments = 1 if rule[path] == "muon" else 2
        sizes = round(share * working), round(share * 4), round(owned * 4 * (1 + moments))
        return Row("/".join(path), shape, split, *sizes)

    return [row(path, leaf.shape) for path, leaf in by_path(params).items()]


def _sum(rows: Iterable[Row]) -> tuple[int, int, int]:
    columns = list(zip(*((r.weight, r.gradient, r.optimizer) for r in rows), strict=True)) or [(), (), ()]
    return tuple(map(sum, columns))


def render(mesh: MeshConfig, rows: list[Row]) -> str:
    """Returns `table`'s rows as text in aligned columns, in MB (1e6 bytes) a device, with totals."""
    state = "master, state" + (" (host)" if mesh.offload else "")
    lines = [("leaf", "shape", "split over", "weight", "gradient", state)]
    for r in rows:
        lines.append((r.path, " x ".join(map(str, r.shape)), ", ".join(r.split), *map(_mb, r[3:])))
    total = _sum(rows)
    lines.append(("total", "", "", *map(_mb, total)))
    replicas = f"an expert lies on {mesh.data} of them, all else of a stage on {mesh.expert * mesh.data}"
    return "\n".join(
        [
            f"{_shape(mesh)}, {count(mesh)} devices; {replicas}; MB a device",
            aligned(lines, left=range(3)),
            f"weights and gradients {(total[0] + total[1]) / 1e9:.2f} GB, master and state {total[2] / 1e9:.2f} GB "
            f"{'on the host' if mesh.offload else 'more'}",
        ]
    )


def _mb(n: int) -> str:
    return f"{n / 1e6:,.1f}"
