"""Interleaved 1F1B as one lock-step SPMD program: every stage takes the same tick, and no tick branches.

In tick t stage z runs the forward pass of its unit t - z and the backward pass of its unit t - v*P - (P-1-z), of another
microbatch (`k2jax.parallel.schedule`); what they produce moves one stage on, by one ring permute each way. Three loops follow
each other: v*P ticks of forwards, M*v - v*P + P-1 of both, v*P of backwards. A unit outside 0 <= k < M*v sees padding alone: it
sends no token, adds no gradient, and counts nowhere.

Between forward and backward a unit stores of its layers what the activation policy says (`k2jax.parallel.activations`; the rest
is recomputed), in slots that a table computed on the host hands out: v*P + P - 1 of them, however many microbatches there are,
and one for units that are out of range.

Once in v*P ticks, for P ticks, it is the vocabulary's turn on all stages (`k2jax.parallel.turn`). MTP's layer is the last slot
of the last stage and needs no ticks of its own. What not every tick or stage does stands in loops of 0 or 1 trips: a `cond`
would copy the gradients that pass through it, every tick.

Collectives a tick: two all_to_all a layer forward and two backward over `expert`, one permute each way over `pipeline`, and in
the vocabulary's turn sums over `pipeline`. Nothing is summed over `expert` or `data` before the last tick.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from k2jax.config import ModelConfig
from k2jax.model.mla import Context
from k2jax.model.mtp import inside, join
from k2jax.model.rope import look_up as look_up_angles
from k2jax.parallel import activations, dense, layer, schedule, turn
from k2jax.parallel.activations import Named
from k2jax.parallel.layer import EXPERTS, Seen, Slot
from k2jax.parallel.layout import MTP
from k2jax.parallel.mesh import RANKS
from k2jax.parallel.pairing import Coroutine, Done, alone, paired
from k2jax.parallel.stage import Batch, Carry, Pipeline, Stage, at, stage, start, when


class Parts(NamedTuple):
    """What a step observes, the same on all ranks of a stage."""

    next_token: jax.Array
    mtp: jax.Array
    balance: jax.Array
    max_logit_LH: jax.Array  # of this stage's slots
    load_LE: jax.Array
    rounds: jax.Array  # most rounds that any exchange took


def gradients(pipe: Pipeline, weights: dict, router_bias: dict, batch: Batch) -> tuple[dict, Parts]:
    """Gradients of the loss of this rank's rows by this stage's weights, in float32, and what was observed.

    Gradients are not yet summed over the ranks of a stage; `norm_D` and `mtp/norm_D` are the same on every stage.
    """
    here, P = stage(pipe, weights, router_bias, batch), pipe.layout.stages
    carry = start(here, jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), here.weights), _empty_slots(here))
    first, both = pipe.period, pipe.units + P - 1
    ticks = schedule.ticks(P, pipe.layout.chunks, pipe.microbatches)
    carry = lax.fori_loop(0, first, lambda t, c: _tick(here, t, c, forward=True, backward=False), carry)
    if activations.any_on_host(pipe.shape.actions):
        carry = _fetch(here, first, carry)
    carry = lax.fori_loop(first, both, lambda t, c: _tick(here, t, c, forward=True, backward=True), carry)
    carry = lax.fori_loop(both, ticks, lambda t, c: _tick(here, t, c, forward=False, backward=True), carry)
    carry = turn.add_embedding_gradient(here, jnp.int32(ticks), carry)
    return dense.collect(pipe.model, pipe.layout, pipe.shape.exchange, carry.gradients), _observed(pipe, carry)


def evaluate(pipe: Pipeline, weights: dict, router_bias: dict, batch: Batch) -> Float[Array, ""]:
    """Weighted negative log-likelihood of the next tokens of this rank's rows: forward units alone."""
    here = stage(pipe, weights, router_bias, batch)

    def tick(t, carry):
        return _tick(here, t, turn.evaluate(here, t, carry), forward=True, backward=False)

    carry = lax.fori_loop(0, pipe.units + pipe.layout.stages, tick, start(here, None, None))
    return lax.psum(carry.nll[0], RANKS)


