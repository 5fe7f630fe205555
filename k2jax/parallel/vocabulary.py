"""Embedding and head with the vocabulary split over `pipeline`: every stage does its share, and no stage waits.

Stage z holds rows z * W/P to (z + 1) * W/P. A look-up is a masked gather and a sum over stages; the loss is a log-sum-exp of
which each stage forms its part. All of it runs inside the `shard_map`; gradients are written out by hand, because the
sums over stages in between are not for automatic differentiation to guess.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def look_up(embed_WD: Float[Array, "W D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Embeddings of tokens, on every stage."""
    row_BT, here_BT = _rows(embed_WD, tokens_BT)
    return lax.psum(jnp.where(here_BT[..., None], embed_WD[row_BT], 0), "pipeline")


def add_gradient(
    total_WD: Float[Array, "W D"], tokens_BT: Int[Array, "B T"], d_x_BTD: Float[Array, "B T D"]
) -> Float[Array, "W D"]:
    """Adds the gradient of a look-up to this stage's rows."""
    row_BT, here_BT = _rows(total_WD, tokens_BT)
    row_BT = jnp.where(here_BT, row_BT, total_WD.shape[0])
    return total_WD.at[row_BT].add(d_x_BTD.astype(total_WD.dtype), mode="drop")


def _rows(table_WD, tokens_BT):
    """Row of each token in this stage's part, and whether it is here."""
    row_BT = tokens_BT - lax.axis_index("pipeline") * table_WD.shape[0]
    here_BT = (row_BT >= 0) & (row_BT < table_WD.shape[0])
    return jnp.where(here_BT, row_BT, 0), here_BT


class HeadGradients(NamedTuple):
    """Weighted negative log-likelihood, its gradient by the hidden states, and the head's gradient added up."""

    nll: jax.Array
    d_hidden_XD: jax.Array
    d_head_WD: jax.Array


def cross_entropy(
    head_WD: Float[Array, "W D"],
    hidden_XD: Float[Array, "X D"],
    targets_X: Int[Array, " X"],
    weights_X: Float[Array, " X"],
    d_head_WD: Float[Array, "W D"],
    scale: float,
    chunk: int,
) -> HeadGradients:
    """`sum weight * nll` of the targets in nats, and `scale` times its gradients, with `chunk` rows of logits at a time.

    `hidden_XD` is the same on every stage, and so is the result; `d_head_WD` is this stage's accumulator.
    """
    hidden, targets, weights = _chunks(hidden_XD, targets_X, weights_X, chunk)

    def add_chunk(carry, xs):
        (nll, d_head_WD), (x_XD, target_X, weight_X) = carry, xs
        logits_XW, shift_X1, label_XW, sums = _softmax_parts(head_WD, x_XD, target_X)
        nll = nll + _nll(sums, weight_X)
        softmax_XW = jnp.exp(logits_XW - shift_X1) / sums[0][:, None]
        d_logits_XW = ((softmax_XW - label_XW) * (scale * weight_X)[:, None]).astype(x_XD.dtype)
        d_head_WD = d_head_WD + jnp.einsum("xw,xd->wd", d_logits_XW, x_XD, preferred_element_type=jnp.float32)
        d_x_XD = jnp.dot(d_logits_XW, head_WD.astype(x_XD.dtype), preferred_element_type=jnp.float32)
        return (nll, d_head_WD), d_x_XD.astype(x_XD.dtype)

    (nll, d_head_WD), d_hidden = lax.scan(add_chunk, (jnp.zeros(()), d_head_WD), (hidden, targets, weights))
    d_hidden_XD = lax.psum(d_hidden, "pipeline").reshape(-1, hidden_XD.shape[-1])[: hidden_XD.shape[0]]
    return HeadGradients(nll, d_hidden_XD, d_head_WD)


def evaluate(
    head_WD: Float[Array, "W D"],
    hidden_XD: Float[Array, "X D"],
    targets_X: Int[Array, " X"],
    weights_X: Float[Array, " X"],
    chunk: int,
) -> Float[Array, ""]:
    """The loss of `cross_entropy` alone."""

    def add_chunk(nll, xs):
        x_XD, target_X, weight_X = xs
        *_, sums = _softmax_parts(head_WD, x_XD, target_X)
        return nll + _nll(sums, weight_X), None

    return lax.scan(add_chunk, jnp.zeros(()), _chunks(hidden_XD, targets_X, weights_X, chunk))[0]


def _chunks(hidden_XD, targets_X, weights_X, chunk):
    """The fewest chunks of equal size; rows of padding have weight 0."""
    X = hidden_XD.shape[0]
    n = -(-X // chunk)
    padding = -X % n

    def split(a):
        return jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1)).reshape(n, -1, *a.shape[1:])

    return split(hidden_XD), split(targets_X), split(weights_X)


def _softmax_parts(head_WD, x_XD, target_X):
    """This stage's logits, the largest of all stages, the targets as ones, and [sum of exponentials, shifted target logit]."""
    logits_XW = jnp.dot(x_XD, head_WD.T.astype(x_XD.dtype), preferred_element_type=jnp.float32)
    shift_X1 = lax.pmax(logits_XW.max(-1, keepdims=True), "pipeline")
    first = lax.axis_index("pipeline") * head_WD.shape[0]
    label_XW = lax.broadcasted_iota(jnp.int32, logits_XW.shape, 1) + first == target_X[:, None]
    parts = jnp.stack([jnp.exp(logits_XW - shift_X1).sum(-1), jnp.where(label_XW, logits_XW - shift_X1, 0).sum(-1)])
    return logits_XW, shift_X1, label_XW, lax.psum(parts, "pipeline")


def _nll(sums, weight_X):
    return jnp.sum(weight_X * (jnp.log(sums[0]) - sums[1]))
