"""The owned state of a mesh and the natural one, the trees of one device: what checkpoints hold, whatever the mesh.

A natural array lies on the mesh so that a device holds little of it: experts over `expert`, and one more axis that the stages
divide over `pipeline`, since a stack's layers need not divide. One all_to_all a leaf trades a stage's slots for its part of
that axis, or back. All of it copies bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from k2jax.axes import axes_of
from k2jax.optim.muon import Path, by_path, nested
from k2jax.parallel import zero1
from k2jax.parallel.layout import STACKS, Layout, in_order
from k2jax.parallel.mesh import AXES
from k2jax.parallel.ownership import REPLICATED, Plan

VOCABULARY = ("embed_WD", "head_WD")  # a stage has its rows


class _Home(NamedTuple):
    """Where the layers of a natural leaf lie: entries of a leaf of the stage tree."""

    path: Path
    stacked: bool  # whether the leaf of the stage tree has an axis of entries
    stage_L: np.ndarray
    entry_L: np.ndarray


class _Piece(NamedTuple):
    """What one program converts: a leaf of experts, or all others, of the weights or of a moment."""

    tree: str  # "params" or a moment
    sections: tuple[str, ...]
    paths: tuple[Path, ...]  # natural leaves


def to_natural(plan: Plan, mesh: Mesh) -> Callable[[dict, dict], tuple[dict, optax.OptState]]:
    """Returns `(owned params, owned opt_state) -> (params, opt_state)`.

    It runs a jitted program after another, so that beside the two states a single leaf of experts takes room.
    """

    def convert(params: dict, opt_state: dict) -> tuple[dict, optax.OptState]:
        trees, values = {"params": params} | opt_state, {}
        for piece in _pieces(plan):
            owned = {section: trees[piece.tree][section] for section in piece.sections}
            if "experts" in owned:
                name = piece.paths[0][-1]
                owned = {"experts": {name: owned["experts"][name]}}
            natural, values["count"] = _program_to(plan, mesh, piece.paths)(owned, opt_state["count"])
            values.setdefault(piece.tree, {}).update(by_path(natural))
        return _fill(plan, values)

    return convert


def from_natural(plan: Plan, mesh: Mesh) -> Callable[[dict, optax.OptState], tuple[dict, dict]]:
    """Returns the inverse of `to_natural`."""

    def convert(params: dict, opt_state: optax.OptState) -> tuple[dict, dict]:
        trees = _owned(plan, mesh, _read(params, opt_state))
        return trees.pop("params"), trees

    return convert


def from_first(plan: Plan, mesh: Mesh) -> Callable[[dict], tuple[dict, dict]]:
    """Returns `params -> (owned params, owned opt_state)` before the first step: the optimizer's state is zero."""

    def convert(params: dict) -> tuple[dict, dict]:
        opt_state = jax.tree.map(_zeros, zero1.abstract_owned(plan)[1], zero1.shardings(plan, mesh)[1])
        return _owned(plan, mesh, {"params": by_path(params), "count": opt_state["count"]})["params"], opt_state

    return convert


def _owned(plan: Plan, mesh: Mesh, values: dict[str, Any]) -> dict[str, Any]:
    """The owned trees of those among {"params" or moment: {path: value}}, and the count."""
    trees: dict[str, Any] = {}
    for piece in _pieces(plan):
        if piece.tree in values:
            natural = nested({path: values[piece.tree][path] for path in piece.paths})
            owned, trees["count"] = _program_from(plan, mesh, piece.sections, piece.paths)(natural, values["count"])
            tree = trees.setdefault(piece.tree, {})
            for section, x in owned.items():
                tree[section] = tree.get(section, {}) | x if section == "experts" else x
    return trees


