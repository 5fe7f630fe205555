"""Interleaved 1F1B as one lock-step SPMD program: every stage takes the same tick, and no tick branches.

In tick t stage z runs the forward pass of its unit t - z and the backward pass of its unit t - v*P - (P-1-z), of another
microbatch or chunk (`k2jax.parallel.schedule`); what they produce moves one stage on, by one ring permute each way. Three loops
follow each other: v*P ticks of forwards, M*v - v*P + P-1 of both, v*P of backwards. A unit outside 0 <= k < M*v sees padding
alone: it sends no token, adds no gradient, and counts nowhere.

Between forward and backward a unit keeps the input of each of its layers (the rest is recomputed), in slots that a table
computed on the host hands out: v*P + P - 1 of them, however many microbatches there are.

Once in v*P ticks, for P ticks, every stage works on the vocabulary (`k2jax.parallel.vocabulary`): the look-up of stage 0's next
unit, the head of the unit that has just left the last stage, and the gradient of the look-up whose backward pass has just left
stage 0. MTP's layer is the last slot of the last stage; the embeddings it reads are looked up one such tick ahead and their
gradient is added one such tick later, so it needs no ticks of its own. These parts stand in loops of 0 or 1 trips: a `cond`
would copy the gradients that pass through it, every tick.

Collectives a tick: two all_to_all a layer forward and two backward over `expert`, one permute each way over `pipeline`, and in
the vocabulary's ticks sums over `pipeline`. Nothing is summed over `expert` or `data` before the last tick.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.config import MeshConfig, ModelConfig, RunConfig
from k2jax.kernels.expert_rows import block_rows
from k2jax.model.mla import Context, project
from k2jax.model.norm import rms_norm
from k2jax.model.rope import look_up as look_up_angles
from k2jax.parallel import dense, layer, schedule, vocabulary
from k2jax.parallel.expert import Exchange, capacity
from k2jax.parallel.layer import EXPERTS, Seen, Shape, Slot
from k2jax.parallel.layout import DENSE, MOE, MTP, Layout, layout
from k2jax.parallel.pairing import Coroutine, Done, alone, paired

RANKS = ("expert", "data")  # axes over which a stage's ranks hold the same weights, experts apart


class Pipeline(NamedTuple):
    """The fixed numbers of a pipelined step."""

    model: ModelConfig
    layout: Layout
    microbatches: int
    parts: int  # microbatches of all ranks together
    shape: Shape

    @property
    def period(self) -> int:
        """Ticks from one turn of the vocabulary to the next."""
        return self.layout.stages * self.layout.chunks


class Batch(NamedTuple):
    """One rank's rows by microbatch, [M, rows, T + 1], and the weight of each position's target in the loss [M, rows, T]."""

    tokens_BT: jax.Array
    segments_BT: jax.Array
    positions_BT: jax.Array
    next_BT: jax.Array  # 1 / targets of the whole batch where there is a next token, else 0
    mtp_BT: jax.Array  # the same for the token after it


class Parts(NamedTuple):
    """What a step observes, the same on all ranks of a stage."""

    next_token: jax.Array
    mtp: jax.Array
    balance: jax.Array
    max_logit_LH: jax.Array  # of this stage's slots
    load_LE: jax.Array
    rounds: jax.Array  # most rounds that any exchange took


def pipeline(config: RunConfig, sizes: MeshConfig, microbatches: int) -> Pipeline:
    """The pipeline of a run on a mesh of these sizes."""
    model, ranks = config.model, sizes.expert * sizes.data
    rows = config.batch // (microbatches * ranks)
    tokens = rows * config.seq_len
    room = capacity(model.moe, sizes.expert, tokens, sizes.buffer)
    exchange = Exchange(sizes.expert, model.moe.n_experts, room)
    pairs = tokens * model.moe.n_active
    block = block_rows(pairs, exchange.local)
    keep = -(-int(sizes.buffer * pairs) // block) + min(exchange.local, pairs)
    shape = Shape(model, exchange, block, keep)
    return Pipeline(model, layout(model, sizes), microbatches, microbatches * ranks, shape)


class _Carry(NamedTuple):
    """What passes from tick to tick on one stage."""

    x_BTD: jax.Array  # arriving from the stage before: the next forward unit's input
    d_x_BTD: jax.Array | None  # arriving from the stage after: the gradient of the next backward unit's output
    kept: jax.Array | None  # inputs of every layer of the units in flight [slots, layers, B, T, D]
    gradients: dict | None
    nll: jax.Array  # next token, MTP
    balance: jax.Array
    max_logit_LH: jax.Array
    load_LE: jax.Array
    rounds: jax.Array
    mtp: Any  # _Mtp, or None without it


class _Mtp(NamedTuple):
    """What MTP on the last stage needs from tick to tick."""

    hidden_BTD: jax.Array  # the trunk's last state, of the unit that has just been run
    embed_BTD: jax.Array  # embeddings of the following tokens
    d_embed_BTD: jax.Array  # gradient of such embeddings, still to be added


def gradients(pipe: Pipeline, weights: dict, router_bias: dict, batch: Batch) -> tuple[dict, Parts]:
    """Gradients of the loss of this rank's rows by this stage's weights, in float32, and what was observed.

    Gradients are not yet summed over the ranks of a stage; `norm_D` and `mtp/norm_D` are the same on every stage.
    """
    z, P = lax.axis_index("pipeline"), pipe.layout.stages
    stage = _Stage(
        pipe, z, dense.place(pipe.model, pipe.layout, pipe.shape.exchange, weights), _bias_of_slots(pipe, router_bias), batch
    )
    total = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), stage.weights)
    carry = stage.start(total)

    first, both = pipe.period, pipe.microbatches * pipe.layout.chunks + P - 1
    ticks = schedule.ticks(P, pipe.layout.chunks, pipe.microbatches)
    carry = lax.fori_loop(0, first, lambda t, c: stage.tick(t, c, forward=True, backward=False), carry)
    carry = lax.fori_loop(first, both, lambda t, c: stage.tick(t, c, forward=True, backward=True), carry)
    carry = lax.fori_loop(both, ticks, lambda t, c: stage.tick(t, c, forward=False, backward=True), carry)
    carry = stage.add_embedding_gradient(jnp.int32(ticks), carry)
    return dense.collect(pipe.model, pipe.layout, pipe.shape.exchange, carry.gradients), _observed(pipe, carry)


def evaluate(pipe: Pipeline, weights: dict, router_bias: dict, batch: Batch) -> Float[Array, ""]:
    """Weighted negative log-likelihood of the next tokens of this rank's rows: forward units alone."""
    z, P = lax.axis_index("pipeline"), pipe.layout.stages
    stage = _Stage(
        pipe, z, dense.place(pipe.model, pipe.layout, pipe.shape.exchange, weights), _bias_of_slots(pipe, router_bias), batch
    )

    def tick(t, carry):
        m = _window(t, pipe)
        carry = _when(_in_turn(t, pipe) & (m >= 0) & (m < pipe.microbatches), lambda c: stage.evaluate_head(m, c), carry)
        return stage.tick(t, carry, forward=True, backward=False)

    ticks = pipe.microbatches * pipe.layout.chunks + P
    return lax.psum(lax.fori_loop(0, ticks, tick, stage.start(None)).nll[0], RANKS)


