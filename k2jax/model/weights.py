"""How a weight starts, and how layers are stacked."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from k2jax.config import ModelConfig


def weight(config: ModelConfig, rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """A float32 matrix drawn from a normal distribution of the config's standard deviation (DeepSeek-V3: 0.006)."""
    return nnx.Param(config.init_std * jax.random.normal(rngs.params(), shape))


def gain(width: int) -> nnx.Param:
    """The gain of an RMSNorm, one at the start."""
    return nnx.Param(jnp.ones(width))


def stack(layer: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, n: int) -> nnx.Module:
    """n layers of one kind as one module whose weights have a leading layer axis, for `lax.scan`."""
    keys = jax.random.split(rngs.params(), n)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: layer(nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(layer(nnx.Rngs(params=key))))(keys))
