"""The vocabulary's turn: P of every v*P ticks, in which all stages look words up, count them out, and add what they learned.

In such a tick stage 0 needs the embeddings of its next unit; the unit that left the last stage in the tick before has come
round the ring to stage 0 and needs its loss; and the unit whose backward pass left stage 0 has come to the last stage with
the gradient of its look-up. The last stage runs MTP one tick before each of these, so what MTP reads is looked up one tick of a
turn ahead, and its gradient is added one later; both wait in a buffer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k2jax.model.norm import rms_norm
from k2jax.parallel import schedule, vocabulary
from k2jax.parallel.stage import Carry, Pipeline, Stage, at, when


def has_turn(pipe: Pipeline, t):
    """Whether tick t is one of the vocabulary's."""
    return t % pipe.period < pipe.layout.stages


def before_backward(stage: Stage, t, carry: Carry) -> tuple[Carry, Float[Array, "B T D"]]:
    """What a tick with a backward unit starts with: the due gradient of a look-up, and the head.

    The gradient of the last stage's output is put where its backward unit looks for it; returned beside the carry is that of
    the trunk's last state, which only MTP's stage has.
    """
    carry = when(has_turn(stage.pipe, t) & _is_due(stage.pipe, t), lambda c: add_embedding_gradient(stage, t, c), carry)
    nothing_BTD = jnp.zeros_like(carry.x_BTD)
    return when(_ends(stage.pipe, t), lambda c: _head(stage, t, c[0]), (carry, nothing_BTD))


def before_forward(stage: Stage, t, carry: Carry) -> Carry:
    """What a tick with a forward unit starts with: the look-ups."""
    return when(has_turn(stage.pipe, t), lambda c: _look_up(stage, t, c), carry)


def evaluate(stage: Stage, t, carry: Carry) -> Carry:
    """The loss of the unit that has come round to stage 0, if one has, and nothing else."""
    return when(_ends(stage.pipe, t), lambda c: _evaluate(stage, t, c), carry)


def add_embedding_gradient(stage: Stage, t, carry: Carry) -> Carry:
    """Adds the gradient of the look-up that left stage 0 in the tick before, and MTP's of the turn before."""
    total_WD = carry.gradients["embed_WD"]
    for m, d_BTD, shift in _gradients_due(stage.pipe, t, carry):
        d_BTD = jnp.where(_exists(stage.pipe, m), stage.of_stage(stage.last, d_BTD), 0)
        T = d_BTD.shape[1]
        total_WD = vocabulary.add_gradient(total_WD, stage.tokens(m)[:, shift : shift + T], d_BTD)
    return carry._replace(gradients=carry.gradients | {"embed_WD": total_WD})