def _when(predicate: Array, f: Callable, carry):
    """`f(carry)` if the predicate, the same on all devices, holds; big arrays in the carry are not copied."""
    return lax.fori_loop(0, predicate.astype(jnp.int32), lambda _, c: f(c), carry)


def _in_turn(t, pipe: Pipeline):
    """Whether tick t is one of the vocabulary's."""
    return t % pipe.period < pipe.layout.stages


def _window(t, pipe: Pipeline):
    """The microbatch that left the last stage in the tick before t, a tick of the vocabulary; out of range at either end."""
    return (t // pipe.period - 1) * pipe.layout.stages + t % pipe.period


class _Stage(NamedTuple):
    """One stage's share of a step: its weights and rows."""

    pipe: Pipeline
    z: jax.Array
    weights: dict
    bias_LE: jax.Array
    batch: Batch

    def start(self, total: dict | None) -> _Carry:
        """The carry before the first tick; without gradients if `total` is None."""
        model, lay = self.pipe.model, self.pipe.layout
        _, B, T1 = self.batch.tokens_BT.shape
        x_BTD = jnp.zeros((B, T1 - 1, model.d_model), model.dtype)
        slots = schedule.n_slots(lay.stages, lay.chunks, self.pipe.microbatches)
        L = lay.slots
        zero = jnp.zeros((), jnp.int32)
        return _Carry(
            x_BTD,
            None if total is None else x_BTD,
            None if total is None else jnp.zeros((slots, lay.layers, *x_BTD.shape), x_BTD.dtype),
            total,
            jnp.zeros(2),
            jnp.zeros(()),
            jnp.full((L, model.attention.n_heads), -1e30),
            jnp.zeros((L, model.moe.n_experts), jnp.int32),
            zero,
            _Mtp(x_BTD, x_BTD, x_BTD) if model.n_mtp else None,
        )

    # --- one tick

    def tick(self, t, carry: _Carry, *, forward: bool, backward: bool) -> _Carry:
        """The vocabulary's work if it is its turn, a unit each way, and the two permutes."""
        pipe, stages, chunks = self.pipe, self.pipe.layout.stages, self.pipe.layout.chunks
        d_hidden_BTD = e_BTD = None
        if backward:
            carry = _when(self._embedding_is_due(t), lambda c: self.add_embedding_gradient(t, c), carry)
            m = _window(t, pipe)
            head = _in_turn(t, pipe) & (m >= 0) & (m < pipe.microbatches)
            d_hidden_BTD = jnp.zeros_like(carry.x_BTD)
            carry, d_hidden_BTD = _when(head, lambda c: self.head(m, c[0]), (carry, d_hidden_BTD))
            e_BTD = carry.mtp.embed_BTD if carry.mtp else None  # looked up before, by the unit now on its way back
        if forward:
            carry = _when(_in_turn(t, pipe), lambda c: self.look_up(t, c), carry)

        units = pipe.microbatches * chunks
        table = jnp.asarray(schedule.residual_slots(stages, chunks, pipe.microbatches))[self.z]
        if backward:
            k = t - pipe.period - (stages - 1 - self.z)
            back = _Unit(*schedule.backward_unit(jnp.clip(k, 0, units - 1), stages, chunks), (k >= 0) & (k < units))
            slot = table[schedule.forward_index(back.chunk, back.microbatch, stages, chunks)]
            # Read before the forward unit writes: the same slot may be handed on in this tick.
            inputs, kept = lax.optimization_barrier((lax.dynamic_index_in_dim(carry.kept, slot, keepdims=False), carry.kept))
            carry = carry._replace(kept=kept)
            backward_unit = self._backward(back, inputs, carry, d_hidden_BTD, e_BTD)
        if forward:
            k = t - self.z
            ahead = _Unit(*schedule.forward_unit(jnp.clip(k, 0, units - 1), stages, chunks), (k >= 0) & (k < units))
            x_BTD = jnp.where(ahead.real, carry.x_BTD, 0)
        travel = pipe.shape.exchange.travel
        if forward and backward:
            done_back, done = paired(travel, backward_unit, lambda x: self._forward(ahead, x, carry), x_BTD)
        elif forward:
            done = alone(travel, self._forward(ahead, x_BTD, carry))
        else:
            done_back = alone(travel, backward_unit)

        if backward:
            d_x_BTD = _ring(done_back.tied, stages, -1)
        if forward:
            carry = self._keep(carry, ahead, done, table[jnp.clip(k, 0, units - 1)])
            carry = carry._replace(x_BTD=_ring(done.tied, stages, 1))
        if backward:
            total, d_embed_BTD = done_back.rest()
            carry = carry._replace(d_x_BTD=d_x_BTD, gradients=total)
            if carry.mtp:
                turn = _in_turn(t, pipe)
                kept = jnp.where(turn, d_embed_BTD, carry.mtp.d_embed_BTD)
                carry = carry._replace(mtp=carry.mtp._replace(d_embed_BTD=kept))
        return carry

    def _keep(self, carry: _Carry, unit: "_Unit", done: Done, slot) -> _Carry:
        """Notes what a forward unit observed and keeps its inputs for its backward."""
        inputs, seen, hidden_BTD = done.rest
        here = unit.chunk * self.pipe.layout.layers
        max_logit_LH = _update(carry.max_logit_LH, seen.max_logit_H, here, jnp.maximum)
        load_LE = _update(carry.load_LE, seen.load_E, here, jnp.add)
        carry = carry._replace(
            max_logit_LH=max_logit_LH,
            load_LE=load_LE,
            balance=carry.balance + seen.balance.sum(),
            rounds=jnp.maximum(carry.rounds, seen.rounds.max()),
        )
        if carry.mtp:
            carry = carry._replace(mtp=carry.mtp._replace(hidden_BTD=hidden_BTD))
        if carry.kept is not None:
            before = lax.dynamic_index_in_dim(carry.kept, slot, keepdims=False)
            inputs = jnp.where(unit.real, inputs, before)  # a unit out of range must not write over one in flight
            carry = carry._replace(kept=lax.dynamic_update_index_in_dim(carry.kept, inputs, slot, 0))
        return carry

    # --- a unit each way

    def _slot(self, unit: "_Unit", place: int) -> Slot:
        index = unit.chunk * self.pipe.layout.layers + place
        kind = jnp.asarray(self.pipe.layout.kind_ZL, jnp.int32)[self.z, index]
        return Slot(index, kind, self.weights["slots"], self.bias_LE)

    def _context(self, unit: "_Unit", slot: Slot) -> Context:
        """Documents and angles of the unit's microbatch; all padding if the unit is out of range."""
        a = self.pipe.model.attention
        segments_BT, positions_BT = (_at(x, unit.microbatch) for x in (self.batch.segments_BT, self.batch.positions_BT))
        inside_BT = segments_BT[:, :-1]
        if self.pipe.model.n_mtp:  # to MTP a document's last position is padding
            same_BT = segments_BT[:, :-1] == segments_BT[:, 1:]
            inside_BT = jnp.where((slot.kind == MTP) & ~same_BT, 0, inside_BT)
        cos_BTP, sin_BTP = look_up_angles(a.rope, a.d_rope, inside_BT.shape[1], positions_BT[:, :-1])
        return Context(jnp.where(unit.real, inside_BT, 0), cos_BTP, sin_BTP)

    def _is_mtp(self, slot: Slot, place: int) -> Array | None:
        """Whether this slot may be MTP's (None: never), and if so whether it is."""
        last = self.pipe.model.n_mtp and place == self.pipe.layout.layers - 1
        return slot.kind == MTP if last else None

    def _mtp_input(self, is_mtp, hidden_BTD, embed_BTD):
        """What goes into the layer: in MTP's slot state and embedding joined, elsewhere the stream. A loop of 0 or 1 trips."""
        if is_mtp is None:
            return hidden_BTD
        join = lambda x: _join(self.pipe.model, self.weights["mtp"], x, embed_BTD)  # noqa: E731
        return _when(is_mtp, join, hidden_BTD)

    def _forward(self, unit: "_Unit", x_BTD, carry: _Carry) -> Coroutine:
        inputs, seen, hidden_BTD = [], [], x_BTD
        for place in range(self.pipe.layout.layers):
            slot = self._slot(unit, place)
            hidden_BTD = x_BTD
            inputs.append(x_BTD)
            joined = self._mtp_input(self._is_mtp(slot, place), x_BTD, carry.mtp and carry.mtp.embed_BTD)
            x_BTD, observed = yield from layer.forward(self.pipe.shape, slot, self._context(unit, slot), joined)
            seen.append(observed)
        return Done(x_BTD, (jnp.stack(inputs), Seen(*map(jnp.stack, zip(*seen, strict=True))), hidden_BTD))

    def _backward(self, unit: "_Unit", inputs, carry: _Carry, d_hidden_BTD, embed_BTD) -> Coroutine:
        """Layer by layer from the last; the first one's experts' weight gradients are left for the time of the permute."""
        model, total = self.pipe.model, carry.gradients
        d_x_BTD, d_embed_BTD = jnp.where(unit.real, carry.d_x_BTD, 0), None
        d_balance = jnp.where(unit.real, 1.0 / self.pipe.parts, 0.0)
        experts, d_layers = layer.experts_of(total["slots"]), []
        for place in reversed(range(self.pipe.layout.layers)):
            slot = self._slot(unit, place)
            is_mtp = self._is_mtp(slot, place)
            joined = self._mtp_input(is_mtp, inputs[place], embed_BTD)
            context = self._context(unit, slot)
            back = yield from layer.backward(self.pipe.shape, slot, context, joined, d_x_BTD, d_balance, experts)
            d_x_BTD = back.d_x_BTD
            d_layers.append((slot.index, back.d_weights))
            if is_mtp is not None:

                def split(c, x_BTD=inputs[place]):
                    _, vjp = jax.vjp(lambda w, x, e: _join(model, w, x, e), self.weights["mtp"], x_BTD, embed_BTD)
                    d_w, d_x_BTD, d_embed_BTD = vjp(c[1])
                    return _add(c[0], d_w), d_x_BTD, d_embed_BTD

                mine, d_x_BTD, d_embed_BTD = _when(is_mtp, split, (total["mtp"], d_x_BTD, jnp.zeros_like(d_x_BTD)))
                d_x_BTD = d_x_BTD + d_hidden_BTD
                total = total | {"mtp": mine}
            if place:
                experts = back.finish()

        def finish():
            slots = total["slots"]
            rest = {name: w for name, w in slots.items() if name != "ffn"}
            rest["ffn"] = {name: w for name, w in slots["ffn"].items() if name not in EXPERTS}
            for index, d_weights in d_layers:
                rest = jax.tree.map(lambda a, g, index=index: _add_at(a, g, index), rest, d_weights)
            rest["ffn"] |= dict(zip(EXPERTS, back.finish(), strict=True))
            return total | {"slots": rest}, d_embed_BTD

        return Done(d_x_BTD, finish)

    # --- the vocabulary

    def look_up(self, t, carry: _Carry) -> _Carry:
        """Embeddings of the unit that stage 0 runs in this tick, and those that MTP will read before the next turn."""
        pipe = self.pipe
        _, m = schedule.forward_unit(t, pipe.layout.stages, pipe.layout.chunks)
        embed_WD = self.weights["embed_WD"]
        tokens_BT = self._tokens(m)
        x_BTD = vocabulary.look_up(embed_WD, tokens_BT[:, :-1]).astype(carry.x_BTD.dtype)
        carry = carry._replace(x_BTD=jnp.where(self.z == 0, x_BTD, carry.x_BTD))
        if carry.mtp:
            following_BT = self._tokens(_window(t, pipe) + 1)[:, 1:]
            e_BTD = vocabulary.look_up(embed_WD, following_BT).astype(carry.x_BTD.dtype)
            carry = carry._replace(mtp=carry.mtp._replace(embed_BTD=e_BTD))
        return carry

    def head(self, m, carry: _Carry) -> tuple[_Carry, Float[Array, "B T D"]]:
        """Loss of microbatch m, which has come round to stage 0; the gradient of the last stage's output is put where the next
        backward unit looks for it. Returns also the gradient of the trunk's last state, for MTP's stage."""
        model, total = self.pipe.model, carry.gradients
        out_BTD = self._from_stage(0, carry.x_BTD)
        targets_BT = self._tokens(m)[:, 1:]
        d_hidden_BTD, nll = jnp.zeros_like(out_BTD), carry.nll
        if carry.mtp:
            after_BT = jnp.pad(targets_BT[:, 1:], ((0, 0), (0, 1)))
            gain_D, weight_BT = self.weights["mtp"]["norm_D"], _at(self.batch.mtp_BT, m)
            got = self._loss(out_BTD, gain_D, after_BT, weight_BT, total["head_WD"], model.mtp_weight)
            d_out_BTD, d_gain_D, total, nll = (
                got.d_x_BTD,
                got.d_gain_D,
                total | {"head_WD": got.d_head_WD},
                nll.at[1].add(got.nll),
            )
            total = total | {"mtp": total["mtp"] | {"norm_D": total["mtp"]["norm_D"] + d_gain_D}}
            out_BTD = self._from_stage(self.pipe.layout.stages - 1, carry.mtp.hidden_BTD)
        got = self._loss(out_BTD, self.weights["norm_D"], targets_BT, _at(self.batch.next_BT, m), total["head_WD"], 1.0)
        total = total | {"head_WD": got.d_head_WD, "norm_D": total["norm_D"] + got.d_gain_D}
        last = self.z == self.pipe.layout.stages - 1
        if carry.mtp:
            d_hidden_BTD = jnp.where(last, got.d_x_BTD, 0)
        else:
            d_out_BTD = got.d_x_BTD
        d_x_BTD = jnp.where(last, d_out_BTD, carry.d_x_BTD)
        return carry._replace(d_x_BTD=d_x_BTD, gradients=total, nll=nll.at[0].add(got.nll)), d_hidden_BTD

    def _loss(self, x_BTD, gain_D, targets_BT, weight_BT, d_head_WD, scale: float) -> "_Loss":
        """Norm, head and loss of a stream that is the same on every stage, with gradients times `scale`."""
        model = self.pipe.model
        B, T, D = x_BTD.shape
        hidden_BTD, vjp = jax.vjp(lambda x, gain: rms_norm(x, gain, model.norm_eps), x_BTD, gain_D)
        given = hidden_BTD.reshape(B * T, D), targets_BT.reshape(-1), weight_BT.reshape(-1)
        got = vocabulary.cross_entropy(self.weights["head_WD"], *given, d_head_WD, scale, model.loss_chunk)
        d_x_BTD, d_gain_D = vjp(got.d_hidden_XD.reshape(B, T, D))
        return _Loss(got.nll, d_x_BTD, d_gain_D, got.d_head_WD)

    def evaluate_head(self, m, carry: _Carry) -> _Carry:
        """Loss alone."""
        model = self.pipe.model
        if carry.mtp:
            x_BTD = self._from_stage(self.pipe.layout.stages - 1, carry.mtp.hidden_BTD)
        else:
            x_BTD = self._from_stage(0, carry.x_BTD)
        hidden_BTD = rms_norm(x_BTD, self.weights["norm_D"], model.norm_eps)
        given = self._tokens(m)[:, 1:].reshape(-1), _at(self.batch.next_BT, m).reshape(-1)
        hidden_XD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        nll = vocabulary.evaluate(self.weights["head_WD"], hidden_XD, *given, model.loss_chunk)
        return carry._replace(nll=carry.nll.at[0].add(nll))

    def _embedding_is_due(self, t):
        pipe = self.pipe
        m = self._returned(t)
        due = (m >= 0) & (m < pipe.microbatches)
        if pipe.model.n_mtp:
            due |= (_window(t, pipe) > 0) & (_window(t, pipe) <= pipe.microbatches)
        return _in_turn(t, pipe) & due

    def _returned(self, t):
        """The microbatch whose backward pass left stage 0 in the tick before t, a tick of the vocabulary."""
        return _window(t, self.pipe) - self.pipe.layout.stages

    def add_embedding_gradient(self, t, carry: _Carry) -> _Carry:
        """Adds the gradient of the look-up that left stage 0 in the tick before, and MTP's of the turn before."""
        last, M = self.pipe.layout.stages - 1, self.pipe.microbatches
        m = self._returned(t)
        d_x_BTD = jnp.where((m >= 0) & (m < M), self._from_stage(last, carry.d_x_BTD), 0)
        total_WD = vocabulary.add_gradient(carry.gradients["embed_WD"], self._tokens(m)[:, :-1], d_x_BTD)
        if carry.mtp:
            m = _window(t, self.pipe) - 1
            d_e_BTD = jnp.where((m >= 0) & (m < M), self._from_stage(last, carry.mtp.d_embed_BTD), 0)
            total_WD = vocabulary.add_gradient(total_WD, self._tokens(m)[:, 1:], d_e_BTD)
        return carry._replace(gradients=carry.gradients | {"embed_WD": total_WD})

    def _tokens(self, m) -> Int[Array, "B T"]:
        return _at(self.batch.tokens_BT, jnp.clip(m, 0, self.pipe.microbatches - 1))

    def _from_stage(self, stage: int, x_BTD):
        """What stage `stage` holds, on every stage."""
        return lax.psum(jnp.where(self.z == stage, x_BTD, 0), "pipeline")


def _stage(pipe: Pipeline, weights: dict, router_bias: dict, batch: Batch) -> _Stage:
    weights = dense.place(pipe.model, pipe.layout, pipe.shape.exchange, weights)
    return _Stage(pipe, lax.axis_index("pipeline"), weights, _bias_of_slots(pipe, router_bias), batch)


class _Loss(NamedTuple):
    nll: jax.Array
    d_x_BTD: jax.Array
    d_gain_D: jax.Array
    d_head_WD: jax.Array


class _Unit(NamedTuple):
    """Chunk and microbatch of a unit, and whether there is such a unit."""

    chunk: jax.Array
    microbatch: jax.Array
    real: jax.Array


def _join(model: ModelConfig, mtp: dict, hidden_BTD, embed_BTD):
    """MTP's input: state and embedding of the next token, normed and projected (`k2jax.model.mtp`)."""
    eps = model.norm_eps
    parts = rms_norm(hidden_BTD, mtp["hidden_norm_D"], eps), rms_norm(embed_BTD, mtp["embed_norm_D"], eps)
    return project(jnp.concatenate(parts, -1), mtp["project_JD"])


def _ring(x_BTD, stages: int, step: int):
    """Passes x one stage on (step 1) or back (-1)."""
    if stages == 1:
        return x_BTD
    return lax.ppermute(x_BTD, "pipeline", [(z, (z + step) % stages) for z in range(stages)])


def _at(x, m):
    return lax.dynamic_index_in_dim(x, m, keepdims=False)


def _update(total, new, start, combine):
    """`total[start : start + len(new)] = combine(that, new)`."""
    old = lax.dynamic_slice_in_dim(total, start, new.shape[0])
    return lax.dynamic_update_slice_in_dim(total, combine(old, new), start, 0)


def _add_at(total, new, index):
    return lax.dynamic_update_index_in_dim(total, _at(total, index) + new.astype(total.dtype), index, 0)


def _add(total: dict, new: dict) -> dict:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new)


