"""The whole model: embedding, a stack of dense layers, a stack of layers with experts, head, and MTP.

Flax NNX declares the weights; `init`, `abstract` and `apply` are the functional face that everything else uses: weights are
nested dicts of arrays, and one forward pass returns its output together with what it observed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k2jax.config import ModelConfig
from k2jax.model.block import Around, Block, keep, run_stack
from k2jax.model.mla import Context
from k2jax.model.mtp import MTP, inside
from k2jax.model.norm import rms_norm
from k2jax.model.rope import look_up
from k2jax.model.weights import draw, fill, stack, weight, working_dtype


class Aux(NamedTuple):
    """What a forward pass observes, by stack ("dense", "moe", "mtp")."""

    max_logit_LH: dict[str, jax.Array]  # largest attention logit of each head
    load_LE: dict[str, jax.Array]  # int32 tokens that chose each expert
    balance: jax.Array  # sequence-wise balance loss, summed over layers


class Output(NamedTuple):
    """States that the head turns into logits, and the observations."""

    hidden_BTD: jax.Array  # position i predicts token i + 1
    mtp_BTD: jax.Array | None  # position i predicts token i + 2
    aux: Aux


class Transformer(nnx.Module):
    """A decoder of `n_dense` dense layers and `n_moe` layers with experts."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed_WD = weight(config.n_words, config.d_model)
        if config.n_dense:
            self.dense = stack(lambda: Block(config, experts=False), config.n_dense)
        if config.n_moe:
            self.moe = stack(lambda: Block(config, experts=True), config.n_moe)
        self.norm_D = weight(config.d_model)
        self.head_WD = weight(config.n_words, config.d_model)
        if config.n_mtp:
            self.mtp = MTP(config)

    def __call__(
        self,
        router_bias: dict[str, Float[Array, "L E"]],
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        around: Around = keep,
    ) -> Output:
        """Runs all but the last column of the batch; that column is only the target, and MTP's input, of the one before."""
        config = self.config
        a, T = config.attention, tokens_BT.shape[1] - 1
        cos_BTP, sin_BTP = look_up(a.rope, a.d_rope, T, positions_BT[:, :-1])
        context = Context(segments_BT[:, :-1], cos_BTP, sin_BTP)
        embedded_BTD = self.embed_WD[...][tokens_BT].astype(config.dtype)

        x_BTD, seen = embedded_BTD[:, :-1], {}
        if config.n_dense:
            x_BTD, seen["dense"] = run_stack(self.dense, x_BTD, None, context, around)
        if config.n_moe:
            x_BTD, seen["moe"] = run_stack(self.moe, x_BTD, router_bias["moe"], context, around)
        mtp_BTD = None
        if config.n_mtp:
            context = context._replace(segments_BT=inside(segments_BT))
            mtp_BTD, seen["mtp"] = self.mtp(x_BTD, embedded_BTD[:, 1:], router_bias["mtp"], context, around)
        aux = Aux(
            max_logit_LH={name: s["max_logit_LH"] for name, s in seen.items()},
            load_LE={name: s["load_LE"] for name, s in seen.items() if "load_LE" in s},
            balance=sum((s["balance"] for s in seen.values() if "balance" in s), start=jnp.zeros(())),
        )
        return Output(rms_norm(x_BTD, self.norm_D[...], config.norm_eps), mtp_BTD, aux)


@functools.lru_cache
def _structure(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config)))


def abstract(config: ModelConfig) -> tuple[dict, dict]:
    """Shapes and dtypes of `init`'s result, with nothing allocated."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.to_pure_dict(_structure(config)[1]))
    return params, jax.eval_shape(lambda: _zero_bias(config))


def init(config: ModelConfig, seed: int) -> tuple[dict, dict]:
    """Draws the weights from a seed. Returns the parameters and the router bias, zero, by stack."""
    return draw(abstract(config)[0], config.init_std, seed), _zero_bias(config)


def _zero_bias(config: ModelConfig) -> dict[str, jax.Array]:
    layers = {"moe": config.n_moe, "mtp": config.n_mtp}
    return {name: jnp.zeros((n, config.moe.n_experts)) for name, n in layers.items() if n}


def apply(
    config: ModelConfig,
    params: dict,
    router_bias: dict[str, jax.Array],
    tokens_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    around: Around = keep,
) -> Output:
    """The forward pass on a batch of T + 1 columns, of which the last is only a target.

    `segments_BT` numbers the documents packed in a row from 1; 0 is padding. `positions_BT` restarts in each document. Matrices
    are cast to the config's dtype here, once; norm gains and the router stay float32. `around` is the activation policy
    (`k2jax.model.block.run_stack`).
    """

    def cast(path, w):
        return w.astype(working_dtype(path[-1].key, config.dtype))

    graphdef, state = _structure(config)
    model = fill(graphdef, state, jax.tree.map_with_path(cast, params))
    return model(router_bias, tokens_BT, segments_BT, positions_BT, around)
