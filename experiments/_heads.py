"""What the attention heads of a training run did: their largest logits, their clips, and one clip done by hand."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from k2jax.config import RunConfig
from k2jax.data.corpora import prepare
from k2jax.data.pipeline import train_batches
from k2jax.model import transformer
from k2jax.optim.qk_clip import clip_powers, qk_clip
from k2jax.train.checkpoint import Checkpoints
from k2jax.train.step import TrainState


def largest(rows: Sequence[dict]) -> np.ndarray:
    """The largest attention logit of each step over all heads, from the rows of `metrics.jsonl`; nan if it is not finite."""
    every = [[x for layers in r["max_logit"].values() for x in layers] for r in rows]
    return np.array([np.nan if None in xs else max(xs) for xs in every], np.float64)


def scaled(rows: Sequence[dict], tau: float, scope: str) -> np.ndarray:
    """How many heads the clip scales in each step: by "head" those above tau, by "layer" all of a layer that has one."""
    if scope == "head":
        return np.array([r["heads_clipped"] for r in rows])
    return np.array([_hot_layers(r, tau) * r["heads"] // sum(map(len, r["max_logit"].values())) for r in rows])


def _hot_layers(row: dict, tau: float) -> int:
    return sum(x is not None and x > tau for layers in row["max_logit"].values() for x in layers)


def first_above(values: np.ndarray, level: float) -> int | None:
    """The first step, counted from 1, whose value is above the level; None if there is none."""
    above = np.flatnonzero(values > level)
    return int(above[0]) + 1 if above.size else None


def settled(values: np.ndarray) -> float:
    """The median over the last tenth of the steps."""
    return float(np.median(values[-max(1, len(values) // 10) :]))


def last_state(config: RunConfig) -> TrainState:
    """The state of a run's last checkpoint."""
    with Checkpoints(config.out / "checkpoints") as saved:
        return saved.restore(config).state


def last_fired(config: RunConfig) -> np.ndarray:
    """The step in which each head of a run, [layer, head], was last clipped; 0 for never."""
    return np.concatenate([np.asarray(x) for x in last_state(config).last_fired_LH.values()])


class ByHand(NamedTuple):
    """One clip of a trained model, whose logits on one batch are then computed again."""

    heads: int
    above: int  # heads above tau, which the clip scales
    largest: float  # logit before
    error: float  # relative, worst head, of min(S, tau) when each layer is clipped alone
    together: float  # largest logit when all layers are clipped at once, which moves the inputs of the later ones
    untouched: int  # heads at or below tau whose weights are the same bits after the clip of all


def clip_by_hand(config: RunConfig) -> ByHand:
    """Clips the last weights of a run by the first batch of its data, and measures the logits of that batch before and after.

    A layer's logits depend on its own query and key weights and on all of the layers below, so the exact statement, that head
    h ends at min(S_h, tau), is about one layer at a time (report 2.1).
    """
    state, batch = last_state(config), _first_batch(config)
    max_logits = jax.jit(lambda params, *inputs: transformer.apply(config.model, params, *inputs).aux.max_logit_LH)
    inputs = state.router_bias, batch["tokens_BT"], batch["segments_BT"], batch["positions_BT"]
    clip = jax.jit(lambda params, max_logit_LH: _clip(config, params, max_logit_LH))
    before = {stack: np.asarray(x) for stack, x in max_logits(state.params, *inputs).items()}
    tau, worst = config.optim.qk_tau, 0.0
    for stack, logit_LH in before.items():
        for layer in range(len(logit_LH)):
            one = {s: np.full_like(x, -np.inf) for s, x in before.items()}  # the other layers are left alone
            one[stack][layer] = logit_LH[layer]
            after_H = np.asarray(max_logits(clip(state.params, one), *inputs)[stack][layer], np.float64)
            wanted_H = np.minimum(logit_LH[layer].astype(np.float64), tau)
            worst = max(worst, float(np.max(np.abs(after_H - wanted_H) / np.abs(wanted_H))))
    clipped = clip(state.params, before)
    untouched = sum(_same_heads(config, state.params[s], clipped[s])[x <= tau].sum() for s, x in before.items())
    every = np.concatenate(list(before.values()))
    together = max(float(x.max()) for x in max_logits(clipped, *inputs).values())
    return ByHand(every.size, int((every > tau).sum()), float(every.max()), worst, together, int(untouched))


def _first_batch(config: RunConfig) -> dict:
    shape = {"batch": config.batch, "seq_len": config.seq_len, "seed": config.data_seed}
    batches = train_batches(prepare(config.data), config.data, **shape)
    try:
        return next(batches)
    finally:
        batches.close()


def _clip(config: RunConfig, params: dict, max_logit_LH: dict[str, np.ndarray]) -> dict:
    transform = qk_clip(config.optim, config.model.attention)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transform.update(zero, transform.init(params), params, max_logit_LH=max_logit_LH)
    return optax.apply_updates(params, updates)


def _same_heads(config: RunConfig, before: dict, after: dict) -> np.ndarray:
    """Of a stack, [layer, head]: whether all query and key weights of the head are the same bits."""
    same = []
    for name in clip_powers(config.optim, config.model.attention):
        a, b = (np.asarray(weights["attention"][name]) for weights in (before, after))
        same.append((a == b).all(axis=(-3, -1)))
    return np.logical_and.reduce(same)