def _observed(pipe: Pipeline, carry: Carry) -> Parts:
    """Sums and maxima over the ranks; the pipeline's stages each keep their own slots'."""
    next_token, mtp = lax.psum(carry.nll, RANKS)
    return Parts(
        next_token,
        mtp,
        lax.psum(carry.balance, ("pipeline", *RANKS)) / pipe.parts,
        lax.pmax(carry.max_logit_LH, RANKS),
        lax.psum(carry.load_LE, RANKS),
        lax.pmax(carry.rounds, ("pipeline", *RANKS)),
    )


# --- one tick


class _Unit(NamedTuple):
    """One chunk of one microbatch."""

    chunk: jax.Array
    microbatch: jax.Array
    slot: jax.Array  # of what it keeps between forward and backward
    real: jax.Array  # whether there is such a unit


def _unit(stage: Stage, k, decode) -> _Unit:
    """Unit k in the order of `decode`; the nearest one, not real, if it is out of range."""
    pipe, sizes = stage.pipe, (stage.pipe.layout.stages, stage.pipe.layout.chunks)
    chunk, microbatch = decode(jnp.clip(k, 0, pipe.units - 1), *sizes)
    real = (k >= 0) & (k < pipe.units)
    slot = jnp.asarray(pipe.slot_ZN)[stage.z, schedule.forward_index(chunk, microbatch, *sizes)]
    return _Unit(chunk, microbatch, jnp.where(real, slot, pipe.slots), real)


def _unit_back(stage: Stage, t) -> _Unit:
    """The backward unit of tick t."""
    return _unit(stage, t - stage.pipe.period - (stage.last - stage.z), schedule.backward_unit)


def _tick(stage: Stage, t, carry: Carry, *, forward: bool, backward: bool) -> Carry:
    """The vocabulary's work if it is its turn, a unit each way, and the two permutes."""
    pipe, travel = stage.pipe, stage.pipe.shape.exchange.travel
    if backward:
        carry, d_hidden_BTD = turn.before_backward(stage, t, carry)
        embed_BTD = carry.mtp and carry.mtp.embed_BTD  # looked up before, by the unit now on its way back
    if forward:
        carry = turn.before_forward(stage, t, carry)
    if backward:
        back = _unit_back(stage, t)
        # Read before the forward unit writes: the same slot may be handed on in this tick. From the host a tick ahead.
        if carry.ahead is None:
            carry = _fetch(stage, t, carry)
            stored, carry = carry.ahead, carry._replace(ahead=None)
        else:
            stored, carry = carry.ahead, _fetch(stage, t + 1, carry)
        backward_unit = _backward(stage, back, stored, carry, d_hidden_BTD, embed_BTD)
    if forward:
        ahead = _unit(stage, t - stage.z, schedule.forward_unit)
        x_BTD = jnp.where(ahead.real, carry.x_BTD, 0)

    if forward and backward:
        came_back, went = paired(travel, backward_unit, lambda x: _forward(stage, ahead, x, carry), x_BTD)
    elif forward:
        went = alone(travel, _forward(stage, ahead, x_BTD, carry))
    else:
        came_back = alone(travel, backward_unit)

    if backward:
        d_x_BTD = _ring(came_back.tied, pipe.layout.stages, -1)
    if forward:
        carry = _keep(stage, t, ahead, went, carry)._replace(x_BTD=_ring(went.tied, pipe.layout.stages, 1))
    if backward:
        total, d_embed_BTD = came_back.rest()
        carry = carry._replace(d_x_BTD=d_x_BTD, gradients=total)
        if carry.mtp:
            d_embed_BTD = jnp.where(turn.has_turn(pipe, t), d_embed_BTD, carry.mtp.d_embed_BTD)
            carry = carry._replace(mtp=carry.mtp._replace(d_embed_BTD=d_embed_BTD))
    return carry


