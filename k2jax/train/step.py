"""One training step as a pure function of the state, and the evaluation that leaves no trace in it."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k2jax.config import MeshConfig, RunConfig
from k2jax.model import store, transformer
from k2jax.model.block import Around
from k2jax.model.moe import update_bias
from k2jax.optim.muonclip import muonclip
from k2jax.optim.schedules import learning_rate
from k2jax.parallel import activations, natural, owned_update, pipeline, stage, zero1
from k2jax.parallel.layout import STACKS
from k2jax.parallel.mesh import BATCH, RANKS, cut, microbatches
from k2jax.train.loss import Batch, Counts, Parts, combine, count_targets, cross_entropy, loss, over_ranks, target_masks


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
    return muonclip(config.optim, config.model)


def init_state(config: RunConfig, mesh: Mesh | None = None) -> TrainState:
    """Draws the weights from `config.seed`, or reads them from `config.init`, with the router bias; everything else is zero.

    On a mesh in the owned form, and every process reads its own part alone. Raises ValueError if `config.init` does not hold
    weights of this model.
    """
    if mesh is None:
        params, router_bias = _first_weights(config)
        return jax.jit(lambda p, b: _fresh(config, p, b))(params, router_bias)
    sharding = natural_sharding(config, mesh)
    params, router_bias = _first_weights(config, (sharding.params, sharding.router_bias))
    none = {"params": {}, "router_bias": {}, "opt_state": ()}
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_natural(config, mesh)._replace(**none))
    state = jax.tree.map(_put, zeros, sharding._replace(**none))
    params, opt_state = natural.from_first(zero1.plan(config, _sizes(config, mesh)), mesh)(params)
    return state._replace(params=params, opt_state=opt_state, router_bias=router_bias)


def _first_weights(config: RunConfig, shardings: tuple[dict, dict] | None = None) -> tuple[dict, dict]:
    """Parameters and router bias before the first step, float32."""
    if config.init:
        store.check(Path(config.init), config.model)
        return store.load(Path(config.init), "float32", shardings)[1:]
    drawn = transformer.init(config.model, config.seed)
    return drawn if shardings is None else jax.tree.map(lambda x, sharding: _put(np.asarray(x), sharding), drawn, shardings)


def abstract_state(config: RunConfig, mesh: Mesh | None = None) -> TrainState:
    """Shapes and dtypes of `init_state`'s result, on a mesh with shardings; nothing is allocated."""
    if mesh is None:
        return jax.eval_shape(lambda p, b: _fresh(config, p, b), *transformer.abstract(config.model))
    plan = zero1.plan(config, _sizes(config, mesh))
    params, opt_state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        zero1.abstract_owned(plan),
        zero1.shardings(plan, mesh),
    )
    return abstract_natural(config, mesh)._replace(params=params, opt_state=opt_state)


