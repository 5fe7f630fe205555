"""Feed-forward layers: dense SwiGLU, and the mixture of experts with its sigmoid router, selection bias and balance loss."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k2jax.config import ModelConfig, MoEConfig
from k2jax.kernels.grouped_matmul import routed_swiglu
from k2jax.model.mla import project
from k2jax.model.weights import weight


class Routing(NamedTuple):
    """What the router decided for each token."""

    expert_XK: Int[Array, "X K"]
    weight_XK: Float[Array, "X K"]  # gates, float32
    load_E: Int[Array, " E"]  # tokens that chose each expert, padding left out
    balance: Float[Array, ""]  # sequence-wise balance loss, alpha included


class Dense(nnx.Module):
    """SwiGLU feed-forward: `(silu(x @ gate) * (x @ up)) @ down`."""

    def __init__(self, config: ModelConfig):
        self.gate_DF = weight(config.d_model, config.d_dense)
        self.up_DF = weight(config.d_model, config.d_dense)
        self.down_FD = weight(config.d_dense, config.d_model)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return swiglu(x_BTD, self.gate_DF[...], self.up_DF[...], self.down_FD[...])


class MoE(nnx.Module):
    """Routed experts plus shared ones that every token uses with weight 1 (DeepSeek-V3 eq. 12-16; report 2.3).

    `bias_E`, the router's selection bias, is an argument and not a parameter: it has no gradient and moves by load.
    """

    def __init__(self, config: ModelConfig):
        m, D = config.moe, config.d_model
        self.config = config
        self.router_DE = weight(D, m.n_experts)
        self.gate_EDF = weight(m.n_experts, D, m.d_expert)
        self.up_EDF = weight(m.n_experts, D, m.d_expert)
        self.down_EFD = weight(m.n_experts, m.d_expert, D)
        if m.n_shared:
            self.shared_gate_DF = weight(D, m.n_shared * m.d_expert)
            self.shared_up_DF = weight(D, m.n_shared * m.d_expert)
            self.shared_down_FD = weight(m.n_shared * m.d_expert, D)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], bias_E: Float[Array, " E"], real_BT: Array
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Returns the output and the routing; `real_BT` is false at padding, which no load or loss counts."""
        B, T, D = x_BTD.shape
        routing = self.route(x_BTD, bias_E, real_BT)
        y_XD = routed_swiglu(
            x_BTD.reshape(B * T, D),
            routing.expert_XK,
            routing.weight_XK,
            self.gate_EDF[...],
            self.up_EDF[...],
            self.down_EFD[...],
        )
        return self.add_shared(y_XD.reshape(B, T, D), x_BTD), routing

    def route(self, x_BTD: Float[Array, "B T D"], bias_E: Float[Array, " E"], real_BT: Array) -> Routing:
        """The router's choice alone."""
        return route(self.config.moe, x_BTD, self.router_DE[...], bias_E, real_BT)

    def add_shared(self, y_BTD: Float[Array, "B T D"], x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """`y` plus the shared experts' output for x."""
        if not self.config.moe.n_shared:
            return y_BTD
        return y_BTD + swiglu(x_BTD, self.shared_gate_DF[...], self.shared_up_DF[...], self.shared_down_FD[...])


def swiglu(x_BTD, gate_DF, up_DF, down_FD):
    """`(silu(x @ gate) * (x @ up)) @ down`."""
    gate_BTF, up_BTF = (checkpoint_name(project(x_BTD, w), "gates") for w in (gate_DF, up_DF))
    return project(checkpoint_name(jax.nn.silu(gate_BTF) * up_BTF, "hidden"), down_FD)


def route(
    config: MoEConfig,
    x_BTD: Float[Array, "B T D"],
    router_DE: Float[Array, "D E"],
    bias_E: Float[Array, " E"],
    real_BT: Array,
) -> Routing:
    """Chooses experts by biased sigmoid scores and weighs them by the unbiased ones (noaux_tc; DeepSeek-V3 eq. 13-16).

    Float32 throughout. Weights of a token sum to the routed scale. The lower index wins a tie.
    """
    B, T, D = x_BTD.shape
    E, K = config.n_experts, config.n_active
    x_XD = x_BTD.reshape(B * T, D).astype(jnp.float32)
    score_XE = jax.nn.sigmoid(jnp.dot(x_XD, router_DE, precision=lax.Precision.HIGHEST))
    biased_XE = lax.stop_gradient(score_XE) + bias_E.reshape(1, E)
    if config.n_groups > 1:
        biased_XE = keep_groups(config, biased_XE)
    expert_XK = checkpoint_name(lax.top_k(biased_XE, K)[1], "routing")
    chosen_XK = jnp.take_along_axis(score_XE, expert_XK, axis=1)
    scale = config.routed_scale or routed_scale(E, K, config.n_shared)
    weight_XK = checkpoint_name(scale * chosen_XK / (chosen_XK.sum(-1, keepdims=True) + 1e-20), "routing")

    real_X = real_BT.reshape(-1)
    count_BE = (
        jnp.zeros((B, E), jnp.int32).at[jnp.arange(B).repeat(T)[:, None], expert_XK].add(real_X[:, None].astype(jnp.int32))
    )
    balance = balance_loss(config, score_XE.reshape(B, T, E), count_BE, real_BT)
    return Routing(expert_XK, weight_XK, count_BE.sum(0), balance)


def keep_groups(config: MoEConfig, biased_XE: Float[Array, "X E"]) -> Float[Array, "X E"]:
    """Sets the scores outside a token's best groups to -inf; a group counts by its two best experts (DeepSeek-V3 2.1.2)."""
    grouped_XGe = biased_XE.reshape(biased_XE.shape[0], config.n_groups, -1)
    best_XG = lax.top_k(grouped_XGe, min(2, grouped_XGe.shape[-1]))[0].sum(-1)
    kept_XK = lax.top_k(best_XG, config.n_active_groups)[1]
    keep_XG = (kept_XK[:, :, None] == jnp.arange(config.n_groups)[None, None]).any(1)
    return jnp.where(keep_XG[:, :, None], grouped_XGe, -jnp.inf).reshape(biased_XE.shape)


def balance_loss(
    config: MoEConfig, score_BTE: Float[Array, "B T E"], count_BE: Int[Array, "B E"], real_BT: Array
) -> Float[Array, ""]:
    """`alpha * sum_i f_i P_i` of each sequence, averaged over sequences (DeepSeek-V3 eq. 17-20); alpha at perfect balance.

    f is the share of an expert in the choices actually made, times the number of experts, and carries no gradient; P is the
    mean normalized score.
    """
    if not config.balance_weight:
        return jnp.zeros(())
    tokens_B1 = jnp.maximum(real_BT.sum(-1, keepdims=True), 1).astype(jnp.float32)
    f_BE = config.n_experts / config.n_active * count_BE / tokens_B1
    real_over_sum_BT = real_BT / score_BTE.sum(-1)
    p_BE = jnp.einsum("bte,bt->be", score_BTE, real_over_sum_BT) / tokens_B1  # a product, so no second [B, T, E] is formed
    return config.balance_weight * (f_BE * p_BE).sum(-1).mean()


def update_bias(
    bias_E: Float[Array, "*stack E"], load_E: Int[Array, "*stack E"], *, speed: float, centered: bool
) -> Float[Array, "*stack E"]:
    """Moves the selection bias towards experts with less than the mean load; once per step, on the global counts.

    `b_i += speed * sign(mean load - load_i)` (DeepSeek-V3 2.1.2); `centered` subtracts the mean sign (Moonlight).
    """
    load = load_E.astype(jnp.float32)
    sign = jnp.sign(load.mean(-1, keepdims=True) - load)
    if centered:
        sign = sign - sign.mean(-1, keepdims=True)
    return bias_E + speed * sign


@functools.lru_cache
def routed_scale(n_experts: int, n_active: int, n_shared: int) -> float:
    """The factor that gives routed and shared experts equal root mean square at the start, by Monte Carlo over 20,000 tokens
    of standard normal logits (Moonlight, appendix C): 2.827 for 8 of 384, 2.446 for 6 of 64."""
    logits = np.random.default_rng(0).standard_normal((20_000, n_experts), dtype=np.float32)
    top = -np.partition(-logits, n_active - 1, axis=1)[:, :n_active] if n_active < n_experts else logits
    gates = 1 / (1 + np.exp(-top.astype(np.float64)))
    gates /= gates.sum(1, keepdims=True)
    return float(np.sqrt(max(n_shared, 1)) * (1 / np.sqrt((gates**2).sum(1))).mean())