def _keep(stage: Stage, t, unit: _Unit, went: Done, carry: Carry) -> Carry:
    """Notes what a forward unit observed, and keeps what it stored for its backward."""
    if carry.ahead is not None:
        # Stored once the unit has ended: the fetches from the host, which come before the first write, run beside all of it.
        went = Done(*lax.optimization_barrier((went.tied, went.rest)))
    stored, seen, hidden_BTD = went.rest
    first = unit.chunk * stage.pipe.layout.layers
    carry = carry._replace(
        max_logit_LH=_update(carry.max_logit_LH, seen.max_logit_H, first, jnp.maximum),
        load_LE=_update(carry.load_LE, seen.load_E, first, jnp.add),
        balance=carry.balance + seen.balance.sum(),
        rounds=jnp.maximum(carry.rounds, seen.rounds.max()),
    )
    if carry.mtp:
        carry = carry._replace(mtp=carry.mtp._replace(hidden_BTD=hidden_BTD))
    if carry.kept is not None:
        away = [activations.put_away(stage.pipe.shape.actions, named) for named in stored]
        put = lambda old, new: lax.dynamic_update_index_in_dim(old, new, unit.slot, 0)  # noqa: E731
        carry = carry._replace(kept=jax.tree.map(put, carry.kept, away))
    if carry.ahead is not None:
        # On the last stage the next backward unit is this one, which was not there yet when the slots were read.
        is_next = _unit_back(stage, t + 1).slot == unit.slot
        carry = carry._replace(ahead=jax.tree.map(lambda new, old: jnp.where(is_next, new, old), stored, carry.ahead))
    return carry


def _fetch(stage: Stage, t, carry: Carry) -> Carry:
    """Reads what is stored for the backward unit of tick t, before anything writes to the slots."""
    slot, of = _unit_back(stage, t).slot, stage.pipe.shape.actions
    read = [activations.fetch(of, jax.tree.map(lambda x: at(x, slot), named)) for named in carry.kept]
    read, kept = lax.optimization_barrier((read, carry.kept))
    return carry._replace(kept=kept, ahead=read)


def _empty_slots(stage: Stage) -> list[Named]:
    """Zeros for what units store."""
    pipe, (_, B, T1) = stage.pipe, stage.batch.tokens_BT.shape
    carry = start(stage, None, None)

    def first(x_BTD):
        return alone(pipe.shape.exchange.travel, _forward(stage, _unit(stage, 0, schedule.forward_unit), x_BTD, carry)).rest[0]

    stored = jax.eval_shape(first, jax.ShapeDtypeStruct((B, T1 - 1, pipe.model.d_model), pipe.model.dtype))
    return [activations.empty(pipe.shape.actions, named, pipe.slots + 1) for named in stored]


def _ring(x_BTD, stages: int, step: int):
    """Passes x one stage on (step 1) or back (-1)."""
    if stages == 1:
        return x_BTD
    return lax.ppermute(x_BTD, "pipeline", [(z, (z + step) % stages) for z in range(stages)])


def _update(total, new, first, combine):
    """`total[first : first + len(new)] = combine(that, new)`."""
    old = lax.dynamic_slice_in_dim(total, first, new.shape[0])
    return lax.dynamic_update_slice_in_dim(total, combine(old, new), first, 0)


# --- a unit each way


def _slot(stage: Stage, unit: _Unit, place: int) -> Slot:
    index = unit.chunk * stage.pipe.layout.layers + place
    kind = jnp.asarray(stage.pipe.layout.kind_ZL, jnp.int32)[stage.z, index]
    return Slot(index, kind, stage.weights["slots"], stage.bias_LE)


def _context(stage: Stage, unit: _Unit, slot: Slot) -> Context:
    """Documents and angles of the unit's microbatch; all padding if the unit is out of range."""
    model = stage.pipe.model
    segments_BT, positions_BT = (at(x, unit.microbatch) for x in (stage.batch.segments_BT, stage.batch.positions_BT))
    inside_BT = segments_BT[:, :-1]
    if model.n_mtp:
        inside_BT = jnp.where(slot.kind == MTP, inside(segments_BT), inside_BT)
    a = model.attention
    cos_BTP, sin_BTP = look_up_angles(a.rope, a.d_rope, inside_BT.shape[1], positions_BT[:, :-1])
    return Context(jnp.where(unit.real, inside_BT, 0), cos_BTP, sin_BTP)


def _may_be_mtp(stage: Stage, place: int) -> bool:
    """Whether MTP's layer stands at this place of some chunk."""
    return bool(stage.pipe.model.n_mtp) and place == stage.pipe.layout.layers - 1


