"""Multi-token prediction (MTP): one more layer that predicts the token after the next (DeepSeek-V3 eq. 21-25)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k2jax.config import ModelConfig
from k2jax.model.block import Around, Block, keep, run_stack
from k2jax.model.mla import Context, project
from k2jax.model.norm import rms_norm
from k2jax.model.weights import stack, weight


class MTP(nnx.Module):
    """An input projection, one layer with experts and a norm; embedding and head are the trunk's."""

    def __init__(self, config: ModelConfig):
        self.eps = config.norm_eps
        self.hidden_norm_D = weight(config.d_model)
        self.embed_norm_D = weight(config.d_model)
        self.project_JD = weight(2 * config.d_model, config.d_model)
        self.block = stack(lambda: Block(config, experts=True), config.n_mtp)
        self.norm_D = weight(config.d_model)

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        next_BTD: Float[Array, "B T D"],
        bias_LE: Float[Array, "L E"],
        context: Context,
        around: Around = keep,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """Joins the trunk's state at position i (before its final norm) with the embedding of token i + 1, hidden first.

        Returns the normed state whose head predicts token i + 2, and what the layer observed (see `run_stack`).
        """
        gains = self.hidden_norm_D[...], self.embed_norm_D[...]
        x_BTD = join(hidden_BTD, next_BTD, *gains, self.project_JD[...], self.eps)
        x_BTD, seen = run_stack(self.block, x_BTD, bias_LE, context, around)
        return rms_norm(x_BTD, self.norm_D[...], self.eps), seen


def join(
    hidden_BTD: Float[Array, "B T D"],
    next_BTD: Float[Array, "B T D"],
    hidden_norm_D: Float[Array, " D"],
    embed_norm_D: Float[Array, " D"],
    project_JD: Float[Array, "J D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """What goes into the layer: the state and the next token's embedding, each normed, projected together."""
    parts = rms_norm(hidden_BTD, hidden_norm_D, eps), rms_norm(next_BTD, embed_norm_D, eps)
    return project(jnp.concatenate(parts, -1), project_JD)


def inside(segments_BS: Int[Array, "B S"]) -> Int[Array, "B T"]:
    """The documents as MTP sees them: where the next token is another document's, a position is padding."""
    here_BT, next_BT = segments_BS[:, :-1], segments_BS[:, 1:]
    return jnp.where(here_BT == next_BT, here_BT, 0)
