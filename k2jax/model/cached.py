"""Attention that reads what came before from a cache: three forms of MLA, grouped-query attention, the loop over blocks.

- `Absorbed`: MLA's form for decoding. The cache holds a token's latent and rotated key, 576 numbers a layer in K2, whatever the
  number of heads; the key matrix is multiplied into the query and the value matrix into the output (DeepSeek-V3 eq. 1-11, read
  from the other end), so that all heads attend to the one latent.
- `Expanded`: the same cache; keys and values are made of the latents a block at a time. Less work when many queries share it.
- `Heads`: the cache holds every head's key and value. GQA's form, and what MLA would cost without its latent: 20,480 numbers.

Nothing here reads a length into a shape: the loop runs over the blocks that the longest row has.
"""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.config import AttentionConfig
from k2jax.model.mla import GQA, MLA, Context, merge_heads
from k2jax.model.rope import softmax_scale

MASKED = -1e30
Kind = Literal["latent", "heads"]  # what the cache holds


class Past(NamedTuple):
    """A cache: blocks of tokens in one pool, of which every row owns some.

    A block has its tokens in order for one key head after the other. It is the unit of growth: a row that becomes longer takes
    one more, wherever in the pool it lies.
    """

    pool_LMPN: Float[Array, "L M P N"]  # layer, block, key head and token, what is kept of it
    table_BJ: Int[Array, "B J"]  # the blocks of each row, in order
    length_B: Int[Array, " B"]  # tokens of each row


@runtime_checkable
class Form(Protocol):
    """How a layer uses a cache. G is 1 where the heads share what is cached."""

    def query(self, x_BTD: Array, context: Context) -> Array:
        """Each head's query [B, T, H, Y]."""

    def entry(self, x_BTD: Array, context: Context) -> Array:
        """What the cache keeps of each token [B, T, G, N]."""

    def key_value(self, entry_BGSN: Array) -> tuple[Array, Array]:
        """Keys [B, G, S, Y] and values [B, G, S, V] to attend to, from what is kept."""

    def output(self, o_BTHV: Array) -> Array:
        """The layer's output [B, T, D], from what the heads took."""


class Expanded:
    """MLA with the latent cache, keys and values made of it."""

    def __init__(self, layer: MLA):
        self.layer, self.rank = layer, layer.config.attention.kv_rank

    def query(self, x_BTD, context):
        return self.layer.query(x_BTD, context)

    def entry(self, x_BTD, context):
        k_BS1R = self.layer.rotated_key(x_BTD, context)
        return jnp.concatenate([self.layer.latent(x_BTD)[:, :, None], k_BS1R], -1)

    def key_value(self, entry_BGSN):
        c_BSC, k_rope_BSR = jnp.split(entry_BGSN[:, 0], [self.rank], -1)
        k_BSHY, v_BSHV = self.layer.expand(c_BSC, k_rope_BSR[:, :, None])
        return k_BSHY.swapaxes(1, 2), v_BSHV.swapaxes(1, 2)

    def output(self, o_BTHV):
        return merge_heads(o_BTHV, self.layer.o_HVD[...])


class Absorbed(Expanded):
    """MLA with the latent cache, attended to as it is."""

    def query(self, x_BTD, context):
        q_BTHY, N = super().query(x_BTD, context), self.layer.config.attention.d_nope
        return jnp.concatenate([_per_head("bthn,chn->bthc", q_BTHY[..., :N], self.layer.k_nope_CHN[...]), q_BTHY[..., N:]], -1)

    def key_value(self, entry_BGSN):
        return entry_BGSN, entry_BGSN[..., : self.rank]

    def output(self, o_BTHV):
        return super().output(_per_head("bthc,chv->bthv", o_BTHV, self.layer.v_CHV[...]))


class Heads:
    """A cache of every key head's key and value."""

    def __init__(self, layer: MLA | GQA):
        self.layer, self.width = layer, layer.config.attention.d_nope + layer.config.attention.d_rope

    def query(self, x_BTD, context):
        return self.layer.query(x_BTD, context)

    def entry(self, x_BTD, context):
        return jnp.concatenate(self.layer.key_value(x_BTD, context), -1)

    def key_value(self, entry_BGSN):
        return tuple(jnp.split(entry_BGSN, [self.width], -1))

    def output(self, o_BTHV):
        return merge_heads(o_BTHV, self.layer.o_HVD[...])


def _per_head(equation: str, x: Array, w: Array) -> Array:
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def kind_of(attention: AttentionConfig) -> Kind:
    """What to cache: latents, where there are any and no norm stands between them and the keys."""
    return "latent" if attention.kind == "mla" and not attention.qk_norm else "heads"


def widths(attention: AttentionConfig, kind: Kind) -> tuple[int, int]:
    """Key heads in the cache, and numbers that it keeps of a token for each. Raises ValueError for a kind that cannot be."""
    a = attention
    if kind == "heads":
        return a.n_kv_heads, a.d_nope + a.d_rope + a.d_value
    if kind_of(a) != "latent":
        raise ValueError(f"a latent cache needs MLA without qk_norm; got kind={a.kind!r}, qk_norm={a.qk_norm}")
    return 1, a.kv_rank + a.d_rope


