"""One pass over new tokens of a batch of sequences at different positions, with a cache: prefill and decoding alike.

The program depends on the number of rows, of new tokens and of blocks, and on no sequence's length. It only reads the cache;
`keep`, a program of its own, writes the new tokens into it in place. In one program XLA would copy the cache, which the loop
over layers holds until its end, at every step.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from k2jax.config import ModelConfig
from k2jax.kernels.grouped_matmul import routed_swiglu
from k2jax.model import cached, rope
from k2jax.model.block import Block
from k2jax.model.cached import Kind, Past
from k2jax.model.mla import Context
from k2jax.model.norm import rms_norm
from k2jax.model.transformer import Transformer
from k2jax.model.weights import fill

EXPERTS = ("gate_EDF", "up_EDF", "down_EFD")


def rope_table(config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every position of the context, which a step looks up."""
    a = config.attention
    return tuple(jnp.asarray(x) for x in rope.table(a.rope, a.d_rope, config.context))


def forward(
    config: ModelConfig,
    kind: Kind,
    params: dict,
    router_bias: dict[str, jax.Array],
    table: tuple[Float[Array, "S P"], Float[Array, "S P"]],
    past: Past,
    tokens_BT: Int[Array, "B T"],
    count_B: Int[Array, " B"],
) -> tuple[Float[Array, "B W"], Float[Array, "L B T G N"]]:
    """Reads the first `count_B` of the new tokens of each row; the others are padding.

    Args:
      params: in the dtypes that `k2jax.model.store.load` gives for the config's.
      table: of `rope_table`.

    Returns the logits of each row's last token, float32, and what the cache is to keep of the new tokens. The logits of a row
    without new tokens mean nothing.
    """
    T = tokens_BT.shape[1]
    positions_BT = jnp.minimum(past.length_B[:, None] + jnp.arange(T)[None], config.context - 1)
    real_BT = jnp.arange(T)[None] < count_B[:, None]
    context = Context(real_BT.astype(jnp.int32), *(x[positions_BT] for x in table))
    model = fill(*nnx.split(nnx.eval_shape(lambda: Transformer(config))), params)
    x_BTD, new = model.embed_WD[...][tokens_BT].astype(config.dtype), []
    if config.n_dense:
        x_BTD, new_LBTGN = _stack(config, kind, model.dense, None, 0, past, x_BTD, context)
        new.append(new_LBTGN)
    if config.n_moe:
        x_BTD, new_LBTGN = _stack(config, kind, model.moe, router_bias["moe"], config.n_dense, past, x_BTD, context)
        new.append(new_LBTGN)
    last_BD = jnp.take_along_axis(x_BTD, jnp.maximum(count_B - 1, 0)[:, None, None], axis=1)[:, 0]
    last_BD = rms_norm(last_BD, model.norm_D[...], config.norm_eps)
    logits_BW = lax.dot_general(last_BD, model.head_WD[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return logits_BW, jnp.concatenate(new)


@functools.partial(jax.jit, donate_argnums=0)
def keep(
    pool_LMPN: Float[Array, "L M P N"],
    table_BJ: Int[Array, "B J"],
    length_B: Int[Array, " B"],
    new_LBTGN: Float[Array, "L B T G N"],
    count_B: Int[Array, " B"],
) -> Float[Array, "L M P N"]:
    """`k2jax.model.cached.write` in place: the pool that is given is gone."""
    return cached.write(Past(pool_LMPN, table_BJ, length_B), new_LBTGN, count_B)


def _stack(config: ModelConfig, kind: Kind, layers: Block, bias_LE, first: int, past: Past, x_BTD, context: Context):
    """Layers in order; the first is number `first` of the cache. The cache is only read: nothing copies it."""
    graphdef, state = nnx.split(layers)
    weights, experts = nnx.to_pure_dict(state), None
    n, T = weights["attention_norm_D"].shape[0], x_BTD.shape[1]
    if layers.experts:
        # A scan copies what it slices. The experts, of which a step reads few, are looked up by layer and number together.
        experts = [weights["ffn"][name].reshape(-1, *weights["ffn"][name].shape[2:]) for name in EXPERTS]
        weights["ffn"] |= dict.fromkeys(EXPERTS, jnp.zeros(n))

    def step(x_BTD, xs):
        weights, bias_E, l = xs
        layer = fill(graphdef, state, weights)
        z_BTD = rms_norm(x_BTD, layer.attention_norm_D[...], config.norm_eps)
        form = cached.form(layer.attention, kind, T)
        y_BTD, new_BTGN = cached.attend(form, z_BTD, context, past, first + l, config.attention)
        x_BTD = x_BTD + y_BTD
        z_BTD = rms_norm(x_BTD, layer.ffn_norm_D[...], config.norm_eps)
        if experts is None:
            return x_BTD + layer.ffn(z_BTD), new_BTGN
        routing = layer.ffn.route(z_BTD, bias_E, context.segments_BT > 0)
        of_layer_XK = routing.expert_XK + l * config.moe.n_experts
        y_XD = routed_swiglu(z_BTD.reshape(-1, config.d_model), of_layer_XK, routing.weight_XK, *experts)
        return x_BTD + layer.ffn.add_shared(y_XD.reshape(z_BTD.shape), z_BTD), new_BTGN

    return lax.scan(step, x_BTD, (weights, bias_LE, jnp.arange(n)))
