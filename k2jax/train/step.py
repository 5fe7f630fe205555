"""One training step as a pure function of the state, and the evaluation that leaves no trace in it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from k2jax.config import RunConfig
from k2jax.model import transformer
from k2jax.model.moe import update_bias
from k2jax.optim.muonclip import muonclip
from k2jax.optim.schedules import learning_rate
from k2jax.train.loss import Batch, Parts, combine, count_targets, cross_entropy, loss, target_masks


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array  # batches consumed, skipped ones included
    params: dict
    router_bias: dict[str, jax.Array]
    opt_state: optax.OptState
    skips: jax.Array  # non-finite steps in a row, up to now
    skips_total: jax.Array
    last_fired_LH: dict[str, jax.Array]  # the step in which QK-Clip last touched a head; 0 for never


def _optimizer(config: RunConfig) -> optax.GradientTransformationExtraArgs:
    return muonclip(config.optim, config.model.attention)


def init_state(config: RunConfig) -> TrainState:
    """Draws the weights from `config.seed`; everything else is zero."""
    params, router_bias = transformer.init(config.model, config.seed)
    return jax.jit(lambda p, b: _fresh(config, p, b))(params, router_bias)


def abstract_state(config: RunConfig) -> TrainState:
    """Shapes and dtypes of `init_state`'s result, with nothing allocated."""
    return jax.eval_shape(lambda p, b: _fresh(config, p, b), *transformer.abstract(config.model))


def _fresh(config: RunConfig, params: dict, router_bias: dict) -> TrainState:
    layers = {"dense": config.model.n_dense, "moe": config.model.n_moe, "mtp": config.model.n_mtp}
    heads = config.model.attention.n_heads
    never_LH = {stack: jnp.zeros((n, heads), jnp.int32) for stack, n in layers.items() if n}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, router_bias, _optimizer(config).init(params), zero, zero, never_LH)


def make_step(config: RunConfig) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict]]:
    """Returns the jitted step `(state, batch, total_tokens) -> (state, metrics)`; it consumes the state it is given.

    `total_tokens`, the length of the run, is traced: runs of any budget share one program. Metrics are arrays on the device;
    `k2jax.train.metrics.row` turns them into numbers.
    """
    optimizer, model, optim = _optimizer(config), config.model, config.optim

    def step(state: TrainState, batch: Batch, total_tokens: jax.Array) -> tuple[TrainState, dict]:
        number = state.step + 1
        # The rate of the tokens that this batch completes: the first step's is not 0, the last one's is the schedule's end.
        tokens = number.astype(jnp.float32) * (config.batch * config.seq_len)
        rate = learning_rate(optim, tokens, total_tokens)
        grads, parts, total = gradients(config, state.params, state.router_bias, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(total)

        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, learning_rate=rate, max_logit_LH=parts.max_logit_LH
        )
        params = optax.apply_updates(state.params, updates)
        router_bias = {
            stack: update_bias(bias, parts.load_LE[stack], speed=model.moe.bias_speed, centered=model.moe.bias_centered)
            for stack, bias in state.router_bias.items()
        }
        fired_LH = jax.tree.map(lambda s: (s > optim.qk_tau) & (optim.rule == "muonclip"), parts.max_logit_LH)
        last_fired_LH = jax.tree.map(lambda fired, last: jnp.where(fired, number, last), fired_LH, state.last_fired_LH)

        old = state.params, state.router_bias, state.opt_state, state.last_fired_LH
        new = params, router_bias, opt_state, last_fired_LH
        params, router_bias, opt_state, last_fired_LH = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        skips = jnp.where(finite, 0, state.skips + 1)
        skips_total = state.skips_total + jnp.where(finite, 0, 1)
        metrics = {
            "loss": parts.next_token,
            "mtp_loss": parts.mtp,
            "balance_loss": parts.balance,
            "total_loss": total,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "update_rms": optax.tree.norm(updates) / sum(p.size for p in jax.tree.leaves(params)) ** 0.5,
            "max_logit_LH": parts.max_logit_LH,
            "load_LE": parts.load_LE,
            "fired_LH": jax.tree.map(lambda fired: fired & finite, fired_LH),
            "last_fired_LH": last_fired_LH,
            "skips": skips,
            "skips_total": skips_total,
        }
        return TrainState(number, params, router_bias, opt_state, skips, skips_total, last_fired_LH), metrics

    return jax.jit(step, donate_argnums=0)


def gradients(config: RunConfig, params: dict, router_bias: dict, batch: Batch) -> tuple[dict, Parts, jax.Array]:
    """Gradients, parts and value of the loss of a batch, one microbatch at a time, summed in float32.

    The result is that of the undivided batch, exactly: the denominators are the whole batch's (`k2jax.train.loss`).
    """
    n, counts = config.microbatches, count_targets(batch["segments_BT"])

    def of_part(part: Batch):
        value_and_grad = jax.value_and_grad(lambda p: loss(config.model, p, router_bias, part, counts, n), has_aux=True)
        (total, parts), grads = value_and_grad(params)
        return grads, parts, total

    if n == 1:
        return of_part(batch)

    def add_part(carry, part):
        grads, parts, total = of_part(part)
        return (jax.tree.map(jnp.add, carry[0], grads), combine(carry[1], parts), carry[2] + total), None

    split = jax.tree.map(lambda a: a.reshape(n, -1, a.shape[-1]), batch)
    one = jax.eval_shape(of_part, jax.tree.map(lambda a: a[0], split))
    grads, parts, total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
    lowest = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), parts.max_logit_LH)
    return lax.scan(add_part, (grads, parts._replace(max_logit_LH=lowest), total), split)[0]


def make_eval(config: RunConfig) -> Callable[[dict, dict, Batch], tuple[jax.Array, jax.Array]]:
    """Returns the jitted `(params, router_bias, batch) -> (sum of the next-token nll in nats, number of targets)`."""

    def evaluate(params: dict, router_bias: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
        tokens_BT, segments_BT = batch["tokens_BT"], batch["segments_BT"]
        output = transformer.apply(config.model, params, router_bias, tokens_BT, segments_BT, batch["positions_BT"])
        mask_BT = target_masks(segments_BT)[0]
        return cross_entropy(output.hidden_BTD, params["head_WD"], tokens_BT[:, 1:], mask_BT, config.model.loss_chunk)

    return jax.jit(evaluate)
