"""ZeRO-1 that never cuts a matrix: each rank keeps float32 weights and moments of whole matrices, and updates those.

working: owned float32 weights -> cast -> one all_gather -> the stage tree that forward and backward use
reduce:  gradients -> one reduce_scatter -> those of owned weights, which `k2jax.parallel.owned_update` then updates

A collective hands out equal parts, and matrices are few and unequal: K2 on 256 nodes has 43 units for the 128 ranks of a stage,
and with a unit a part buffers would be as large as 128 of the largest. So the big collectives move every array in R equal
parts, and one all_to_all, no larger than what a rank owns, brings the parts of a matrix together at its owner, or takes them
back. Experts are many and equal: they are scattered and gathered whole, over `data`. All functions but `abstract_owned` and
`specs` run inside one shard_map over the mesh, on device-local arrays.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from k2jax.model.weights import working_dtype
from k2jax.optim.muon import Path, by_path, nested
from k2jax.parallel.mesh import AXES, RANKS
from k2jax.parallel.ownership import Leaf, Plan
from k2jax.parallel.ownership import plan as plan  # the first thing a user of this module needs

# --- the owned state as global arrays


def abstract_owned(plan: Plan) -> tuple[dict, dict]:
    """Shapes of the owned weights and optimizer state as global arrays: axes [P, EP, DP], then those of one rank's array.

    Every tree is {"muon": [R, columns], "experts": {leaf: [owned, ...]}, "adamw": [columns]} or what it needs of that. The
    optimizer state has a tree for each moment, of momentum, mu, nu, and the `count` of steps.
    """
    lead = (plan.sizes.pipeline, plan.sizes.expert, plan.sizes.data)
    shapes = {
        "muon": (plan.ranks, plan.width),
        "experts": {path[-1]: (plan.experts.owned, *shape) for path, shape in plan.experts.shapes.items()},
        "adamw": (sum(leaf.part for leaf in plan.adamw),),
    }

    def tree(name: str) -> dict:
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct((*lead, *shape), jnp.float32),
            {section: shapes[section] for section in plan.sections[name]},
            is_leaf=lambda x: isinstance(x, tuple),
        )

    return tree("params"), {name: tree(name) for name in plan.moments} | {"count": jax.ShapeDtypeStruct((), jnp.int32)}


def specs(plan: Plan) -> tuple[dict, dict]:
    """How those arrays lie on the mesh: a slice a device, the count on all."""
    return jax.tree.map(lambda x: PartitionSpec(*AXES) if x.ndim else PartitionSpec(), abstract_owned(plan))


def shardings(plan: Plan, mesh: Mesh) -> tuple[dict, dict]:
    """Where those arrays lie: on the devices, or with `offload` in their hosts' memory, the count excepted."""
    kind = "pinned_host" if plan.sizes.offload else None
    arrays = abstract_owned(plan)
    return jax.tree.map(lambda x, spec: NamedSharding(mesh, spec, memory_kind=kind if x.ndim else None), arrays, specs(plan))


def device(plan: Plan, tree):
    """To the device, if the state is kept on the host. Without the barrier XLA moves slices before the copy, and fails."""
    return lax.optimization_barrier(jax.device_put(tree, jax.memory.Space.Device)) if plan.sizes.offload else tree


def home(plan: Plan, tree):
    """The inverse of `device`."""
    return jax.device_put(tree, jax.memory.Space.Host) if plan.sizes.offload else tree


def local(tree):
    """A rank's own arrays, without the three mesh axes, which have size 1 there."""
    return jax.tree.map(lambda x: x.reshape(x.shape[3:]) if x.ndim else x, tree)


def whole(tree):
    """The inverse of `local`."""
    return jax.tree.map(lambda x: x[None, None, None] if x.ndim else x, tree)


# --- between the stage tree and what a rank owns


def working(plan: Plan, owned: dict, dtype: str) -> dict:
    """The stage tree, or as much of it as `owned` has sections and leaves of experts of, gathered from the owners.

    Weights are cast to their `working_dtype` before they travel.
    """
    parts = _from_owners(plan, device(plan, owned["muon"])) if "muon" in owned else {}
    parts |= _split(plan.adamw, device(plan, owned["adamw"])) if "adamw" in owned else {}
    dtypes = {path: working_dtype(path[-1], dtype) for path in parts}
    found = {}
    for kind in dict.fromkeys(dtypes.values()):  # one all_gather for each
        leaves = [leaf for leaf in (*plan.muon, *plan.adamw) if dtypes.get(leaf.path) == kind]
        shares = lax.all_gather(jnp.concatenate([parts[leaf.path].astype(kind) for leaf in leaves]), RANKS)
        found |= {leaf.path: _join(leaf, x) for leaf, x in zip(leaves, _split(leaves, shares).values(), strict=True)}
    for path, shape in plan.experts.shapes.items():
        x = owned.get("experts", {}).get(path[-1])
        if x is None:
            continue
        # From the host one expert at a time: the float32 weights have no room on the device.
        x = lax.map(lambda one: device(plan, one).astype(dtype), x) if plan.sizes.offload else x.astype(dtype)
        x = lax.all_gather(x, "data", tiled=True) if plan.sizes.data > 1 else x
        found[path] = x[: plan.experts.pairs].reshape(len(plan.layout.moe_slots), -1, *shape)
    return nested(found)