def form(layer: MLA | GQA, kind: Kind, n_queries: int) -> Form:
    """The form that takes fewest multiplications for this many queries of a row."""
    if kind == "heads":
        return Heads(layer)
    a = layer.config.attention
    absorbed = n_queries * (2 * a.kv_rank + a.d_rope)  # for each key and head
    expanded = n_queries * (a.d_nope + a.d_rope + a.d_value) + a.kv_rank * (a.d_nope + a.d_value)
    return Absorbed(layer) if absorbed <= expanded else Expanded(layer)


def attend(
    form: Form, x_BTD: Float[Array, "B T D"], context: Context, past: Past, layer: Int[Array, ""], attention: AttentionConfig
) -> tuple[Float[Array, "B T D"], Float[Array, "B T G N"]]:
    """Attention of T new tokens a row to all that the row has in the cache and to each other, causally.

    Returns the layer's output, and what the cache is to keep of the new tokens; it is not written here. `layer` is the cache's
    number of this layer.
    """
    q_BTHY, new_BTGN = form.query(x_BTD, context), form.entry(x_BTD, context)
    B, T, H, _ = q_BTHY.shape
    G = new_BTGN.shape[2]
    S = past.pool_LMPN.shape[2] // G  # tokens a block
    scale, cap = softmax_scale(attention), attention.soft_cap

    def block(entry_BGSN, seen_BTS, state):
        """Adds keys and values to the running softmax: maximum, sum and output of each query."""
        k_BGSY, v_BGSV = form.key_value(entry_BGSN)
        top, total, o = state
        q_BGNY = q_BTHY.swapaxes(1, 2).reshape(B, k_BGSY.shape[1], -1, k_BGSY.shape[3])  # N: the group's heads, then queries
        s = scale * jnp.einsum("bgny,bgsy->bgns", q_BGNY, k_BGSY, preferred_element_type=jnp.float32)
        s = s.reshape(B, H, T, -1)
        s = jnp.where(seen_BTS[:, None], cap * jnp.tanh(s / cap) if cap else s, MASKED)
        new_top = jnp.maximum(top, s.max(-1))
        p = jnp.exp(s - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        p_BGNS = p.astype(v_BGSV.dtype).reshape(*q_BGNY.shape[:3], -1)
        pv = jnp.einsum("bgns,bgsv->bgnv", p_BGNS, v_BGSV, preferred_element_type=jnp.float32)
        return new_top, total * shrink + p.sum(-1), o * shrink[..., None] + pv.reshape(B, H, T, -1)

    own_BGTN = new_BTGN.swapaxes(1, 2)
    width = jax.eval_shape(form.key_value, own_BGTN)[1].shape[-1]
    rows = (B, H, T)
    state = jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, width))
    causal_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    state = block(own_BGTN, causal_BTT, state)  # the first, so that every query has seen a key: itself

    def older(j, state):
        entry_BGSN = past.pool_LMPN[layer, past.table_BJ[:, j]].reshape(B, G, S, -1)
        seen_BS = j * S + jnp.arange(S)[None] < past.length_B[:, None]
        return block(entry_BGSN, jnp.broadcast_to(seen_BS[:, None], (B, T, S)), state)

    _, total, o = lax.fori_loop(0, (past.length_B.max() + S - 1) // S, older, state)
    o_BTHV = (o / total[..., None]).swapaxes(1, 2).astype(x_BTD.dtype)
    return form.output(o_BTHV), new_BTGN


def write(past: Past, new_LBTGN: Float[Array, "L B T G N"], count_B: Int[Array, " B"]) -> Float[Array, "L M P N"]:
    """The pool with the first `count_B` new tokens of each row after those that it has.

    Block 0 must belong to no row: what is not kept lands there.
    """
    L, M, P, N = past.pool_LMPN.shape
    T, G = new_LBTGN.shape[2:4]
    S = P // G
    place_BT = past.length_B[:, None] + jnp.arange(T)[None]
    kept_BT = jnp.arange(T)[None] < count_B[:, None]
    block_BT = jnp.take_along_axis(past.table_BJ, jnp.minimum(place_BT // S, past.table_BJ.shape[1] - 1), axis=1)
    block_BT = jnp.where(kept_BT, block_BT, 0)
    # Rows of a matrix are written in place; with indices on axes further in, XLA would transpose the whole pool and back.
    l, g = jnp.arange(L).reshape(L, 1, 1, 1), jnp.arange(G).reshape(1, 1, 1, G)
    row_LBTG = (l * M + block_BT[None, :, :, None]) * P + g * S + (place_BT % S)[None, :, :, None]
    return past.pool_LMPN.reshape(-1, N).at[row_LBTG.reshape(-1)].set(new_LBTGN.reshape(-1, N)).reshape(L, M, P, N)
