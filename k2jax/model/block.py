"""One transformer layer, and a scan over a stack of them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from k2jax.config import ModelConfig
from k2jax.model.mla import GQA, MLA, Context
from k2jax.model.moe import Dense, MoE, Routing
from k2jax.model.norm import rms_norm
from k2jax.model.weights import fill, weight

WRITTEN_OUT = 3  # layers: as fast to compile as the scan, and on a CPU of two cores a step is 6 to 9% shorter

Around = Callable[[Callable], Callable]


def keep(layer: Callable) -> Callable:
    """The policy that keeps all activations of a layer for its backward pass."""
    return layer


class Block(nnx.Module):
    """Pre-norm layer: `x + attention(norm(x))`, then `x + ffn(norm(x))`, the ffn dense or of experts."""

    def __init__(self, config: ModelConfig, *, experts: bool):
        self.eps, self.experts = config.norm_eps, experts
        self.attention_norm_D = weight(config.d_model)
        self.attention = (MLA if config.attention.kind == "mla" else GQA)(config)
        self.ffn_norm_D = weight(config.d_model)
        self.ffn = (MoE if experts else Dense)(config)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], bias_E: Float[Array, " E"] | None, context: Context
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, " H"], Routing | None]]:
        """Returns the new stream, and what the layer observed: largest logit of each head, and the routing if it has one."""
        x_BTD, z_BTD, max_logit_H = self.attend(x_BTD, context)
        if not self.experts:
            return x_BTD + self.ffn(z_BTD), (max_logit_H, None)
        y_BTD, routing = self.ffn(z_BTD, bias_E, context.segments_BT > 0)
        return x_BTD + y_BTD, (max_logit_H, routing)

    def attend(
        self, x_BTD: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Float[Array, " H"]]:
        """The first half: the stream with attention added, its norm, which the ffn reads, and the largest logits."""
        z_BTD = checkpoint_name(rms_norm(x_BTD, self.attention_norm_D[...], self.eps), "norms")
        y_BTD, max_logit_H = self.attention(z_BTD, context)
        x_BTD = checkpoint_name(x_BTD + y_BTD, "stream")
        return x_BTD, checkpoint_name(rms_norm(x_BTD, self.ffn_norm_D[...], self.eps), "norms"), max_logit_H


@functools.lru_cache
def _structure(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Block(config, experts=True)))


def holding(config: ModelConfig, weights: dict) -> Block:
    """The layer with experts that holds `weights`, a nested dict of arrays."""
    return fill(*_structure(config), weights)


def run_stack(
    layers: Block,
    x_BTD: Float[Array, "B T D"],
    bias_LE: Float[Array, "L E"] | None,
    context: Context,
    around: Around = keep,
) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
    """Applies stacked layers in order; returns the stream and, stacked over layers, `max_logit_LH`, and with experts
    `load_LE` and the summed `balance`. `around` wraps the function `(x, layer, context) -> (x, seen)` of one layer:
    `jax.checkpoint` recomputes it."""
    graphdef, weights = nnx.split(layers)

    def run(x_BTD, layer, context):
        x_BTD, (max_logit_H, routing) = nnx.merge(graphdef, layer[0])(x_BTD, layer[1], context)
        seen = {"max_logit_LH": max_logit_H}
        if routing is not None:
            seen |= {"load_LE": routing.load_E, "balance": routing.balance}
        return x_BTD, seen

    run = around(run)
    unroll = layers.attention_norm_D[...].shape[0] <= WRITTEN_OUT
    x_BTD, seen = lax.scan(lambda x_BTD, layer: run(x_BTD, layer, context), x_BTD, (weights, bias_LE), unroll=unroll)
    if "balance" in seen:
        seen["balance"] = jnp.sum(seen["balance"])
    return x_BTD, seen
