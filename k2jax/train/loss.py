"""The training objective: next-token cross-entropy, multi-token prediction and expert balance.

Every part of a batch is divided by the targets of the whole batch, so the parts of a batch add up: the sum over microbatches
is the loss of the batch, and so is the sum of their gradients, however unevenly the targets fall.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from k2jax.config import ModelConfig
from k2jax.model import transformer
from k2jax.model.block import Around, keep

Batch = dict[str, jax.Array]  # tokens_BT, segments_BT, positions_BT: int32 [batch, seq_len + 1]


class Counts(NamedTuple):
    """Targets of a whole batch, the denominators of its means."""

    next_token: Int[Array, ""]
    mtp: Int[Array, ""]


class Parts(NamedTuple):
    """What one part of a batch adds to the loss, and what its forward pass observed."""

    next_token: Float[Array, ""]  # nats; summed over the parts, the mean over all targets
    mtp: Float[Array, ""]  # the same for the token after the next, unweighted
    balance: Float[Array, ""]  # balance loss, alpha included
    max_logit_LH: dict[str, jax.Array]
    load_LE: dict[str, jax.Array]


def target_masks(segments_BS: Int[Array, "B S"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Which of the first S - 1 positions have a next token, and one after it, in their own document; padding has none."""
    here, following = segments_BS[:, :-1], segments_BS[:, 1:]
    next_BT = (here == following) & (here != 0)
    return next_BT, next_BT & jnp.pad(next_BT[:, 1:], ((0, 0), (0, 1)))


def count_targets(segments_BS: Int[Array, "B S"], ranks: tuple[str, ...] = ()) -> Counts:
    """Targets of a batch, which the mesh axes `ranks` split; at least 1 each, so that a batch of padding divides by no zero."""
    counts = lax.psum([mask_BT.sum(dtype=jnp.int32) for mask_BT in target_masks(segments_BS)], ranks)
    return Counts(*(jnp.maximum(count, 1) for count in counts))


def loss(
    config: ModelConfig,
    params: dict,
    router_bias: dict[str, jax.Array],
    batch: Batch,
    counts: Counts | None = None,
    n_parts: int = 1,
    around: Around = keep,
) -> tuple[Float[Array, ""], Parts]:
    """`next token + mtp_weight * MTP + balance` of one of `n_parts` equal parts of a batch (DeepSeek-V3 eq. 17, 24-25).

    `counts` are the targets of the whole batch; left
    out, this part is the batch. Position i predicts token i + 1; MTP's, which also sees that token, predicts i + 2. `around`
    is the activation policy.
    """
    counts = count_targets(batch["segments_BT"]) if counts is None else counts
    given = batch["tokens_BT"], batch["segments_BT"], batch["positions_BT"]
    output = transformer.apply(config, params, router_bias, *given, around)
    next_BT, mtp_BT = target_masks(batch["segments_BT"])
    targets_BT = batch["tokens_BT"][:, 1:]
    nll, _ = cross_entropy(output.hidden_BTD, params["head_WD"], targets_BT, next_BT, config.loss_chunk)
    next_token, mtp, balance = nll / counts.next_token, jnp.zeros(()), output.aux.balance / n_parts
    if output.mtp_BTD is not None:
        after_BT = jnp.pad(targets_BT[:, 1:], ((0, 0), (0, 1)))
        mtp = cross_entropy(output.mtp_BTD, params["head_WD"], after_BT, mtp_BT, config.loss_chunk)[0] / counts.mtp
    parts = Parts(next_token, mtp, balance, output.aux.max_logit_LH, output.aux.load_LE)
    return next_token + config.mtp_weight * mtp + balance, parts


def combine(a: Parts, b: Parts) -> Parts:
    """Two parts of a batch as one: losses and loads by sum, largest logits by maximum."""
    add = functools.partial(jax.tree.map, jnp.add)
    return Parts(
        a.next_token + b.next_token,
        a.mtp + b.mtp,
        a.balance + b.balance,
        jax.tree.map(jnp.maximum, a.max_logit_LH, b.max_logit_LH),
        add(a.load_LE, b.load_LE),
    )


def over_ranks(parts: Parts, ranks: tuple[str, ...]) -> Parts:
    """The same over ranks that have a part each."""
    sums = lax.psum(parts._replace(max_logit_LH={}), ranks)
    return sums._replace(max_logit_LH=lax.pmax(parts.max_logit_LH, ranks))


