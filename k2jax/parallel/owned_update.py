"""The optimizer's step on what a rank owns: MuonClip matrix by matrix, without a collective but for norms.

Large matrices are updated one at a time, in place, so that the step needs room for a few beyond its state, small ones all as
one tree. It runs inside one shard_map over the mesh, on device-local arrays (`k2jax.parallel.zero1`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k2jax.config import RunConfig
from k2jax.optim.muon import Path, by_path, nested
from k2jax.optim.muonclip import muonclip
from k2jax.parallel.mesh import AXES, RANKS
from k2jax.parallel.ownership import REPLICATED, Kind, Plan, rank_bytes, tree_of
from k2jax.parallel.zero1 import device, home, reduce

AT_ONCE = 2**28  # bytes of float32 weights and moments of a rank: with no more, all its matrices are updated together


class _Step(NamedTuple):
    """What every matrix's update needs."""

    config: RunConfig
    rate: Float[Array, ""]
    count: Int[Array, ""]
    norm: Float[Array, ""]
    finite: Bool[Array, ""]

    def clip(self, gradient: Array) -> Array:
        """`optax.clip_by_global_norm` with the norm of the whole model's gradient."""
        limit = self.config.optim.clip_norm
        return jnp.where(self.norm < limit, gradient, gradient / self.norm * limit) if limit else gradient

    def apply(self, rule: str, params: dict, moments: dict, gradients: dict, max_logit_LH: dict) -> tuple[dict, dict, dict]:
        """`muonclip` on a few leaves; returns weights, moments and updates."""
        optimizer = muonclip(replace(self.config.optim, rule=rule, clip_norm=0.0), self.config.model)
        state = optax.tree.set(optimizer.init(params), **moments, count=self.count)
        gradients = jax.tree.map(self.clip, gradients)
        updates, state = optimizer.update(gradients, state, params, learning_rate=self.rate, max_logit_LH=max_logit_LH)
        moments = {name: optax.tree.get(state, name) for name in moments}
        return optax.apply_updates(params, updates), moments, updates


def update(
    plan: Plan,
    config: RunConfig,
    params: dict,
    opt_state: dict,
    gradients: dict,
    rate: Float[Array, ""],
    max_logit_LH: Float[Array, "L H"],
    finite_loss: Bool[Array, ""],
) -> tuple[dict, dict, dict]:
    """One step of the optimizer on what this rank owns; returns weights, optimizer state and metrics.

    `gradients` is this rank's stage tree, float32, not yet summed over ranks; in it what every stage has, `norm_D` and
    `mtp/norm_D`, is already summed over the stages. `max_logit_LH` are the step's largest logits in the stage's slots. The
    metrics are `grad_norm`, `finite` and `update_rms` of the whole model, the same on all devices. If the gradient's norm or
    the loss is not finite, nothing changes, bit for bit, and `update_rms` is nan.
    """
    owned = reduce(plan, gradients)
    norm = jnp.sqrt(lax.psum(_squares_owned(plan, owned), AXES))
    finite = jnp.isfinite(norm) & finite_loss
    step = _Step(config, rate, opt_state["count"], norm, finite)
    params, moments = dict(params), {name: dict(opt_state[name]) for name in plan.moments}
    squares = jnp.zeros(())
    for sections, f in _updates(plan).items():

        def only(tree: dict, sections=sections) -> dict:
            return {section: tree[section] for section in sections if section in tree}

        if only(params):
            old = {name: only(moment) for name, moment in moments.items() if only(moment)}
            new, new_moments, more = f(plan, step, only(params), old, only(owned), max_logit_LH)
            params, squares = params | new, squares + more
            moments |= {name: moments[name] | moment for name, moment in new_moments.items()}
    rms = jnp.sqrt(lax.psum(squares, AXES)) / plan.n_params**0.5
    count = jnp.where(finite, optax.safe_increment(step.count), step.count)
    metrics = {"grad_norm": norm, "finite": finite, "update_rms": jnp.where(finite, rms, jnp.nan)}
    return params, moments | {"count": count}, metrics


def _updates(plan: Plan) -> dict[tuple[str, ...], Callable]:
    """What updates which sections.

    A loop over small matrices is slow, and on a CPU copies them all every turn.
    """
    at_once = sum(rank_bytes(plan).values()) <= AT_ONCE
    matrices = {("muon", "experts"): _update_at_once} if at_once else {("muon",): _update_muon, ("experts",): _update_experts}
    return matrices | {("adamw",): _update_adamw}


