"""QK-Clip: after the update, shrinks the query and key weights of the heads whose attention logits went over tau.

A head whose largest logit S in this step's forward pass is above tau has its logits scaled by gamma = tau / S, shared out
between query and key. It is the last transform of the chain: it edits updates so that `params + updates` is the clipped
weight, and a head at or below tau keeps its update bit for bit. No gradient flows through it; the momentum stays as it is.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from k2jax.axes import axes_of
from k2jax.config import AttentionConfig, OptimConfig


def qk_clip(config: OptimConfig, attention: AttentionConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the clip as a transform; its `update` takes `max_logit_LH`, {first key of the path: [L, H]}.

    MLA: q_nope and k_nope share gamma by `qk_alpha`, q_rope takes all of it since k_rope belongs to every head. GQA "group":
    the queries and the key of a group share the gamma of its worst head (MHA is groups of one); "query": each query takes
    its own gamma and keys stay. With `qk_scope` "layer", the naive clip, every head takes its layer's worst. A statistic
    that does not match the attention layers of the tree, one for one and in shape, raises ValueError. Source: K2 report 2.1,
    algorithm 1; GQA is our extension.
    """
    powers = clip_powers(config, attention)

    def update_fn(updates, state, params=None, *, max_logit_LH: Mapping[str, ArrayLike], **extra_args):
        del extra_args
        if params is None:
            raise ValueError("QK-Clip scales weights, so update needs params; got None")
        gammas = {}
        for stack, shapes in _attention_layers(params, powers).items():
            logit_LH = _statistic(max_logit_LH, stack, next(iter(shapes.values())))
            key_heads = {axes_of(name)[1]: shape[-2] for name, shape in shapes.items()}.get("G", logit_LH.shape[-1])
            gammas[stack] = _gammas(config, logit_LH, key_heads)
        unknown = sorted(set(max_logit_LH) - set(gammas))
        if unknown:
            raise ValueError(f"max_logit_LH has {unknown}, and the parameters have attention only in {sorted(gammas)}")

        def clip(path, update, weight):
            name = path[-1].key
            if not (powers.get(name) and "attention" in (key.key for key in path)):
                return update
            return _scale(update, weight, gammas[path[0].key][axes_of(name)[1]], powers[name])

        return jax.tree.map_with_path(clip, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def clip_powers(config: OptimConfig, attention: AttentionConfig) -> dict[str, float]:
    """Returns {leaf: power of gamma that scales it}, the query first. The second axis of each is its head, H or G."""
    alpha = config.qk_alpha
    if attention.kind == "mla":
        return {"q_nope_QHN": alpha, "k_nope_CHN": 1 - alpha, "q_rope_QHR": 1.0}
    return {"q_DHR": 1.0, "k_DGR": 0.0} if config.qk_gqa == "query" else {"q_DHR": alpha, "k_DGR": 1 - alpha}


def _attention_layers(params: optax.Params, powers: Mapping[str, float]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Stack -> shapes of the leaves QK-Clip scales; raises where one is missing or a stack has two attention layers."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    layers: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for path, leaf in flat:
        *layer, name = (key.key for key in path)
        if "attention" in layer:
            layers.setdefault(tuple(layer), {})[name] = leaf.shape
    found = {}
    for layer, shapes in layers.items():
        missing = [name for name in powers if name not in shapes]
        if missing:
            raise ValueError(f"QK-Clip scales {', '.join(powers)}; {'/'.join(layer)} has no {', '.join(missing)}")
        if layer[0] in found:
            raise ValueError(f"one statistic belongs to one stack; {'/'.join(layer)} is the second attention of {layer[0]!r}")
        found[layer[0]] = {name: shapes[name] for name in powers}
    return found


def _statistic(max_logit_LH: Mapping[str, ArrayLike], stack: str, query: tuple[int, ...]) -> Array:
    """The stack's statistic, checked against the shape of its query weight."""
    if stack not in max_logit_LH:
        raise ValueError(f"max_logit_LH has no entry for the attention of {stack!r}; it has {sorted(max_logit_LH)}")
    logit_LH = jnp.asarray(max_logit_LH[stack], jnp.float32)
    expected = (*query[:-3], query[-2])
    if logit_LH.shape != expected:
        raise ValueError(
            f"max_logit_LH[{stack!r}] must have a row a layer and a column a head, {expected}; got {logit_LH.shape}"
        )
    return logit_LH


def _gammas(config: OptimConfig, logit_LH: Float[Array, "... H"], key_heads: int) -> dict[str, Float[Array, "..."]]:
    """Head letter -> tau / max(tau, S): exactly 1 at or below tau, whatever the sign of S."""
    if config.qk_scope == "layer":
        logit_LH = jnp.broadcast_to(logit_LH.max(-1, keepdims=True), logit_LH.shape)
    if config.qk_gqa == "query" or key_heads == logit_LH.shape[-1]:
        gamma = config.qk_tau / jnp.maximum(config.qk_tau, logit_LH)
        return {"H": gamma, "G": gamma}
    # Query heads of a group stand next to each other: head h reads key h // (H / G).
    size = logit_LH.shape[-1] // key_heads
    worst_LG = logit_LH.reshape(*logit_LH.shape[:-1], key_heads, size).max(-1)
    gamma = config.qk_tau / jnp.maximum(config.qk_tau, worst_LG)
    return {"H": jnp.repeat(gamma, size, axis=-1), "G": gamma}


def _scale(
    update: Float[ArrayLike, "... rows heads width"],
    weight: Float[ArrayLike, "... rows heads width"],
    gamma: Float[Array, "... heads"],
    power: float,
) -> Float[Array, "... rows heads width"]:
    """The update that ends at gamma^power * (weight + update); heads with gamma 1 keep theirs untouched."""
    gamma = gamma[..., None, :, None]
    return jnp.where(gamma == 1, update, gamma**power * (weight + update) - weight)