def own(plan: Plan, tree: dict, sections: Sequence[str]) -> dict:
    """The inverse of `working` in float32: what this rank owns of a stage tree that its whole stage holds alike."""

    def of_experts(x: Float[Array, "n ..."]) -> Float[Array, "m ..."]:
        return lax.dynamic_slice_in_dim(x, lax.axis_index("data") * plan.experts.owned, plan.experts.owned)

    return home(plan, _owned(plan, tree, sections, lambda shares: shares[lax.axis_index(RANKS)], of_experts))


def reduce(plan: Plan, gradients: dict) -> dict:
    """What this rank owns of the sum of its stage's trees: one reduce_scatter, and over `data` one for each leaf of experts."""

    def of_experts(x: Float[Array, "n ..."]) -> Float[Array, "m ..."]:
        return lax.psum_scatter(x, "data", tiled=True) if plan.sizes.data > 1 else x

    return _owned(plan, gradients, plan.sections["params"], lambda shares: lax.psum_scatter(shares, RANKS), of_experts)


def _owned(plan: Plan, tree: dict, sections: Sequence[str], of_shares: Callable, of_experts: Callable) -> dict:
    """The sections of a stage tree, given what takes this rank's part of [R, n] shares, and of [DP * owned, ...] experts."""
    arrays, owned = by_path(tree), {}
    leaves = {section: leaves for section, leaves in (("muon", plan.muon), ("adamw", plan.adamw)) if section in sections}
    if leaves:
        cut = [_cut(leaf, arrays[leaf.path], plan.ranks) for section in leaves.values() for leaf in section]
        share = of_shares(jnp.concatenate(cut, axis=1))
    if "muon" in leaves:
        owned["muon"] = _to_owners(plan, _split(plan.muon, share))
    if "adamw" in leaves:
        owned["adamw"] = share[share.shape[0] - sum(leaf.part for leaf in plan.adamw) :]
    if "experts" in sections:
        pad = plan.sizes.data * plan.experts.owned - plan.experts.pairs
        pairs = {path: arrays[path].reshape(-1, *shape) for path, shape in plan.experts.shapes.items() if path in arrays}
        owned["experts"] = {path[-1]: of_experts(_pad(x, pad)) for path, x in pairs.items()}
    return owned


def _cut(leaf: Leaf, x: Array, ranks: int) -> Float[Array, "R n"]:
    """Each entry in R parts: row r has the r-th part of all entries, side by side."""
    x = x.reshape(leaf.entries, leaf.size)
    x = jnp.pad(x, ((0, 0), (0, ranks * leaf.part - leaf.size)))
    return x.reshape(leaf.entries, ranks, leaf.part).swapaxes(0, 1).reshape(ranks, -1)


def _join(leaf: Leaf, parts: Float[Array, "R n"]) -> Array:
    """The inverse of `_cut`."""
    x = parts.reshape(-1, leaf.entries, leaf.part).swapaxes(0, 1).reshape(leaf.entries, -1)
    return x[:, : leaf.size].reshape(leaf.shape)


def _pad(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, rows), *((0, 0),) * (x.ndim - 1))) if rows else x


def _split(leaves: Sequence[Leaf], share: Float[Array, "... n"]) -> dict[Path, Float[Array, "... m"]]:
    """The leaves' parts in a share, from its beginning."""
    found, first = {}, 0
    for leaf in leaves:
        found[leaf.path] = share[..., first : first + leaf.entries * leaf.part]
        first += leaf.entries * leaf.part
    return found


def _to_owners(plan: Plan, parts: Mapping[Path, Float[Array, " n"]]) -> Float[Array, "R m"]:
    """Sends every unit's part to the unit's owner; returns the R parts of the units that this rank owns."""
    rows = [[] for _ in range(plan.ranks)]
    for unit in sorted(plan.units, key=lambda unit: unit.first):
        rows[unit.rank] += [parts[leaf.path][unit.entry * leaf.part :][: leaf.part] for leaf in unit.leaves]
    whole = [jnp.concatenate([*row, jnp.zeros(plan.width - sum(map(len, row)))]) for row in rows]
    return lax.all_to_all(jnp.stack(whole), RANKS, 0, 0, tiled=True)


def _from_owners(plan: Plan, owned: Float[Array, "R m"]) -> dict[Path, Float[Array, " n"]]:
    """The inverse of `_to_owners`."""
    rows, parts = lax.all_to_all(owned, RANKS, 0, 0, tiled=True), {}
    for unit in plan.units:
        first = unit.first
        for leaf in unit.leaves:
            parts[leaf.path, unit.entry] = rows[unit.rank, first : first + leaf.part]
            first += leaf.part
    return {leaf.path: jnp.concatenate([parts[leaf.path, i] for i in range(leaf.entries)]) for leaf in plan.muon}