def _update_at_once(plan: Plan, step: _Step, params: dict, moments: dict, gradients: dict, max_logit_LH: Array):
    """All matrices as one tree of stacks. A rank that has fewer than the others keeps what fills its stacks up."""
    stage, rank, replica = lax.axis_index("pipeline"), lax.axis_index(RANKS), lax.axis_index("data")
    kinds, chosen, logits, rule = [], {}, {}, plan.expert_rule
    for kind in plan.kinds if "muon" in params else ():
        if not kind.count_ZR.any():
            continue
        slot_N, count = (_of_rank(table, stage, rank) for table in (kind.slot_ZRN, kind.count_ZR))
        # Columns are known beforehand if no rank has fewer units: what fills up lies where another rank has something else.
        even = (kind.count_ZR == kind.first_ZRN.shape[-1]).all()
        first_N = _of_rank(kind.first_ZRN, stage, rank) if even else jnp.asarray(kind.first_ZRN)[stage, rank]
        chosen_N = step.finite & (jnp.arange(len(first_N)) < count)
        kinds.append((kind, first_N, chosen_N))
        chosen |= {leaf.path: chosen_N for leaf in kind.leaves}
        if kind.clipped:
            logits["slots"], rule = max_logit_LH[slot_N], "muonclip"
    if "experts" in params:
        index_N, count = _of_rank(plan.experts.index_ZRN, stage, replica), _of_rank(plan.experts.count_ZR, stage, replica)
        chosen_N = jnp.zeros(len(index_N), bool).at[index_N].set(step.finite & (jnp.arange(len(index_N)) < count))
        chosen |= dict.fromkeys(plan.experts.shapes, chosen_N)

    def take(owned: dict) -> dict:
        stacks = {path: owned["experts"][path[-1]] for path in plan.experts.shapes} if "experts" in owned else {}
        for kind, first_N, _ in kinds:
            stacks |= _open(kind, _units(kind, first_N, owned["muon"]))
        return nested(stacks)

    def put(owned: dict, tree: dict) -> dict:
        stacks, new = by_path(tree), dict(owned)
        for kind, first_N, chosen_N in kinds:
            new["muon"] = _put_units(first_N, chosen_N, new["muon"], _close(kind, stacks, plan.ranks))
        if "experts" in owned:
            new["experts"] = {path[-1]: stacks[path] for path in plan.experts.shapes}
        return new

    held = device(plan, (params, moments))
    old = take(held[0]), {name: take(moment) for name, moment in held[1].items()}
    *new, updates = step.apply(rule, *old, take(gradients), logits)
    chosen = nested(chosen)
    params = put(held[0], _those(chosen, new[0], old[0]))
    moments = {name: put(held[1][name], _those(chosen, moment, old[1][name])) for name, moment in new[1].items()}
    return *home(plan, (params, moments)), _squares(_those(chosen, updates, jax.tree.map(jnp.zeros_like, updates)))


def _of_rank(table_ZR: np.ndarray, stage: Array, rank: Array) -> np.generic | np.ndarray | Array:
    """A rank's entry of a table, known beforehand where all ranks have the same."""
    entries = table_ZR.reshape(-1, *table_ZR.shape[2:])
    return entries[0] if (entries == entries[0]).all() else jnp.asarray(table_ZR)[stage, rank]


def _units(kind: Kind, first_N: np.ndarray | Array, rows: Float[Array, "R m"]) -> Float[Array, "N R part"]:
    """The units that begin at these columns."""
    part = kind.units[0].part
    if _adjacent(first_N, part):
        return rows[:, first_N[0] : first_N[-1] + part].reshape(len(rows), -1, part).swapaxes(0, 1)
    return jnp.stack([lax.dynamic_slice_in_dim(rows, first, part, axis=1) for first in first_N])


def _put_units(first_N, chosen_N, rows: Float[Array, "R m"], units_NRm: Float[Array, "N R part"]) -> Float[Array, "R m"]:
    """The inverse. Units that are not chosen lie where others may: they leave alone what they find."""
    part = units_NRm.shape[-1]
    if _adjacent(first_N, part):
        return lax.dynamic_update_slice_in_dim(rows, units_NRm.swapaxes(0, 1).reshape(len(rows), -1), first_N[0], axis=1)
    for first, chosen, unit in zip(first_N, chosen_N, units_NRm, strict=True):
        unit = jnp.where(chosen, unit, lax.dynamic_slice_in_dim(rows, first, part, axis=1))
        rows = lax.dynamic_update_slice_in_dim(rows, unit, first, axis=1)
    return rows


def _adjacent(first_N: np.ndarray | Array, part: int) -> bool:
    return isinstance(first_N, np.ndarray) and bool((np.diff(first_N) == part).all())


