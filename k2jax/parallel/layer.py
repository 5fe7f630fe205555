"""One layer cut at its exchanges: forward and backward as coroutines that hand out what must travel.

A coroutine yields words that go through the experts' exchange and is sent what arrived (`k2jax.parallel.pairing` drives it).

Forward:  attention, router -> dispatch -> experts -> combine.
Backward: the same up to the router, what was not stored recomputed (`k2jax.parallel.activations`), then dispatch of tokens and
output gradients -> gradients of rows -> their combine -> gradients of router and attention; the experts' weight gradients are
left to the caller, to run beside the pipeline's transfer (report 2.4.2, decoupled weight gradient).
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.config import Action, ModelConfig
from k2jax.kernels import expert_rows, grouped_matmul_rows
from k2jax.kernels.expert_rows import Experts, Gates
from k2jax.model.block import holding
from k2jax.model.mla import Context
from k2jax.parallel import activations, dense
from k2jax.parallel.expert import Exchange
from k2jax.parallel.layout import DENSE, IDENTITY

EXPERTS = ("gate_EDF", "up_EDF", "down_EFD")
Exchanged = Generator[Any, Any, Any]  # yields what travels, is sent what arrived


class Seen(NamedTuple):
    """What a layer observed; nothing at an identity slot."""

    max_logit_H: jax.Array  # -1e30 where there is nothing
    load_E: jax.Array
    balance: jax.Array
    rounds: jax.Array  # of the exchange


class _Ready(NamedTuple):
    """What the experts need of the rest of the layer; differentiable."""

    base_BTD: jax.Array  # the layer's output without the routed experts
    z_BTD: jax.Array  # the experts' input
    weight_XK: jax.Array
    balance: jax.Array


class Slot(NamedTuple):
    """One layer slot: weights of all slots, and which of them."""

    index: Int[Array, ""]
    kind: Int[Array, ""]
    weights: dict  # of all slots, leading axis L
    bias_LE: Float[Array, "L E"]


class Shape(NamedTuple):
    """The fixed numbers of a layer on this mesh."""

    model: ModelConfig
    exchange: Exchange
    block: int  # rows a block of the experts' products
    keep: int  # blocks of which something is kept; all of them unless the routing is unbalanced
    actions: Mapping[str, Action]  # what becomes of a layer's activations


def _before_experts(shape: Shape, kind, bias_E, context: Context, weights: dict, x_BTD) -> tuple[_Ready, tuple]:
    """The layer up to its experts, by the model's own code. An identity slot hands its input on and sends no token."""
    B, T, _ = x_BTD.shape
    # The experts' own weights are not read here: their places hold nothing.
    block = holding(shape.model, weights | {"ffn": weights["ffn"] | dict.fromkeys(EXPERTS, jnp.zeros(()))})
    y_BTD, z_BTD, max_logit_H = block.attend(x_BTD, context)
    real_BT = context.segments_BT > 0
    routing = block.ffn.route(z_BTD, bias_E, real_BT)
    expert_XK, weight_XK, load_E, balance = routing
    lives, goes_X = kind != IDENTITY, real_BT.reshape(-1) & (kind != IDENTITY)
    if shape.model.n_dense:
        expert_XK = jnp.where(kind == DENSE, dense.experts_of_tokens(shape.model, B * T), expert_XK)
        weight_XK = jnp.where(kind == DENSE, 1.0, weight_XK)
    has_router = lives & (kind != DENSE)
    balance = jnp.where(has_router, balance, 0)
    base_BTD = jnp.where(lives, block.ffn.add_shared(y_BTD, z_BTD), x_BTD)
    ready = _Ready(base_BTD, z_BTD, weight_XK, balance)
    return ready, (expert_XK, goes_X, jnp.where(lives, max_logit_H, -1e30), jnp.where(has_router, load_E, 0))


def _prepare(shape: Shape, slot: Slot, context: Context):
    """The function of (weights, x) that `_before_experts` is in this slot, and the slot's weights, experts left out."""

    def take(w):
        return lax.dynamic_index_in_dim(w, slot.index, keepdims=False)

    weights = jax.tree.map(take, without_experts(slot.weights))

    def before(weights, x_BTD):
        return _before_experts(shape, slot.kind, take(slot.bias_LE), context, weights, x_BTD)

    return before, weights


def without_experts(weights: dict) -> dict:
    """The rest of a tree of slots."""
    return weights | {"ffn": {name: w for name, w in weights["ffn"].items() if name not in EXPERTS}}


def experts_of(weights: dict) -> Experts:
    """The experts' three stacks of a tree of slots."""
    return Experts(*(weights["ffn"][name] for name in EXPERTS))