def _zeros(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Array:
    """An array of which every process makes its own part alone."""
    part = sharding.shard_shape(x.shape)
    return jax.make_array_from_callback(x.shape, sharding, lambda _: np.zeros(part, x.dtype))


def _pieces(plan: Plan) -> list[_Piece]:
    found = []
    for tree, sections in plan.sections.items():
        others = tuple(section for section in sections if section != "experts")
        paths: dict[str, list[Path]] = {}
        for path in _read(*plan.natural)[tree]:
            paths.setdefault(path[-1] if axes_of(path[-1]).startswith("E") else "others", []).append(path)
        found += [_Piece(tree, others if name == "others" else ("experts",), tuple(each)) for name, each in paths.items()]
    return found


@functools.lru_cache  # weights and moments of one shape share a program, and so do all checkpoints
def _program_to(plan: Plan, mesh: Mesh, paths: tuple[Path, ...]) -> Callable[[dict, Array], tuple[dict, Array]]:
    def convert(owned: dict, count: Array) -> tuple[dict, Array]:
        return of_stage(plan, zero1.working(plan, zero1.local(owned), "float32")), count

    return _mapped(convert, mesh, PartitionSpec(*AXES), _specs(plan, paths))


@functools.lru_cache
def _program_from(
    plan: Plan, mesh: Mesh, sections: tuple[str, ...], paths: tuple[Path, ...]
) -> Callable[[dict, Array], tuple[dict, Array]]:
    def convert(natural: dict, count: Array) -> tuple[dict, Array]:
        return zero1.whole(zero1.own(plan, to_stage(plan, natural), sections)), count

    return _mapped(convert, mesh, _specs(plan, paths), PartitionSpec(*AXES))


def natural_sharding(plan: Plan, mesh: Mesh) -> tuple[dict, optax.OptState]:
    """How `to_natural`'s arrays lie on the mesh; a checkpoint is restored to these shardings."""
    specs = {path: _spec(plan, path, x.shape) for path, x in by_path(plan.natural[0]).items()}
    whole = _fill(plan, {name: specs for name in plan.sections} | {"count": PartitionSpec()})
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), whole)


def _specs(plan: Plan, paths: tuple[Path, ...]) -> dict:
    shapes = by_path(plan.natural[0])
    return nested({path: _spec(plan, path, shapes[path].shape) for path in paths})


def _mapped(f: Callable, mesh: Mesh, in_spec: Any, out_spec: Any) -> Callable:
    """The jitted program of `f`, which passes the count of steps through, so that it comes to lie on the mesh too."""
    everywhere = PartitionSpec()
    in_specs, out_specs = (in_spec, everywhere), (out_spec, everywhere)
    # Copies, which LLVM makes no faster: on a CPU compiled in half the time.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, compiler_options=options)


# --- the optimizer state's tree


def _fill(plan: Plan, values: dict[str, Any]) -> tuple[dict, optax.OptState]:
    """The natural trees with values from {"params" or moment: {path: value}, "count": value}."""

    def value(path: tuple, _: Any) -> Any:
        name, keys = _field(path)
        return values[name][keys] if keys else values[name]

    params = jax.tree.map_with_path(lambda path, _: values["params"][_field(path)[1]], plan.natural[0])
    return params, jax.tree.map_with_path(value, plan.natural[1])


def _read(params: dict, opt_state: optax.OptState) -> dict[str, Any]:
    """The inverse of `_fill`."""
    values: dict[str, Any] = {"params": by_path(params)}
    for path, value in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        name, keys = _field(path)
        if keys:
            values.setdefault(name, {})[keys] = value
        else:
            values[name] = value
    return values


def _field(path: tuple) -> tuple[str, Path]:
    """The moment, and within it the path, of a leaf of an optax state: the last named field and the keys after it."""
    last = max((i for i, key in enumerate(path) if hasattr(key, "name")), default=-1)
    return path[last].name if last >= 0 else "params", tuple(key.key for key in path[last + 1 :])


# --- between stages and stacks of layers


def _home(places: Layout, path: Path) -> _Home:
    last = places.stages - 1
    if path[0] == "dense" and path[1] == "ffn":
        return _Home(("dense", path[2]), True, *in_order(places.dense_ZJ, places.dense_ZJ >= 0))
    if path[0] in ("dense", "moe") or path[:2] == ("mtp", "block"):
        stack = path[2 if path[0] == "mtp" else 1 :]
        stage_L, slot_L = places.places(STACKS[path[0]])
        entry_L = np.searchsorted(places.moe_slots, slot_L) if stack[0] == "ffn" else slot_L
        return _Home(("slots", *stack), True, stage_L, entry_L)
    return _Home(path, False, np.array([last if path[0] == "mtp" else 0]), np.array([0]))


def _traded(plan: Plan, path: Path, shape: tuple[int, ...]) -> int | None:
    """The axis of one layer's array that is split over `pipeline`: the first, not of experts, that the stages divide."""
    for i, size in enumerate(shape):
        if size % plan.sizes.pipeline == 0 and not (i == 0 and axes_of(path[-1]).startswith("E")):
            return i
    return None