def _update_muon(plan: Plan, step: _Step, params: dict, moments: dict, gradients: dict, max_logit_LH: Array):
    """Kind by kind, in place: one loop over as many units as this rank owns."""
    stage, rank = lax.axis_index("pipeline"), lax.axis_index(RANKS)
    carry = *device(plan, (params["muon"], {name: moment["muon"] for name, moment in moments.items()})), jnp.zeros(())
    for kind in plan.kinds:
        first_N, slot_N = (jnp.asarray(table)[stage, rank] for table in (kind.first_ZRN, kind.slot_ZRN))
        count = jnp.where(step.finite, jnp.asarray(kind.count_ZR)[stage, rank], 0)
        rule = "muonclip" if kind.clipped else "muon"

        def one(i, carry, kind=kind, first_N=first_N, slot_N=slot_N, rule=rule):
            def take(rows: Float[Array, "R m"]) -> dict:
                return nested(_open(kind, _units(kind, first_N[i][None], rows)))

            def put(rows: Float[Array, "R m"], stack: dict) -> Float[Array, "R m"]:
                unit = _close(kind, by_path(stack), plan.ranks)[0]
                return lax.dynamic_update_slice_in_dim(rows, unit, first_N[i], axis=1)

            params, moments, squares = carry
            logits = {"slots": max_logit_LH[slot_N[i]][None]} if kind.clipped else {}
            old = take(params), {name: take(moment) for name, moment in moments.items()}
            stack, new, updates = step.apply(rule, *old, take(gradients["muon"]), logits)
            moments = {name: put(moments[name], x) for name, x in new.items()}
            return put(params, stack), moments, squares + _squares(updates)

        carry = lax.fori_loop(0, count, one, carry)
    params, moments = home(plan, carry[:2])
    return {"muon": params}, {name: {"muon": moment} for name, moment in moments.items()}, carry[2]


def _open(kind: Kind, units_NRm: Float[Array, "N R part"]) -> dict[Path, Array]:
    """The units' matrices, each leaf a stack of N layers."""
    shapes, found, first = by_path(tree_of(kind.leaves)), {}, 0
    for leaf in kind.leaves:
        flat_Nm = units_NRm[:, :, first : first + leaf.part].reshape(len(units_NRm), -1)[:, : leaf.size]
        found[leaf.path] = flat_Nm.reshape(len(units_NRm), *shapes[leaf.path].shape[1:])
        first += leaf.part
    return found


def _close(kind: Kind, stacks: Mapping[Path, Array], ranks: int) -> Float[Array, "N R part"]:
    """The inverse of `_open`."""
    parts = []
    for leaf in kind.leaves:
        flat_Nm = stacks[leaf.path].reshape(len(stacks[leaf.path]), -1)
        flat_Nm = jnp.pad(flat_Nm, ((0, 0), (0, ranks * leaf.part - leaf.size)))
        parts.append(flat_Nm.reshape(len(flat_Nm), ranks, leaf.part))
    return jnp.concatenate(parts, axis=-1)


def _update_experts(plan: Plan, step: _Step, params: dict, moments: dict, gradients: dict, max_logit_LH: Array):
    """One expert at a time, in place: beyond what it is given the loop needs room for a few matrices."""
    del max_logit_LH
    stage, replica = lax.axis_index("pipeline"), lax.axis_index("data")
    index_N = jnp.asarray(plan.experts.index_ZRN)[stage, replica]
    count = jnp.where(step.finite, jnp.asarray(plan.experts.count_ZR)[stage, replica], 0)

    def body(i, carry):
        def take(tree):
            return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index_N[i], 1), tree)

        params, moments, squares = carry
        old = params, moments
        *new, updates = step.apply(plan.expert_rule, *device(plan, take(old)), take(gradients["experts"]), {})
        new = home(plan, tuple(new))
        put = jax.tree.map(lambda x, one: lax.dynamic_update_slice_in_dim(x, one, index_N[i], 0), old, new)
        return *put, squares + _squares(updates)

    of_experts = params["experts"], {name: moment["experts"] for name, moment in moments.items()}
    params, moments, squares = lax.fori_loop(0, count, body, (*of_experts, jnp.zeros(())))
    return {"experts": params}, {name: {"experts": moment} for name, moment in moments.items()}, squares


def _update_adamw(plan: Plan, step: _Step, params: dict, moments: dict, gradients: dict, max_logit_LH: Array):
    """All at once, element by element."""
    del max_logit_LH
    old = device(plan, (params, moments))
    *new, updates = step.apply("adamw", *old, gradients, {})
    params, moments = home(plan, jax.tree.map(lambda a, b: jnp.where(step.finite, a, b), tuple(new), old))
    return params, moments, _once(plan, updates["adamw"])


def _those(chosen: dict, new: dict, old: dict) -> dict:
    """The chosen entries of the leaves' first axis from `new`, the others from `old`."""
    return jax.tree.map(lambda c_N, new, old: jnp.where(c_N.reshape(-1, *(1,) * (new.ndim - 1)), new, old), chosen, new, old)


# --- sums of squares


def _squares(tree) -> Float[Array, ""]:
    return optax.tree.norm(tree, squared=True)


def _squares_owned(plan: Plan, owned: dict) -> Float[Array, ""]:
    """Over all sections; the sum over all devices is that of the model."""
    return sum(_once(plan, x) if section == "adamw" else _squares(x) for section, x in owned.items())


def _once(plan: Plan, x: Float[Array, " n"]) -> Float[Array, ""]:
    """Of an AdamW section; leaves that every stage has count on the first stage alone."""
    n = sum(leaf.part for leaf in plan.adamw if leaf.path not in REPLICATED)
    return _squares(x[:n]) + jnp.where(lax.axis_index("pipeline") == 0, _squares(x[n:]), 0)
