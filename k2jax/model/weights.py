"""How weights are declared, stacked and drawn.

Modules declare shapes; `draw` fills them on the host, leaf by leaf. Compiling thirty random draws into one program takes half a
minute on a CPU, and host draws are the same on every platform, mesh and version of JAX.
"""

import zlib
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)


def weight(*shape: int) -> nnx.Param:
    """Declares a float32 weight of this shape."""
    return nnx.Param(jnp.zeros(shape))


def stack(layer: Callable[[], Module], n: int) -> Module:
    """Declares n layers of one kind as one module whose weights have a leading layer axis, for `lax.scan`."""
    graphdef, state = nnx.split(nnx.eval_shape(layer))
    return nnx.merge(graphdef, jax.tree.map(lambda w: jnp.zeros((n, *w.shape)), state))


def working_dtype(name: str, dtype: str) -> str:
    """The dtype in which a step uses a weight: the model's for matrices, float32 for norm gains and the router."""
    return "float32" if "norm" in name or name == "router_DE" else dtype


def draw(shapes: dict, std: float, seed: int) -> dict:
    """Draws a nested dict of weights like `shapes`: norm gains are 1, all else is normal with this standard deviation.

    A layer's draw depends on the seed, the leaf's path and the layer's index alone: models that differ in one weight's shape
    agree in all others. The last axes of a leaf are those its name tells; an axis before them is the stack's.
    """

    def leaf(path, w):
        name = path[-1].key
        if "norm" in name:
            return jax.device_put(np.ones(w.shape, np.float32))
        letters = len(name.rsplit("_", 1)[-1])
        key = zlib.crc32("/".join(p.key for p in path).encode())
        layers = w.shape[: len(w.shape) - letters]
        values = np.empty(w.shape, np.float32)
        for index in np.ndindex(*layers):
            normal = np.random.default_rng((seed, key, *index)).standard_normal(w.shape[len(layers) :], dtype=np.float32)
            values[index] = std * normal
        return jax.device_put(values)  # jnp.asarray would compile a program for each shape

    return jax.tree.map_with_path(leaf, shapes)


def build(layer: Callable[[], Module], std: float, seed: int) -> Module:
    """A module with drawn weights."""
    graphdef, state = nnx.split(nnx.eval_shape(layer))
    return fill(graphdef, state, draw(nnx.to_pure_dict(state), std, seed))


def fill(graphdef: nnx.GraphDef, state: nnx.State, weights: dict) -> Module:
    """The module of this structure that holds `weights`, a nested dict of arrays."""
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(weights)))
