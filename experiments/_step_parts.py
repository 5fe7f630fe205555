"""The parts of a training step as programs of their own: what a step is made of, each timed alone at the run's shapes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k2jax.config import RunConfig
from k2jax.kernels.grouped_matmul import routed_swiglu
from k2jax.model import moe
from k2jax.model.mla import GQA, MLA, Context
from k2jax.model.moe import Dense
from k2jax.model.rope import look_up
from k2jax.model.weights import build
from k2jax.optim.muonclip import muonclip
from k2jax.train.loss import Batch, cross_entropy
from k2jax.train.step import init_state, make_step


def batch_of(config: RunConfig) -> Batch:
    """A batch of drawn tokens, one document a row."""
    shape = config.batch, config.seq_len + 1
    tokens_BT = np.random.default_rng(0).integers(0, config.model.n_words, shape).astype(np.int32)
    positions_BT = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return {"tokens_BT": tokens_BT, "segments_BT": np.ones(shape, np.int32), "positions_BT": np.array(positions_BT)}


def step(config: RunConfig) -> Callable[[], dict]:
    """The whole step, which goes on from its own result at every call."""
    run, batch, tokens = make_step(config), batch_of(config), np.float32(config.tokens)
    state = init_state(config)

    def again() -> dict:
        nonlocal state
        state, metrics = run(state, batch, tokens)
        return metrics

    return again


def parts(config: RunConfig) -> dict[str, Callable[[], object]]:
    """{part: program}, forward and backward in all layers of the trunk that have it.

    Each takes its input as given, so what a step can share or fuse between parts is counted in both.
    """
    model = config.model
    draws = np.random.default_rng(1)
    shape = config.batch, config.seq_len, model.d_model
    x_BTD = jnp.asarray(draws.standard_normal(shape, np.float32), model.dtype)
    real_BT = jnp.ones(shape[:2], bool)
    found = {"attention": _attention(config, x_BTD), "head": _head(config, x_BTD), "optimizer": _optimizer(config)}
    if model.n_dense:
        dense = _module(config, lambda: Dense(model))
        found["dense"] = _gradient(lambda w, x: (dense(w)(x),), dense.weights, x_BTD, times=model.n_dense)
    if model.n_moe:
        E = model.moe.n_experts
        router_DE = jnp.asarray(0.1 * draws.standard_normal((model.d_model, E), np.float32))
        # Popular experts take several times the mean load, as in training.
        bias_E = jnp.asarray(0.1 * draws.standard_normal(E, np.float32))
        routing = jax.jit(moe.route, static_argnums=0)(model.moe, x_BTD, router_DE, bias_E, real_BT)

        def route(router_DE, x_BTD):
            chosen = moe.route(model.moe, x_BTD, router_DE, bias_E, real_BT)
            return chosen.weight_XK, chosen.balance

        layer = _module(config, lambda: moe.MoE(model))

        def experts(weights, x_BTD, expert_XK, weight_XK):
            held = layer(weights)
            x_XD = x_BTD.reshape(-1, x_BTD.shape[-1])
            matrices = (w[...] for w in (held.gate_EDF, held.up_EDF, held.down_EFD))
            y_XD = routed_swiglu(x_XD, expert_XK, weight_XK, *matrices)
            return (held.add_shared(y_XD.reshape(x_BTD.shape), x_BTD),)

        found["router"] = _gradient(route, router_DE, x_BTD, times=model.n_moe)
        given = routing.expert_XK, routing.weight_XK
        found["experts"] = _gradient(experts, layer.weights, x_BTD, *given, times=model.n_moe)
    return found


class _Held:
    """A module apart from its weights."""

    def __init__(self, graphdef: nnx.GraphDef, weights: nnx.State):
        self.graphdef, self.weights = graphdef, weights

    def __call__(self, weights: nnx.State) -> nnx.Module:
        return nnx.merge(self.graphdef, weights)


def _module(config: RunConfig, make: Callable[[], nnx.Module]) -> _Held:
    graphdef, weights = nnx.split(build(make, config.model.init_std, 0))
    return _Held(graphdef, jax.tree.map(lambda w: w.astype(config.model.dtype), weights))


def _gradient(function: Callable[..., tuple], weights, x_BTD, *given, times: int) -> Callable[[], object]:
    """Forward and backward of `function(weights, x, *given) -> arrays`, in weights and x, `times` times."""

    def one(weights, x_BTD, *given):
        out, back = jax.vjp(lambda w, x: function(w, x, *given), weights, x_BTD)
        return back(tuple(jnp.ones_like(y) for y in out))

    run = jax.jit(one)
    return lambda: [run(weights, x_BTD, *given) for _ in range(times)]


def _attention(config: RunConfig, x_BTD) -> Callable[[], object]:
    model, batch = config.model, batch_of(config)
    layer = _module(config, lambda: (MLA if model.attention.kind == "mla" else GQA)(model))
    a, T = model.attention, config.seq_len
    angles = look_up(a.rope, a.d_rope, T, jnp.asarray(batch["positions_BT"][:, :-1]))
    segments_BT = jnp.asarray(batch["segments_BT"][:, :-1])

    def attend(weights, x_BTD, segments_BT, *angles):
        return (layer(weights)(x_BTD, Context(segments_BT, *angles))[0],)

    return _gradient(attend, layer.weights, x_BTD, segments_BT, *angles, times=model.n_layers)


def _head(config: RunConfig, x_BTD) -> Callable[[], object]:
    model, targets_BT = config.model, jnp.asarray(batch_of(config)["tokens_BT"][:, 1:])
    draws = np.random.default_rng(2).standard_normal((model.n_words, model.d_model), np.float32)
    mask_BT = jnp.ones(targets_BT.shape, bool)

    def nll(head_WD, x_BTD, targets_BT):
        return (cross_entropy(x_BTD, head_WD, targets_BT, mask_BT, model.loss_chunk)[0],)

    return _gradient(nll, jnp.asarray(model.init_std * draws), x_BTD, targets_BT, times=1)


def _optimizer(config: RunConfig) -> Callable[[], object]:
    optimizer, state = muonclip(config.optim, config.model), init_state(config)
    grads = jax.tree.map(jnp.ones_like, state.params)
    statistic = jax.tree.map(lambda x: jnp.full(x.shape, 1.0), state.last_fired_LH)
    update = jax.jit(lambda g, s, p, m: optimizer.update(g, s, p, learning_rate=1e-3, max_logit_LH=m))
    return lambda: update(grads, state.opt_state, state.params, statistic)