def _join(model: ModelConfig, mtp: dict, hidden_BTD, embed_BTD):
    return join(hidden_BTD, embed_BTD, mtp["hidden_norm_D"], mtp["embed_norm_D"], mtp["project_JD"], model.norm_eps)


def _input(stage: Stage, slot: Slot, place: int, x_BTD, embed_BTD):
    """What goes into a layer: the stream, or in MTP's slot state and embedding joined."""
    if not _may_be_mtp(stage, place):
        return x_BTD
    return when(slot.kind == MTP, lambda x: _join(stage.pipe.model, stage.weights["mtp"], x, embed_BTD), x_BTD)


def _forward(stage: Stage, unit: _Unit, x_BTD, carry: Carry) -> Coroutine:
    """Layer by layer; ends with the output, what is stored of each layer, what they observed, and the last one's input."""
    shape, stored, seen = stage.pipe.shape, [], []
    for place in range(stage.pipe.layout.layers):
        slot, input_BTD = _slot(stage, unit, place), x_BTD
        joined = _input(stage, slot, place, x_BTD, carry.mtp and carry.mtp.embed_BTD)
        x_BTD, observed, named = yield from layer.forward(shape, slot, _context(stage, unit, slot), joined)
        stored.append(named | activations.store(shape.actions, {"input": (input_BTD,)}))
        seen.append(observed)
    return Done(x_BTD, (stored, Seen(*map(jnp.stack, zip(*seen, strict=True))), input_BTD))


def _backward(stage: Stage, unit: _Unit, stored: list[Named], carry: Carry, d_hidden_BTD, embed_BTD) -> Coroutine:
    """Layer by layer from the last; ends with the input's gradient, and a function that adds up those of the weights.

    The experts' of the first layer are formed in that function: beside the permute.
    """
    total = carry.gradients
    d_x_BTD, d_embed_BTD = jnp.where(unit.real, carry.d_x_BTD, 0), None
    d_balance = jnp.where(unit.real, 1.0 / stage.pipe.parts, 0.0)
    experts, d_layers = layer.experts_of(total["slots"]), []
    for place in reversed(range(stage.pipe.layout.layers)):
        slot, named = _slot(stage, unit, place), dict(stored[place])
        (input_BTD,) = activations.load({"input": named.pop("input")}, stage.pipe.model.dtype)["input"]
        joined = _input(stage, slot, place, input_BTD, embed_BTD)
        context = _context(stage, unit, slot)
        back = yield from layer.backward(stage.pipe.shape, slot, context, joined, named, d_x_BTD, d_balance, experts)
        d_x_BTD = back.d_x_BTD
        d_layers.append((slot.index, back.d_weights))
        if _may_be_mtp(stage, place):
            given = total["mtp"], d_x_BTD, jnp.zeros_like(d_x_BTD)
            take_apart = lambda c, x=input_BTD: _take_apart(stage, x, embed_BTD, c)  # noqa: E731
            d_mtp, d_x_BTD, d_embed_BTD = when(slot.kind == MTP, take_apart, given)
            d_x_BTD, total = d_x_BTD + d_hidden_BTD, total | {"mtp": d_mtp}
        if place:
            experts = back.finish()

    def finish():
        rest = layer.without_experts(total["slots"])
        for index, d_weights in d_layers:
            rest = jax.tree.map(lambda a, g, index=index: _add_at(a, g, index), rest, d_weights)
        rest["ffn"] |= dict(zip(EXPERTS, back.finish(), strict=True))
        return total | {"slots": rest}, d_embed_BTD

    return Done(d_x_BTD, finish)


def _take_apart(stage: Stage, hidden_BTD, embed_BTD, carry: tuple[dict, Array, Array]) -> tuple[dict, Array, Array]:
    """The gradient of MTP's input as those of its weights, added up, of the state and of the embedding."""
    total, d_x_BTD, _ = carry
    _, vjp = jax.vjp(lambda w, x, e: _join(stage.pipe.model, w, x, e), stage.weights["mtp"], hidden_BTD, embed_BTD)
    d_weights, d_hidden_BTD, d_embed_BTD = vjp(d_x_BTD)
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, d_weights), d_hidden_BTD, d_embed_BTD


def _add_at(total, new, index):
    return lax.dynamic_update_index_in_dim(total, at(total, index) + new.astype(total.dtype), index, 0)
