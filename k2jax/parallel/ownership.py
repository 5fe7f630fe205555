"""Who owns which weights under ZeRO-1, computed on the host: whole matrices, balanced by the cost of Newton-Schulz.

A stage's weights are owned in three sections.
- "muon": matrices that all its ranks use. They go out in units, the least that the optimizer must see together: one matrix of
  one layer, or the leaves of a layer that split "joint" fuses or QK-Clip scales by one statistic. The costliest first, each to
  the least busy of the R = expert * data ranks, and on every stage to the same: the stages run one program.
- "experts": of an expert rank's (slot, expert) pairs, in this order, each of its `data` ranks owns a run of `n_own`.
- "adamw": what AdamW updates, cut anywhere.
On their way between ranks arrays are cut in R equal parts (`k2jax.parallel.zero1`).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from k2jax.axes import axes_of
from k2jax.config import MeshConfig, ModelConfig, OptimConfig, RunConfig
from k2jax.kernels import newton_schulz
from k2jax.optim.muon import FUSED, Path, blocks_of, by_path, nested
from k2jax.optim.muonclip import aligned, muonclip, rule_of
from k2jax.optim.qk_clip import clip_powers
from k2jax.parallel.layout import IDENTITY, MOE, MTP, Layout, layout
from k2jax.parallel.mesh import shapes

STACKED = ("slots", "dense")  # keys of the stage tree under which leaves have an axis of entries
REPLICATED = (("norm_D",), ("mtp", "norm_D"))  # the same on every stage, so counted once in a norm


class Leaf(NamedTuple):
    """A leaf of the stage tree outside the experts. Each entry, one slot's matrix or a whole AdamW leaf, is cut by itself."""

    path: Path
    shape: tuple[int, ...]
    entries: int
    part: int  # elements of an entry in one of R parts, rounded up

    @property
    def size(self) -> int:
        """Elements of an entry."""
        return math.prod(self.shape) // self.entries


class Unit(NamedTuple):
    """Matrices of one layer that stay on one rank, which holds its units side by side, each as R rows: its R parts."""

    leaves: tuple[Leaf, ...]
    entry: int  # of each leaf; in "slots" the slot, and so the row of the statistic
    cost: int  # FLOPs of Newton-Schulz
    used_Z: np.ndarray  # whether a stage has a layer there
    rank: int = -1  # owner
    first: int = -1  # column of the owner's rows

    @property
    def part(self) -> int:
        """Columns."""
        return sum(leaf.part for leaf in self.leaves)


class Kind(NamedTuple):
    """Units that differ only in where they lie, for one loop to update. N is the most of any rank."""

    units: tuple[Unit, ...]
    clipped: bool  # by QK-Clip
    count_ZR: np.ndarray  # a rank's units that have a layer on the stage
    first_ZRN: np.ndarray  # their columns
    slot_ZRN: np.ndarray  # and rows of the statistic

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Of the first unit, for all."""
        return self.units[0].leaves


class Experts(NamedTuple):
    """Ownership of the (slot, expert) pairs of one expert rank."""

    shapes: dict[Path, tuple[int, ...]]  # leaf -> shape of one expert
    pairs: int
    owned: int  # pairs of a rank, rounded up
    count_ZR: np.ndarray  # a rank's pairs in slots that have experts
    index_ZRN: np.ndarray  # and which of its pairs they are


@dataclass(frozen=True, eq=False)
class Plan:
    """Ownership on one mesh: the same on every process."""

    sizes: MeshConfig
    layout: Layout
    muon: tuple[Leaf, ...]
    units: tuple[Unit, ...]
    kinds: tuple[Kind, ...]
    width: int  # columns that a rank holds of Muon's weights: the most of any rank
    adamw: tuple[Leaf, ...]  # those REPLICATED last
    experts: Experts
    expert_rule: str  # muon or adamw
    expert_cost: int  # FLOPs of Newton-Schulz
    load_ZR: np.ndarray  # FLOPs of Newton-Schulz a step
    stage: dict[Path, tuple[int, ...]]  # shapes of the stage tree on one rank
    natural: tuple[dict, optax.OptState]  # shapes of the whole model's weights and optimizer state

    @property
    def ranks(self) -> int:
        """R, ranks of a stage."""
        return self.sizes.expert * self.sizes.data

    @property
    def n_params(self) -> int:
        """Weights of the whole model."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.natural[0]))

    @property
    def balance(self) -> float:
        """Newton-Schulz FLOPs of the busiest rank over an equal share of the busiest stage's."""
        return float(self.load_ZR.max() / self.load_ZR.mean(1).max()) if self.load_ZR.any() else 1.0

    @property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """The trees of the owned state, weights ("params") and the optimizer's moments, and the sections that each has."""
        experts = ("experts",) if self.experts.shapes else ()
        if self.expert_rule == "adamw":
            return {tree: (*experts, "adamw") for tree in ("params", "mu", "nu")}
        matrices = ("muon", *experts)
        return {"params": (*matrices, "adamw"), "momentum": matrices, "mu": ("adamw",), "nu": ("adamw",)}

    @property
    def moments(self) -> tuple[str, ...]:
        """The optimizer's moments."""
        return tuple(self.sections)[1:]