def forward(shape: Shape, slot: Slot, context: Context, x_BTD: Float[Array, "B T D"]) -> Exchanged:
    """Yields twice; returns the layer's output, what it observed, and what is stored of its activations, the input left out."""
    exchange, (B, T, D) = shape.exchange, x_BTD.shape
    before, weights = _prepare(shape, slot, context)
    before = activations.collect(before, activations.stored_names(shape.actions))
    (ready, (expert_XK, goes_X, max_logit_H, load_E)), named = before(weights, x_BTD)
    queues = exchange.queue_up(expert_XK, goes_X)
    z_XD, experts = ready.z_BTD.reshape(B * T, D), experts_of(slot.weights)

    def answer(words, keep):
        arrived = exchange.unpack(words, (z_XD,), expert_XK.shape[1])
        blocks = expert_rows.sort_pairs(arrived.expert_XK, exchange.local, shape.block)
        given = arrived.rows[0], blocks, arrived.weight_XK
        y_XD, gates = grouped_matmul_rows.forward(*given, experts, slot.index, shape.block, keep, shape.keep)
        return exchange.pack_answer(y_XD), arrived, gates

    def send(turn):
        return exchange.pack((z_XD,), ready.weight_XK, expert_XK, queues, turn)

    # Of the first round alone: what further ones need is sent and computed again.
    keeps = {name for name in ("expert_rows", "expert_gates") if shape.actions[name] != "recompute"}
    out, arrived, gates = answer((yield send(0)), shape.keep if "expert_gates" in keeps else 0)
    y_XD = exchange.collect((yield out), queues, 0)

    def further(turn, y_XD):
        return y_XD + exchange.collect(exchange.travel(answer(exchange.travel(send(turn)), 0)[0]), queues, turn)

    if exchange.ranks > 1:
        y_XD = lax.fori_loop(1, arrived.rounds, further, y_XD)
    named |= {name: xs for name, xs in (("expert_rows", arrived.rows), ("expert_gates", tuple(gates))) if name in keeps}
    seen = Seen(max_logit_H, load_E, ready.balance, arrived.rounds)
    return ready.base_BTD + y_XD.reshape(B, T, D), seen, activations.store(shape.actions, named)


class Backward(NamedTuple):
    """Gradients of a layer: of its input and its weights at once, of its experts' weights when `finish` is called."""

    d_x_BTD: jax.Array
    d_weights: dict  # of the slot, experts left out
    finish: Callable[[], Experts]


def backward(
    shape: Shape,
    slot: Slot,
    context: Context,
    x_BTD: Float[Array, "B T D"],
    stored: activations.Named,
    d_y_BTD: Float[Array, "B T D"],
    d_balance: Float[Array, ""],
    gradients: Experts,
) -> Exchanged:
    """Yields twice; returns `Backward`. `gradients` are the experts' accumulators, which `finish` adds to and returns."""
    exchange, (B, T, D) = shape.exchange, x_BTD.shape
    before, weights = _prepare(shape, slot, context)
    named = activations.load(stored, shape.model.dtype)
    held = named.pop("expert_rows", ())  # with them the gradients travel alone
    gates = Gates(*named.pop("expert_gates")) if "expert_gates" in named else None
    ready, vjp, (expert_XK, goes_X, _, _) = jax.vjp(activations.replay(before, named), weights, x_BTD, has_aux=True)
    queues = exchange.queue_up(expert_XK, goes_X)
    both = ready.z_BTD.reshape(B * T, D), d_y_BTD.reshape(B * T, D)
    experts = experts_of(slot.weights)

    def send(turn, rows):
        return exchange.pack(rows, ready.weight_XK, expert_XK, queues, turn)

    def answer(words, rows, held, gates, gradients, keep):
        arrived = exchange.unpack(words, rows, expert_XK.shape[1])
        blocks = expert_rows.sort_pairs(arrived.expert_XK, exchange.local, shape.block)
        given = (*held, *arrived.rows, blocks, arrived.weight_XK)
        rest = slot.index, shape.block, gradients, keep, shape.keep, gates
        out, kept, gradients = grouped_matmul_rows.backward_rows(*given, experts, *rest)
        return exchange.pack_answer(*out), arrived.rounds, (given, kept), gradients

    def collect(words, turn):
        return exchange.collect_gradients(words, x_BTD.dtype, D, queues, turn)

    rows = both[len(held) :]
    out, rounds, (given, kept), gradients = answer((yield send(0, rows)), rows, held, gates, gradients, shape.keep)
    d_z_XD, d_weight_XK = collect((yield out), 0)

    def further(turn, carry):
        (d_z_XD, d_weight_XK), gradients = carry
        out, _, _, gradients = answer(exchange.travel(send(turn, both)), both, (), None, gradients, 0)
        more_XD, more_XK = collect(exchange.travel(out), turn)
        return (d_z_XD + more_XD, d_weight_XK + more_XK), gradients

    if exchange.ranks > 1:
        (d_z_XD, d_weight_XK), gradients = lax.fori_loop(1, rounds, further, ((d_z_XD, d_weight_XK), gradients))
    d_weights, d_x_BTD = vjp(_Ready(d_y_BTD, d_z_XD.reshape(B, T, D), d_weight_XK, d_balance))

    def finish():
        # Not before the input's gradient is there to be sent: the loop runs beside its transfer.
        (*rows, blocks, weight_XK), held, _ = lax.optimization_barrier((given, kept, d_x_BTD))
        return grouped_matmul_rows.backward_weights(*rows, blocks, weight_XK, held, slot.index, shape.block, gradients)

    return Backward(d_x_BTD, d_weights, finish)