def abstract_natural(config: RunConfig, mesh: Mesh) -> TrainState:
    """The state of one device, which checkpoints hold, as arrays spread over a mesh."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract_state(config),
        natural_sharding(config, mesh),
    )


def natural_sharding(config: RunConfig, mesh: Mesh) -> TrainState:
    """How `to_natural` spreads the arrays."""
    params, opt_state = natural.natural_sharding(zero1.plan(config, _sizes(config, mesh)), mesh)
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), abstract_state(config))
    return everywhere._replace(params=params, opt_state=opt_state)


def to_natural(config: RunConfig, mesh: Mesh, state: TrainState) -> TrainState:
    """The state as one device would hold it, from its owned form."""
    params, opt_state = natural.to_natural(zero1.plan(config, _sizes(config, mesh)), mesh)(state.params, state.opt_state)
    return state._replace(params=params, opt_state=opt_state)


def from_natural(config: RunConfig, mesh: Mesh, state: TrainState) -> TrainState:
    """The inverse of `to_natural`."""
    params, opt_state = natural.from_natural(zero1.plan(config, _sizes(config, mesh)), mesh)(state.params, state.opt_state)
    return state._replace(params=params, opt_state=opt_state)


def _put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array of which every process has the whole on its host."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _fresh(config: RunConfig, params: dict, router_bias: dict) -> TrainState:
    layers = {"dense": config.model.n_dense, "moe": config.model.n_moe, "mtp": config.model.n_mtp}
    heads = config.model.attention.n_heads
    never_LH = {stack: jnp.zeros((n, heads), jnp.int32) for stack, n in layers.items() if n}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, router_bias, _optimizer(config).init(params), zero, zero, never_LH)


class _Updated(NamedTuple):
    """What one batch makes of the weights, and what it showed."""

    params: dict
    opt_state: optax.OptState
    parts: Parts
    total: jax.Array
    grad_norm: jax.Array
    finite: jax.Array
    update_rms: jax.Array
    rounds: jax.Array  # of the experts' exchange


def make_step(config: RunConfig, mesh: Mesh | None = None) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict]]:
    """Returns the jitted step `(state, batch, total_tokens) -> (state, metrics)`; it consumes the state it is given.

    `total_tokens`, the length of the run, is traced: runs of any budget share one program. Metrics are arrays on the device;
    `k2jax.train.metrics.row` turns them into numbers. On a mesh the rows of the batch are split over `data` and `expert`, and
    the state is in its owned form (`k2jax.parallel.zero1`).
    """
    model, optim = config.model, config.optim
    updated = _updated_on_one(config) if mesh is None else _updated_on_mesh(config, mesh)

    def step(state: TrainState, batch: Batch, total_tokens: jax.Array) -> tuple[TrainState, dict]:
        number = state.step + 1
        # The rate of the tokens that this batch completes: the first step's is not 0, the last one's is the schedule's end.
        tokens = number.astype(jnp.float32) * (config.batch * config.seq_len)
        rate = learning_rate(optim, tokens, total_tokens)
        new = updated(state.params, state.opt_state, state.router_bias, batch, rate)
        router_bias = {
            stack: update_bias(bias, new.parts.load_LE[stack], speed=model.moe.bias_speed, centered=model.moe.bias_centered)
            for stack, bias in state.router_bias.items()
        }
        fired_LH = jax.tree.map(lambda s: (s > optim.qk_tau) & (optim.rule == "muonclip"), new.parts.max_logit_LH)
        last_fired_LH = jax.tree.map(lambda fired, last: jnp.where(fired, number, last), fired_LH, state.last_fired_LH)
        router_bias, last_fired_LH = _if(new.finite, (router_bias, last_fired_LH), (state.router_bias, state.last_fired_LH))
        skips = jnp.where(new.finite, 0, state.skips + 1)
        skips_total = state.skips_total + jnp.where(new.finite, 0, 1)
        metrics = {
            "loss": new.parts.next_token,
            "mtp_loss": new.parts.mtp,
            "balance_loss": new.parts.balance,
            "total_loss": new.total,
            "learning_rate": rate,
            "grad_norm": new.grad_norm,
            "update_rms": new.update_rms,
            "max_logit_LH": new.parts.max_logit_LH,
            "load_LE": new.parts.load_LE,
            "fired_LH": jax.tree.map(lambda fired: fired & new.finite, fired_LH),
            "last_fired_LH": last_fired_LH,
            "exchange_rounds": new.rounds,
            "skips": skips,
            "skips_total": skips_total,
        }
        return TrainState(number, new.params, router_bias, new.opt_state, skips, skips_total, last_fired_LH), metrics

    return jax.jit(step, donate_argnums=0)


def _if(condition: jax.Array, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _updated_on_one(config: RunConfig) -> Callable[..., _Updated]:
    """The update on one device: gradients, then the whole chain; a gradient that is not finite changes nothing."""
    optimizer = _optimizer(config)

    def updated(params: dict, opt_state: optax.OptState, router_bias: dict, batch: Batch, rate: jax.Array) -> _Updated:
        grads, parts, total = gradients(config, params, router_bias, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(total)
        updates, new_state = optimizer.update(grads, opt_state, params, learning_rate=rate, max_logit_LH=parts.max_logit_LH)
        update_rms = optax.tree.norm(updates) / sum(p.size for p in jax.tree.leaves(params)) ** 0.5
        params, opt_state = _if(finite, (optax.apply_updates(params, updates), new_state), (params, opt_state))
        return _Updated(params, opt_state, parts, total, grad_norm, finite, update_rms, jnp.ones((), jnp.int32))

    return updated


def _updated_on_mesh(config: RunConfig, mesh: Mesh) -> Callable[..., _Updated]:
    """The same on a mesh, in one `shard_map`: gather the weights, find the gradients, update what each rank owns.

    Its `check_vma` is off: every vjp inside is of a function without collectives, so nothing is summed that is not written out.
    """
    sizes = _sizes(config, mesh)
    plan = zero1.plan(config, sizes)
    found = _through_pipeline(config, sizes) if cut(sizes) else _on_replica(config, plan)

    def updated(params: dict, opt_state: dict, router_bias: dict, batch: Batch, rate: jax.Array) -> _Updated:
        params, opt_state = zero1.local(params), zero1.local(opt_state)
        weights = zero1.working(plan, params, config.model.dtype)
        grads, parts, max_logit_LH, rounds = found(weights, router_bias, batch)
        total = parts.next_token + config.model.mtp_weight * parts.mtp + parts.balance
        params, opt_state, told = owned_update.update(
            plan, config, params, opt_state, grads, rate, max_logit_LH, jnp.isfinite(total)
        )
        told = told["grad_norm"], told["finite"], told["update_rms"]
        return _Updated(zero1.whole(params), zero1.whole(opt_state), parts, total, *told, rounds)

    owned = zero1.specs(plan)
    everywhere = PartitionSpec()
    return jax.shard_map(
        updated,
        mesh=mesh,
        in_specs=(*owned, everywhere, BATCH, everywhere),
        out_specs=_Updated(*owned, *(everywhere,) * 6),
        check_vma=False,
    )


class _Found(NamedTuple):
    """What a rank finds of a batch."""

    grads: dict  # its stage tree, by its rows, not yet summed over ranks
    parts: Parts  # of the batch
    max_logit_LH: jax.Array  # of the stage's slots
    rounds: jax.Array


def _through_pipeline(config: RunConfig, sizes: MeshConfig) -> Callable[[dict, dict, Batch], _Found]:
    """Gradients where the model is cut."""
    pipe = _pipeline(config, sizes)

    def found(weights: dict, router_bias: dict, batch: Batch) -> _Found:
        rows, _ = rows_of(config, pipe, batch, divide=True)
        grads, seen = pipeline.gradients(pipe, weights, router_bias, rows)
        max_logit_LH = stage.by_stack(pipe, seen.max_logit_LH)
        load_LE = {stack: load for stack, load in stage.by_stack(pipe, seen.load_LE).items() if stack != "dense"}
        parts = Parts(seen.next_token, seen.mtp, seen.balance, max_logit_LH, load_LE)
        return _Found(grads, parts, seen.max_logit_LH, seen.rounds)

    return found


def _on_replica(config: RunConfig, plan: zero1.Plan) -> Callable[[dict, dict, Batch], _Found]:
    """Gradients where every rank has the whole model: the plain loop on the rank's rows."""

    def found(weights: dict, router_bias: dict, batch: Batch) -> _Found:
        # Back to float32, so that gradients are; a cast to the model's dtype, in which they travelled, undoes it.
        params = jax.tree.map(lambda w: w.astype(jnp.float32), natural.of_stage(plan, weights))
        grads, parts, _ = gradients(config, params, router_bias, batch, ranks=RANKS)
        max_logit_LH = jnp.full((plan.layout.slots, config.model.attention.n_heads), -jnp.inf)
        for stack, of_stack_LH in parts.max_logit_LH.items():
            max_logit_LH = max_logit_LH.at[plan.layout.places(STACKS[stack])[1]].set(of_stack_LH)
        return _Found(natural.to_stage(plan, grads), parts, max_logit_LH, jnp.ones((), jnp.int32))

    return found