@functools.lru_cache
def plan(config: RunConfig, sizes: MeshConfig) -> Plan:
    """Gives a run's weights to the ranks of a mesh whose `data` is resolved. Nothing is allocated."""
    places, R = layout(config.model, sizes), sizes.expert * sizes.data
    params = shapes(config.model)
    arrays = {path: x.shape for path, x in by_path(stage_shapes(config.model, sizes)).items()}
    experts = _experts(places, sizes, {path: shape for path, shape in arrays.items() if axes_of(path[-1]).startswith("E")})
    rule = {path: rule_of(config.optim, path) for path in arrays}
    leaves = [_leaf(path, shape, rule[path], R) for path, shape in arrays.items() if path not in experts.shapes]
    muon = [leaf for leaf in leaves if rule[leaf.path] == "muon"]
    adamw = [leaf for leaf in leaves if rule[leaf.path] == "adamw"]

    expert_rule = "adamw" if config.optim.rule == "adamw" else "muon"
    one = nested({path: jax.ShapeDtypeStruct((1, *shape), jnp.float32) for path, shape in experts.shapes.items()})
    cost = _cost(config.optim, one) if experts.shapes and expert_rule == "muon" else 0
    load_ZR = np.tile(experts.count_ZR * float(cost), (1, sizes.expert))  # rank = expert * DP + data, as the axes are listed
    groups = _groups(config, muon)
    units, load_ZR = _assign([unit for group in groups for unit in _units(config.optim, places, group)], load_ZR)
    return Plan(
        sizes=sizes,
        layout=places,
        muon=tuple(muon),
        units=tuple(units),
        kinds=tuple(_kinds(config, places, R, units)),
        width=max((unit.first + unit.part for unit in units), default=0),
        adamw=tuple(sorted(adamw, key=lambda leaf: leaf.path in REPLICATED)),
        experts=experts,
        expert_rule=expert_rule,
        expert_cost=cost,
        load_ZR=load_ZR,
        stage=arrays,
        natural=(params, _optimizer_state(config.optim, config.model)),
    )


@functools.lru_cache
def _optimizer_state(optim: OptimConfig, model: ModelConfig) -> optax.OptState:
    return jax.eval_shape(muonclip(optim, model).init, shapes(model))