def cross_entropy(
    hidden_BTD: Float[Array, "B T D"],
    head_WD: Float[Array, "W D"],
    targets_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    chunk: int,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum of the negative log-likelihoods of the targets where the mask holds, in nats, and how many those are.

    At most `chunk` rows of logits, float32, exist at a time, in the backward pass as well.
    """
    X, D = mask_BT.size, hidden_BTD.shape[-1]
    n_chunks = -(-X // chunk)
    padding = -X % n_chunks  # the fewest chunks, of equal size

    def split(a, *width):
        return jnp.pad(a.reshape(X, *width), ((0, padding),) + ((0, 0),) * len(width)).reshape(n_chunks, -1, *width)

    sum_nll = _sum_nll(split(hidden_BTD, D), head_WD, split(targets_BT), split(mask_BT))
    return sum_nll, mask_BT.sum(dtype=jnp.int32)


@jax.custom_vjp
def _sum_nll(hidden, head_WD, targets, mask):
    """Chunks hidden [n, chunk, D], targets and mask [n, chunk] -> sum of the nll.

    Under differentiation the gradients are formed in the forward pass, while a chunk's logits are at hand: the result is a sum
    of known sign, so its cotangent only rescales them. That saves the second product with the head.
    """

    def add_chunk(total, xs):
        x_XD, target_X, mask_X = xs
        logits_XW, shift_X1 = _logits(x_XD, head_WD)
        normalizer_X1 = jnp.exp(logits_XW - shift_X1).sum(-1, keepdims=True)
        return total + _nll(logits_XW, shift_X1, normalizer_X1, target_X, mask_X), None

    return _over_chunks(add_chunk, jnp.zeros(()), (hidden, targets, mask))[0]


def _forward(hidden, head_WD, targets, mask):
    head = head_WD.astype(hidden.dtype)

    def add_chunk(carry, xs):
        (total, d_head_WD), (x_XD, target_X, mask_X) = carry, xs
        logits_XW, shift_X1 = _logits(x_XD, head_WD)
        e_XW = jnp.exp(logits_XW - shift_X1)
        normalizer_X1 = e_XW.sum(-1, keepdims=True)
        total = total + _nll(logits_XW, shift_X1, normalizer_X1, target_X, mask_X)
        weight_X1 = mask_X[:, None].astype(jnp.float32)
        is_target_XW = lax.broadcasted_iota(jnp.int32, e_XW.shape, 1) == target_X[:, None]
        d_logits_XW = (e_XW * (weight_X1 / normalizer_X1) - is_target_XW * weight_X1).astype(hidden.dtype)
        d_x_XD = jnp.dot(d_logits_XW, head, preferred_element_type=jnp.float32)
        # A product that contracts the rows of both is several times slower on CPU: the barriers keep XLA from making it one.
        x_DX = lax.optimization_barrier(x_XD.T)
        d_head_DW = lax.optimization_barrier(jnp.dot(x_DX, d_logits_XW, preferred_element_type=jnp.float32))
        return (total, d_head_WD + d_head_DW.T), d_x_XD.astype(hidden.dtype)

    start = jnp.zeros(()), jnp.zeros(head_WD.shape, jnp.float32)
    (total, d_head_WD), d_hidden = _over_chunks(add_chunk, start, (hidden, targets, mask))
    return total, (d_hidden, d_head_WD.astype(head_WD.dtype))


def _backward(saved, cotangent):
    d_hidden, d_head_WD = saved
    return (cotangent * d_hidden).astype(d_hidden.dtype), (cotangent * d_head_WD).astype(d_head_WD.dtype), None, None


_sum_nll.defvjp(_forward, _backward)


def _over_chunks(add_chunk, start, chunks):
    """A scan, or one call when there is one chunk."""
    if chunks[1].shape[0] > 1:
        return lax.scan(add_chunk, start, chunks)
    carry, out = add_chunk(start, jax.tree.map(lambda a: a[0], chunks))
    return carry, None if out is None else out[None]


def _logits(x_XD, head_WD):
    """Logits in float32, and the largest of each row."""
    logits_XW = jnp.dot(x_XD, head_WD.T.astype(x_XD.dtype), preferred_element_type=jnp.float32)
    return logits_XW, logits_XW.max(-1, keepdims=True)


def _nll(logits_XW, shift_X1, normalizer_X1, target_X, mask_X):
    target_logit_X1 = jnp.take_along_axis(logits_XW, target_X[:, None], axis=1)
    return jnp.sum(jnp.where(mask_X[:, None], shift_X1 + jnp.log(normalizer_X1) - target_logit_X1, 0))