def _sizes(config: RunConfig, mesh: Mesh) -> MeshConfig:
    return replace(config.mesh, **mesh.shape)


def _pipeline(config: RunConfig, sizes: MeshConfig) -> stage.Pipeline:
    return stage.pipeline(config, sizes, microbatches(config, sizes))


def rows_of(config: RunConfig, pipe: stage.Pipeline, batch: Batch, *, divide: bool) -> tuple[stage.Batch, Counts]:
    """A rank's rows by microbatch with the weights of their targets, 1 or, to `divide`, one over the targets of the batch."""
    next_BT, mtp_BT = target_masks(batch["segments_BT"])
    counts = Counts(*(lax.psum(mask.sum(dtype=jnp.int32), RANKS) for mask in (next_BT, mtp_BT)))
    weights = [
        mask.astype(jnp.float32) / (jnp.maximum(count, 1) if divide else 1)
        for mask, count in zip((next_BT, mtp_BT), counts, strict=True)
    ]
    arrays = (batch["tokens_BT"], batch["segments_BT"], batch["positions_BT"], *weights)
    return stage.Batch(*(a.reshape(pipe.microbatches, -1, a.shape[-1]) for a in arrays)), counts


def gradients(
    config: RunConfig,
    params: dict,
    router_bias: dict,
    batch: Batch,
    around: Around | None = None,
    ranks: tuple[str, ...] = (),
) -> tuple[dict, Parts, jax.Array]:
    """Gradients, parts and value of the loss of a batch, one microbatch at a time, summed in float32.

    The result is that of the undivided batch, exactly: the denominators are the whole batch's (`k2jax.train.loss`). `around` is
    put around every layer; by default it is what the config's activation policy asks for. `ranks` are mesh axes over which the
    rows of the batch are split: gradients are then by the rows here, to be summed over the ranks, the rest is of all rows.
    """
    n, counts = config.microbatches or len(batch["tokens_BT"]), count_targets(batch["segments_BT"], ranks)
    n_parts, around = n * lax.axis_size(ranks), around or activations.around(config)

    def of_part(part: Batch):
        def of_params(params):
            return loss(config.model, params, router_bias, part, counts, n_parts, around)

        value_and_grad = jax.value_and_grad(of_params, has_aux=True)
        (total, parts), grads = value_and_grad(params)
        return grads, parts, total

    def add_part(carry, part):
        grads, parts, total = of_part(part)
        return (jax.tree.map(jnp.add, carry[0], grads), combine(carry[1], parts), carry[2] + total), None

    if n == 1:
        grads, parts, total = of_part(batch)
    else:
        split = jax.tree.map(lambda a: a.reshape(n, -1, a.shape[-1]), batch)
        one = jax.eval_shape(of_part, jax.tree.map(lambda a: a[0], split))
        grads, parts, total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
        lowest = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), parts.max_logit_LH)
        grads, parts, total = lax.scan(add_part, (grads, parts._replace(max_logit_LH=lowest), total), split)[0]
    return grads, over_ranks(parts, ranks), lax.psum(total, ranks)