def stage_shapes(model: ModelConfig, sizes: MeshConfig) -> dict:
    """Shapes of one stage's weights on one rank, as the pipeline takes them; all float32."""
    places = layout(model, sizes)
    whole = shapes(replace(model, n_layers=2, n_dense=1, n_mtp=1))

    def stacked(tree: dict, *lead: int) -> dict:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape[1:]), jnp.float32), tree)

    slots = stacked(whole["moe"], places.slots)
    ffn, n = slots.pop("ffn"), len(places.moe_slots)
    if n:
        local = {name: x.shape[1] // sizes.expert if axes_of(name).startswith("E") else x.shape[1] for name, x in ffn.items()}
        slots["ffn"] = {name: jax.ShapeDtypeStruct((n, local[name], *x.shape[2:]), jnp.float32) for name, x in ffn.items()}
    tree = {"slots": slots, "norm_D": whole["norm_D"]}
    if places.dense_ZJ.shape[1]:
        tree["dense"] = stacked(whole["dense"]["ffn"], places.dense_ZJ.shape[1])
    if model.n_mtp:
        tree["mtp"] = {name: x for name, x in whole["mtp"].items() if name != "block"}
    for name in ("embed_WD", "head_WD"):
        tree[name] = jax.ShapeDtypeStruct((model.n_words // sizes.pipeline, model.d_model), jnp.float32)
    return tree


def _leaf(path: Path, shape: tuple[int, ...], rule: str, ranks: int) -> Leaf:
    entries = shape[0] if rule == "muon" and path[0] in STACKED else 1
    return Leaf(path, shape, entries, -(-(math.prod(shape) // entries) // ranks))


def _experts(places: Layout, sizes: MeshConfig, arrays: dict[Path, tuple[int, ...]]) -> Experts:
    local = next(iter(arrays.values()))[1] if arrays else 0  # none in a model without experts
    pairs = len(places.moe_slots) * local
    owned = -(-pairs // sizes.data)
    has = np.zeros((places.stages, sizes.data * owned), bool)
    has[:, :pairs] = np.repeat(np.isin(places.kind_ZL[:, places.moe_slots], (MOE, MTP)), local, axis=1)
    has_ZRN = has.reshape(places.stages, sizes.data, owned)
    index_ZRN = np.argsort(~has_ZRN, axis=-1, kind="stable").astype(np.int32)  # those that have a layer, in order, first
    return Experts({path: shape[2:] for path, shape in arrays.items()}, pairs, owned, has_ZRN.sum(-1), index_ZRN)


def _groups(config: RunConfig, leaves: Sequence[Leaf]) -> list[tuple[Leaf, ...]]:
    """Leaves that the optimizer must see together."""
    ties = list(FUSED) if config.optim.split == "joint" else []
    ties += [_clipped(config)] if config.optim.rule == "muonclip" else []
    groups = [(leaf,) for leaf in leaves]
    for names in ties:
        tied = [group for group in groups if any(leaf.path[-1] in names for leaf in group)]
        if tied:
            groups = [group for group in groups if group not in tied] + [sum(tied, ())]
    return groups


def _clipped(config: RunConfig) -> tuple[str, ...]:
    return tuple(clip_powers(config.optim, config.model.attention))


def _units(optim: OptimConfig, places: Layout, leaves: tuple[Leaf, ...]) -> list[Unit]:
    cost = _cost(optim, tree_of(leaves))
    return [Unit(leaves, i, cost, _used(places, leaves[0].path, i)) for i in range(leaves[0].entries)]


def tree_of(leaves: Sequence[Leaf]) -> dict:
    """Shapes of one entry of each leaf, as a stack of one layer."""
    shapes = {leaf.path: (1, *leaf.shape[leaf.path[0] in STACKED :]) for leaf in leaves}
    return nested({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()})


def _cost(optim: OptimConfig, tree: dict) -> int:
    """FLOPs of Newton-Schulz over a tree of matrices."""
    total = 0
    for block in blocks_of(tree, optim.split):
        form = newton_schulz.form(block.n, block.m, optim.ns_steps)
        total += block.count * newton_schulz.flops(block.n, block.m, optim.ns_steps, form)
    return total


def _used(places: Layout, path: Path, entry: int) -> np.ndarray:
    """Whether the entry of a leaf holds a layer's weights, by stage."""
    if path[0] == "dense":
        return places.dense_ZJ[:, entry] >= 0
    if path[0] == "mtp":
        return np.arange(places.stages) == places.stages - 1
    if path[1] == "ffn":
        return np.isin(places.kind_ZL[:, places.moe_slots[entry]], (MOE, MTP))
    return places.kind_ZL[:, entry] != IDENTITY


def _assign(units: Sequence[Unit], load_ZR: np.ndarray) -> tuple[list[Unit], np.ndarray]:
    """Owners and columns of units, and the loads with them: the costliest first, each where its stages end up least busy.

    Among equally costly ones those of a kind follow each other, and so mostly lie side by side.
    """
    load_ZR, filled_R = load_ZR.copy(), np.zeros(load_ZR.shape[1], int)
    assigned = []
    for unit in sorted(units, key=lambda unit: (-unit.cost, axes_of(unit.leaves[0].path[-1]))):
        then_ZR = load_ZR + unit.used_Z[:, None] * unit.cost
        # The step waits for the busiest stage; what decides beyond that are the unit's own stages, and then memory.
        busy_R = np.lexsort((filled_R, then_ZR[unit.used_Z].max(0, initial=0), then_ZR.max(0)))
        rank = int(busy_R[0])
        assigned.append(unit._replace(rank=rank, first=int(filled_R[rank])))
        load_ZR[:, rank], filled_R[rank] = then_ZR[:, rank], filled_R[rank] + unit.part
    return assigned, load_ZR


def _kinds(config: RunConfig, places: Layout, ranks: int, units: Sequence[Unit]) -> list[Kind]:
    by_kind: dict = {}
    for unit in units:
        alone, entry_shape = len(unit.leaves) == 1, tuple(x.shape for x in jax.tree.leaves(tree_of(unit.leaves)))
        key = (axes_of(unit.leaves[0].path[-1]), entry_shape) if alone else tuple(leaf.path for leaf in unit.leaves)
        by_kind.setdefault(key, []).append(unit)
    found = []
    for members in by_kind.values():
        clipped = config.optim.rule == "muonclip" and members[0].leaves[0].path[-1] in _clipped(config)
        held = {
            (p, r): [unit for unit in members if unit.rank == r and unit.used_Z[p]]
            for p in range(places.stages)
            for r in range(ranks)
        }
        most = max(len(owned) for owned in held.values())
        count_ZR = np.zeros((places.stages, ranks), np.int32)
        first_ZRN, slot_ZRN = np.zeros((2, places.stages, ranks, most), np.int32)
        for (p, r), owned in held.items():
            count_ZR[p, r] = len(owned)
            first_ZRN[p, r, : len(owned)] = [unit.first for unit in owned]
            slot_ZRN[p, r, : len(owned)] = [unit.entry for unit in owned]
        found.append(Kind(tuple(members), clipped, count_ZR, first_ZRN, slot_ZRN))
    return found


def rank_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of float32 weights and moments that a rank holds, by section, what lies empty included."""
    elements = {
        "muon": plan.width * plan.ranks,
        "experts": plan.experts.owned * sum(map(math.prod, plan.experts.shapes.values())),
        "adamw": sum(leaf.part for leaf in plan.adamw),
    }
    return {section: 4 * n * sum(section in held for held in plan.sections.values()) for section, n in elements.items()}


def render(plan: Plan) -> str:
    """Returns who owns what as text: a line a kind of unit, in aligned columns, then the balance and what a rank holds."""
    lines = [("unit", "matrices", "a stage", "most a rank", "GFLOP each")]
    for kind in plan.kinds:
        names = dict.fromkeys(leaf.path[-1] for unit in kind.units for leaf in unit.leaves)
        shapes = [x.shape[1:] for x in by_path(tree_of(kind.leaves)).values()]
        lines.append(_line(names, shapes, len(kind.units), int(kind.count_ZR.max()), kind.units[0].cost))
    experts = plan.experts
    names = [path[-1] for path in experts.shapes]
    lines.append(_line(names, experts.shapes.values(), experts.pairs * plan.sizes.expert, experts.owned, plan.expert_cost))
    busiest, share = plan.load_ZR.max() / 1e12, plan.load_ZR.mean(1).max() / 1e12
    held = rank_bytes(plan)
    return "\n".join(
        [
            f"owners of matrices among the {plan.ranks} ranks of a stage",
            aligned(lines, left=range(2)),
            f"Newton-Schulz a step: busiest rank {busiest:,.2f} TFLOP, equal share {share:,.2f}, ratio {plan.balance:.3f}",
            f"float32 weights and moments a rank: {', '.join(f'{name} {n / 1e9:.2f} GB' for name, n in held.items())}",
        ]
    )


def _line(names: Iterable[str], shapes: Iterable[tuple[int, ...]], count: int, most: int, cost: int) -> tuple[str, ...]:
    matrices = ", ".join(dict.fromkeys(" x ".join(map(str, shape)) for shape in shapes))
    return ", ".join(names), matrices, str(count), str(most), f"{cost / 1e9:,.1f}"