def _ended(pipe: Pipeline, t):
    """The microbatch that left the last stage in the tick before t, a tick of the vocabulary; out of range at either end."""
    return (t // pipe.period - 1) * pipe.layout.stages + t % pipe.period


def _exists(pipe: Pipeline, m):
    return (m >= 0) & (m < pipe.microbatches)


def _ends(pipe: Pipeline, t):
    """Whether a microbatch left the last stage in the tick before."""
    return has_turn(pipe, t) & _exists(pipe, _ended(pipe, t))


def _gradients_due(pipe: Pipeline, t, carry: Carry | None) -> list[tuple]:
    """Microbatch, gradient on the last stage, and shift against the tokens, of the look-ups that are due in tick t."""
    m = _ended(pipe, t)
    due = [(m - pipe.layout.stages, carry and carry.d_x_BTD, 0)]
    return due + ([(m - 1, carry and carry.mtp.d_embed_BTD, 1)] if pipe.model.n_mtp else [])


def _is_due(pipe: Pipeline, t):
    due = [_exists(pipe, m) for m, *_ in _gradients_due(pipe, t, None)]
    return jnp.stack(due).any()


def _look_up(stage: Stage, t, carry: Carry) -> Carry:
    """Embeddings of the unit that stage 0 runs in this tick, and those that MTP will read before the next turn."""
    layout = stage.pipe.layout

    def embeddings(tokens_BT):
        return vocabulary.look_up(stage.weights["embed_WD"], tokens_BT).astype(carry.x_BTD.dtype)

    _, m = schedule.forward_unit(t, layout.stages, layout.chunks)
    x_BTD = jnp.where(stage.z == 0, embeddings(stage.tokens(m)[:, :-1]), carry.x_BTD)
    carry = carry._replace(x_BTD=x_BTD)
    if carry.mtp:
        e_BTD = embeddings(stage.tokens(_ended(stage.pipe, t) + 1)[:, 1:])
        carry = carry._replace(mtp=carry.mtp._replace(embed_BTD=e_BTD))
    return carry


class _Stream(NamedTuple):
    """States that the head reads, the gain of their norm, and their targets."""

    x_BTD: jax.Array
    gain_D: jax.Array
    targets_BT: jax.Array
    weight_BT: jax.Array


def _trunk(stage: Stage, t, carry: Carry) -> _Stream:
    """The trunk's last states: they came round to stage 0, or, if MTP stands behind them, the last stage holds them."""
    m = _ended(stage.pipe, t)
    x_BTD = stage.of_stage(stage.last, carry.mtp.hidden_BTD) if carry.mtp else stage.of_stage(0, carry.x_BTD)
    return _Stream(x_BTD, stage.weights["norm_D"], stage.tokens(m)[:, 1:], at(stage.batch.next_BT, m))


def _mtp(stage: Stage, t, carry: Carry) -> _Stream:
    """MTP's states, whose targets are one token further."""
    m = _ended(stage.pipe, t)
    targets_BT = jnp.pad(stage.tokens(m)[:, 2:], ((0, 0), (0, 1)))
    return _Stream(stage.of_stage(0, carry.x_BTD), stage.weights["mtp"]["norm_D"], targets_BT, at(stage.batch.mtp_BT, m))


def _head(stage: Stage, t, carry: Carry) -> tuple[Carry, Float[Array, "B T D"]]:
    total, is_last = carry.gradients, stage.z == stage.last
    d_trunk_BTD, nll, d_gain_D, d_head_WD = _loss(stage, _trunk(stage, t, carry), total["head_WD"], 1.0)
    total = total | {"norm_D": total["norm_D"] + d_gain_D}
    d_out_BTD, d_hidden_BTD, nll_mtp = d_trunk_BTD, jnp.zeros_like(d_trunk_BTD), 0.0
    if carry.mtp:
        weight = stage.pipe.model.mtp_weight
        d_out_BTD, nll_mtp, d_gain_D, d_head_WD = _loss(stage, _mtp(stage, t, carry), d_head_WD, weight)
        d_hidden_BTD = jnp.where(is_last, d_trunk_BTD, 0)
        total = total | {"mtp": total["mtp"] | {"norm_D": total["mtp"]["norm_D"] + d_gain_D}}
    carry = carry._replace(
        d_x_BTD=jnp.where(is_last, d_out_BTD, carry.d_x_BTD),
        gradients=total | {"head_WD": d_head_WD},
        nll=carry.nll + jnp.stack([nll, jnp.asarray(nll_mtp)]),
    )
    return carry, d_hidden_BTD


def _loss(stage: Stage, stream: _Stream, d_head_WD: Float[Array, "W D"], scale: float) -> tuple[Array, Array, Array, Array]:
    """Norm, head and loss of a stream: gradient of the states times `scale`, nll, gradients of gain and head."""
    model, (B, T, D) = stage.pipe.model, stream.x_BTD.shape
    hidden_BTD, vjp = jax.vjp(lambda x, gain: rms_norm(x, gain, model.norm_eps), stream.x_BTD, stream.gain_D)
    given = hidden_BTD.reshape(B * T, D), stream.targets_BT.reshape(-1), stream.weight_BT.reshape(-1)
    got = vocabulary.cross_entropy(stage.weights["head_WD"], *given, d_head_WD, scale, model.loss_chunk)
    d_x_BTD, d_gain_D = vjp(got.d_hidden_XD.reshape(B, T, D))
    return d_x_BTD, got.nll, d_gain_D, got.d_head_WD


def _evaluate(stage: Stage, t, carry: Carry) -> Carry:
    model, stream = stage.pipe.model, _trunk(stage, t, carry)
    hidden_XD = rms_norm(stream.x_BTD, stream.gain_D, model.norm_eps).reshape(-1, model.d_model)
    given = stream.targets_BT.reshape(-1), stream.weight_BT.reshape(-1)
    nll = vocabulary.evaluate(stage.weights["head_WD"], hidden_XD, *given, model.loss_chunk)
    return carry._replace(nll=carry.nll.at[0].add(nll))