def make_eval(config: RunConfig, mesh: Mesh | None = None) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """Returns the jitted `(state, batch) -> (sum of the next-token nll in nats, number of targets)`; it changes nothing."""

    evaluate = functools.partial(_evaluate, config) if mesh is None else _evaluate_on_mesh(config, mesh)
    return jax.jit(lambda state, batch: evaluate(state.params, state.router_bias, batch))


def _evaluate(config: RunConfig, params: dict, router_bias: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
    tokens_BT, segments_BT = batch["tokens_BT"], batch["segments_BT"]
    output = transformer.apply(config.model, params, router_bias, tokens_BT, segments_BT, batch["positions_BT"])
    mask_BT = target_masks(segments_BT)[0]
    return cross_entropy(output.hidden_BTD, params["head_WD"], tokens_BT[:, 1:], mask_BT, config.model.loss_chunk)


def _evaluate_on_mesh(config: RunConfig, mesh: Mesh) -> Callable[[dict, dict, Batch], tuple[jax.Array, jax.Array]]:
    sizes = _sizes(config, mesh)
    plan = zero1.plan(config, sizes)
    pipe = _pipeline(config, sizes) if cut(sizes) else None

    def evaluate(params: dict, router_bias: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
        weights = zero1.working(plan, zero1.local(params), config.model.dtype)
        if pipe is None:
            return lax.psum(_evaluate(config, natural.of_stage(plan, weights), router_bias, batch), RANKS)
        rows, counts = rows_of(config, pipe, batch, divide=False)
        return pipeline.evaluate(pipe, weights, router_bias, rows), counts.next_token

    everywhere = PartitionSpec()
    in_specs = (zero1.specs(plan)[0], everywhere, BATCH)
    return jax.shard_map(evaluate, mesh=mesh, in_specs=in_specs, out_specs=(everywhere, everywhere), check_vma=False)