def _bias_of_slots(pipe: Pipeline, router_bias: dict) -> Float[Array, "L E"]:
    """The selection biases of this stage's slots; zero where a slot has no router."""
    lay, model = pipe.layout, pipe.model
    rows = [*router_bias.values(), jnp.zeros((1, model.moe.n_experts))]
    stacks = list(router_bias)
    first = dict(zip(stacks, np.cumsum([0, *(router_bias[s].shape[0] for s in stacks[:-1])]), strict=True)) if stacks else {}
    none = sum(router_bias[s].shape[0] for s in stacks)
    index_ZL = np.full(lay.kind_ZL.shape, none)
    for kind, stack in ((MOE, "moe"), (MTP, "mtp")):
        if stack in first:
            index_ZL = np.where(lay.kind_ZL == kind, first[stack] + lay.layer_ZL, index_ZL)
    return jnp.concatenate(rows)[jnp.asarray(index_ZL)[lax.axis_index("pipeline")]]


def by_stack(pipe: Pipeline, x_LH: Array) -> dict[str, Array]:
    """What each stage knows of its slots, as every stage's knowledge of all layers: {"dense", "moe", "mtp": [layers, ...]}."""
    lay = pipe.layout
    everything = lax.all_gather(x_LH, "pipeline").reshape(-1, *x_LH.shape[1:])
    out = {}
    for kind, stack in ((DENSE, "dense"), (MOE, "moe"), (MTP, "mtp")):
        flat = np.flatnonzero(lay.kind_ZL.reshape(-1) == kind)
        if flat.size:
            out[stack] = everything[flat[np.argsort(lay.layer_ZL.reshape(-1)[flat])]]
    return out


def _observed(pipe: Pipeline, carry: _Carry) -> Parts:
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