def _spec(plan: Plan, path: Path, shape: tuple[int, ...]) -> PartitionSpec:
    if path[-1] in VOCABULARY:
        return PartitionSpec("pipeline")
    lead = int(_home(plan.layout, path).stacked)
    axes: list[str | None] = [None] * len(shape)
    if axes_of(path[-1]).startswith("E"):
        axes[lead] = "expert"
    traded = _traded(plan, path, shape[lead:])
    if traded is not None:
        axes[lead + traded] = "pipeline"
    return PartitionSpec(*axes)


def of_stage(plan: Plan, tree: dict) -> dict:
    """The natural tree, or this device's part of it, of as much as a stage tree holds; inside shard_map."""
    arrays = by_path(tree)
    rows: dict[Path, Array] = {}
    found = {}
    for path in by_path(plan.natural[0]):
        home = _home(plan.layout, path)
        if home.path not in arrays:
            continue
        if path[-1] in VOCABULARY:
            found[path] = arrays[path]
            continue
        if home.path not in rows:  # every stage's entries, in order
            x = arrays[home.path] if home.stacked else arrays[home.path][None]
            traded = _traded(plan, path, x.shape[1:])
            if plan.layout.stages == 1:
                rows[home.path] = x[None]
            elif traded is None:
                rows[home.path] = lax.all_gather(x, "pipeline")
            else:
                x = lax.all_to_all(x, "pipeline", traded + 1, 0, tiled=True)
                rows[home.path] = x.reshape(plan.layout.stages, -1, *x.shape[1:])
        x = _take(rows[home.path], home)
        found[path] = x if home.stacked else x[0]
    return nested(found)


def _take(rows: Float[Array, "P S ..."], home: _Home) -> Float[Array, "L ..."]:
    """The layers' entries. Those that follow each other, as on a single stage, are one slice: a step does it too."""
    if not _in_a_row(home):
        return rows[home.stage_L, home.entry_L]
    return lax.slice_in_dim(rows[home.stage_L[0]], int(home.entry_L[0]), int(home.entry_L[-1]) + 1)


def _put(rows: Float[Array, "P S ..."], home: _Home, x: Float[Array, "L ..."]) -> Float[Array, "P S ..."]:
    """The inverse of `_take`."""
    if not _in_a_row(home):
        return rows.at[home.stage_L, home.entry_L].set(x)
    first = int(home.stage_L[0]), int(home.entry_L[0]), *(0,) * (x.ndim - 1)
    return lax.dynamic_update_slice(rows, x[None], first)


def _in_a_row(home: _Home) -> bool:
    return bool((home.stage_L == home.stage_L[0]).all() and (np.diff(home.entry_L) == 1).all())


def to_stage(plan: Plan, tree: dict) -> dict:
    """The inverse of `of_stage`: the stage tree, or its part, from natural leaves. Entries without a layer are zero."""
    arrays = by_path(tree)
    members: dict[Path, list[tuple[Path, _Home]]] = {}
    for path in arrays:
        home = _home(plan.layout, path)
        members.setdefault(home.path, []).append((path, home))
    found = {}
    for stage_path, natural in members.items():
        if stage_path[-1] in VOCABULARY:
            found[stage_path] = arrays[stage_path]
        elif stage_path in REPLICATED:
            found[stage_path] = _of_one_layer(plan, stage_path, arrays[stage_path])
        else:
            found[stage_path] = _entries(plan, stage_path, [(arrays[path], home) for path, home in natural])
    return nested(found)


def _of_one_layer(plan: Plan, path: Path, x: Array) -> Array:
    """A leaf without layers, whole."""
    traded = _traded(plan, path, plan.stage[path])
    return x if traded is None else lax.all_gather(x, "pipeline", axis=traded, tiled=True)


def _entries(plan: Plan, path: Path, natural: list[tuple[Array, _Home]]) -> Array:
    """One leaf of the stage tree out of the stacks of layers that lie in it."""
    stacked = natural[0][1].stacked
    shape = plan.stage[path]
    entries, traded = (shape[0] if stacked else 1), _traded(plan, path, shape[1:] if stacked else shape)
    x = natural[0][0] if stacked else natural[0][0][None]
    rows = jnp.zeros((plan.layout.stages, entries, *x.shape[1:]), x.dtype)  # every stage's entries, in order
    for x, home in natural:
        rows = _put(rows, home, x if stacked else x[None])
    if plan.layout.stages == 1:
        mine = rows[0]
    elif traded is None:
        mine = rows[lax.axis_index("pipeline")]
    else:
        mine = lax.all_to_all(rows.reshape(-1, *rows.shape[2:]), "pipeline", 0, traded + 1, tiled=True)
    return mine if stacked else mine[0]
