"""One pipeline stage inside the step: its fixed numbers, its weights and rows, and what passes from tick to tick."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.config import MeshConfig, ModelConfig, RunConfig
from k2jax.kernels.expert_rows import block_rows
from k2jax.parallel import activations, dense, mesh, schedule
from k2jax.parallel.expert import Exchange, capacity
from k2jax.parallel.layer import Shape
from k2jax.parallel.layout import STACKS, Layout, layout


class Pipeline(NamedTuple):
    """The fixed numbers of a pipelined step."""

    layout: Layout
    microbatches: int
    parts: int  # microbatches of all ranks together
    slot_ZN: np.ndarray  # where a stage keeps what forward unit n leaves for its backward
    shape: Shape

    @property
    def model(self) -> ModelConfig:
        """The model's config."""
        return self.shape.model

    @property
    def slots(self) -> int:
        """Slots for what units store between forward and backward."""
        return int(self.slot_ZN.max()) + 1

    @property
    def units(self) -> int:
        """Units of a stage, forward or backward."""
        return self.microbatches * self.layout.chunks

    @property
    def period(self) -> int:
        """Ticks from one turn of the vocabulary to the next."""
        return self.layout.stages * self.layout.chunks


def pipeline(config: RunConfig, sizes: MeshConfig, microbatches: int) -> Pipeline:
    """The pipeline of a run on a mesh of these sizes."""
    model, ranks = config.model, sizes.expert * sizes.data
    tokens = config.batch // (microbatches * ranks) * config.seq_len
    room = capacity(model.moe, sizes.expert, tokens, sizes.buffer)
    exchange = Exchange(sizes.expert, model.moe.n_experts, room)
    pairs = tokens * model.moe.n_active
    block = block_rows(pairs, exchange.local)
    keep = -(-int(sizes.buffer * pairs) // block) + min(exchange.local, pairs)
    slot_ZN = schedule.residual_slots(sizes.pipeline, sizes.chunks, microbatches)
    shape = Shape(model, exchange, block, keep, activations.actions(config.activations, mesh.cut(sizes)))
    return Pipeline(layout(model, sizes), microbatches, microbatches * ranks, slot_ZN, shape)


class Batch(NamedTuple):
    """One rank's rows by microbatch, [M, rows, T + 1], and the weight of each position's target in the loss [M, rows, T]."""

    tokens_BT: jax.Array
    segments_BT: jax.Array
    positions_BT: jax.Array
    next_BT: jax.Array  # 1 / targets of the whole batch where there is a next token, else 0
    mtp_BT: jax.Array  # the same for the token after it


class Mtp(NamedTuple):
    """What MTP on the last stage needs from tick to tick."""

    hidden_BTD: jax.Array  # the trunk's last state, of the unit that has just been run
    embed_BTD: jax.Array  # embeddings of the following tokens
    d_embed_BTD: jax.Array  # gradient of such embeddings, still to be added


class Carry(NamedTuple):
    """What passes from tick to tick on one stage; gradients and what they need are None in an evaluation."""

    x_BTD: jax.Array  # arriving from the stage before: the next forward unit's input
    d_x_BTD: jax.Array | None  # arriving from the stage after: the gradient of the next backward unit's output
    kept: list[activations.Named] | None  # by layer of a chunk, what is stored of the units in flight [slots, ...]
    ahead: list[activations.Named] | None  # that of the next backward unit, back from the host; None if nothing is there
    gradients: dict | None
    nll: jax.Array  # next token, MTP
    balance: jax.Array
    max_logit_LH: jax.Array
    load_LE: jax.Array
    rounds: jax.Array
    mtp: Mtp | None  # None without it


class Stage(NamedTuple):
    """One stage's share of a step: its weights, dense layers in their slots, and rows."""

    pipe: Pipeline
    z: jax.Array
    weights: dict
    bias_LE: jax.Array
    batch: Batch

    @property
    def last(self) -> int:
        """The last stage."""
        return self.pipe.layout.stages - 1

    def tokens(self, m) -> Int[Array, "B T"]:
        """Tokens of a microbatch; of the nearest one if it is out of range."""
        return at(self.batch.tokens_BT, jnp.clip(m, 0, self.pipe.microbatches - 1))

    def of_stage(self, stage: int, x_BTD):
        """What stage `stage` holds, on every stage."""
        return lax.psum(jnp.where(self.z == stage, x_BTD, 0), "pipeline")


def stage(pipe: Pipeline, weights: dict, router_bias: dict, batch: Batch) -> Stage:
    """The stage that this device is; `weights` is its stage tree, `router_bias` the whole model's."""
    weights = dense.place(pipe.model, pipe.layout, pipe.shape.exchange, weights)
    return Stage(pipe, lax.axis_index("pipeline"), weights, _bias_of_slots(pipe, router_bias), batch)


def _bias_of_slots(pipe: Pipeline, router_bias: dict[str, Array]) -> Float[Array, "L E"]:
    """The selection biases of this stage's slots; zero where a slot has no router."""
    bias_ZLE = jnp.zeros((*pipe.layout.kind_ZL.shape, pipe.model.moe.n_experts))
    for stack, bias_LE in router_bias.items():
        bias_ZLE = bias_ZLE.at[pipe.layout.places(STACKS[stack])].set(bias_LE)
    return bias_ZLE[lax.axis_index("pipeline")]


def by_stack(pipe: Pipeline, x_LH: Array) -> dict[str, Array]:
    """What each stage knows of its slots, as every stage's knowledge of all layers: {"dense", "moe", "mtp": [layers, ...]}."""
    x_ZLH = lax.all_gather(x_LH, "pipeline")
    places = {stack: pipe.layout.places(kind) for stack, kind in STACKS.items()}
    return {stack: x_ZLH[place] for stack, place in places.items() if place[0].size}


def start(stage: Stage, gradients: dict | None, kept: list[activations.Named] | None) -> Carry:
    """The carry before the first tick; `gradients` and `kept` are zero, or None in an evaluation."""
    pipe, model = stage.pipe, stage.pipe.model
    _, B, T1 = stage.batch.tokens_BT.shape
    x_BTD = jnp.zeros((B, T1 - 1, model.d_model), model.dtype)
    training = gradients is not None
    return Carry(
        x_BTD=x_BTD,
        d_x_BTD=x_BTD if training else None,
        kept=kept,
        ahead=None,
        gradients=gradients,
        nll=jnp.zeros(2),
        balance=jnp.zeros(()),
        max_logit_LH=jnp.full((pipe.layout.slots, model.attention.n_heads), -1e30),
        load_LE=jnp.zeros((pipe.layout.slots, model.moe.n_experts), jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
        mtp=Mtp(x_BTD, x_BTD, x_BTD) if model.n_mtp else None,
    )


def at(x: Array, i) -> Array:
    """`x[i]`."""
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def when(predicate: Array, f, carry):
    """`f(carry)` if the predicate, the same on all devices of a collective in `f`, holds: a loop of 0 or 1 trips.

    Unlike a `cond` it does not copy what passes through it.
    """
    return lax.fori_loop(0, predicate.astype(jnp.int32), lambda _, c: f(c), carry)
