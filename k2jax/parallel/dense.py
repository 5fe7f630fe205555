"""A dense layer in an expert slot: its feed-forward is the shared expert and blocks of expert size with weight 1.

18432 = (1 + 8) * 2048 for K2, so no slot is of another kind and no stage branches. The state keeps the natural matrices, which
is what Muon must see; at the start of a step they are cut into the slot's places, at its end the gradients are put together
again. There are more places than blocks: the blocks are repeated, and tokens take turns, so all places share the load.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from k2jax.config import ModelConfig
from k2jax.parallel.expert import Exchange
from k2jax.parallel.layout import Layout


def blocks_of(model: ModelConfig) -> int:
    """Expert-sized blocks of a dense layer's hidden width beyond the shared experts': 8 for K2, 18432 = (1 + 8) * 2048."""
    return model.d_dense // model.moe.d_expert - model.moe.n_shared


def experts_of_tokens(model: ModelConfig, tokens: int) -> Int[Array, "X K"]:
    """The places of a dense layer's blocks that each token uses, -1 beyond: replica n mod R for token n."""
    blocks = blocks_of(model)
    replica_X1 = (jnp.arange(tokens, dtype=jnp.int32) % (model.moe.n_experts // max(blocks, 1)))[:, None]
    block_1K = jnp.arange(model.moe.n_active, dtype=jnp.int32)[None]
    return jnp.where(block_1K < blocks, replica_X1 * blocks + block_1K, -1)


def _places(model: ModelConfig, exchange: Exchange) -> tuple[Int[Array, " E"], Array]:
    """The block that each expert place of this rank holds in a dense slot, and whether it holds one."""
    blocks = blocks_of(model)
    expert_E = lax.axis_index("expert") * exchange.local + jnp.arange(exchange.local)
    used = exchange.n_experts // max(blocks, 1) * blocks
    return expert_E % max(blocks, 1), expert_E < used


def place(model: ModelConfig, lay: Layout, exchange: Exchange, weights: dict) -> dict:
    """Puts the dense layers' matrices into the places of their slots."""
    moe = model.moe
    if not lay.dense_ZJ.shape[1]:
        return weights
    z, shared = lax.axis_index("pipeline"), moe.n_shared * moe.d_expert
    block_E, used_E = _places(model, exchange)
    ffn = dict(weights["slots"]["ffn"])

    def put(name, slot, present, value):
        old = _at(ffn[name], slot)
        ffn[name] = lax.dynamic_update_index_in_dim(ffn[name], jnp.where(present, value, old), slot, 0)

    for j in range(lay.dense_ZJ.shape[1]):
        present, slot = jnp.asarray(lay.dense_ZJ)[z, j] >= 0, jnp.asarray(lay.dense_slot_ZJ)[z, j]
        for name, hidden in (("gate_DF", 1), ("up_DF", 1), ("down_FD", 0)):
            w = weights["dense"][name][j]
            if moe.n_shared:
                put(f"shared_{name}", slot, present, lax.slice_in_dim(w, 0, shared, axis=hidden))
            if blocks_of(model):
                blocks = _cut(lax.slice_in_dim(w, shared, None, axis=hidden), moe.d_expert, hidden)
                put(_expert_name(name), slot, present, jnp.where(used_E[:, None, None], blocks[block_E], 0))
    return weights | {"slots": weights["slots"] | {"ffn": ffn}}


def collect(model: ModelConfig, lay: Layout, exchange: Exchange, total: dict) -> dict:
    """Moves the gradients of the dense layers out of their slots into natural matrices, summed over replicas on this rank."""
    moe = model.moe
    if not lay.dense_ZJ.shape[1]:
        return total
    z, n = lax.axis_index("pipeline"), blocks_of(model)
    block_E, used_E = _places(model, exchange)
    ffn, dense = dict(total["slots"]["ffn"]), dict(total["dense"])
    for j in range(lay.dense_ZJ.shape[1]):
        present, slot = jnp.asarray(lay.dense_ZJ)[z, j] >= 0, jnp.asarray(lay.dense_slot_ZJ)[z, j]
        for name, hidden in (("gate_DF", 1), ("up_DF", 1), ("down_FD", 0)):
            parts = [_at(ffn[f"shared_{name}"], slot)] if moe.n_shared else []
            if n:
                expert = _at(ffn[_expert_name(name)], slot)
                blocks = jnp.zeros((n, *expert.shape[1:])).at[jnp.where(used_E, block_E, n)].add(expert, mode="drop")
                parts.append(_uncut(blocks, hidden))
            value = jnp.where(present, jnp.concatenate(parts, hidden), 0)
            dense[name] = dense[name].at[j].set(value)
        for name, w in ffn.items():
            old = _at(w, slot)
            ffn[name] = lax.dynamic_update_index_in_dim(w, jnp.where(present, 0, old), slot, 0)
    return total | {"dense": dense, "slots": total["slots"] | {"ffn": ffn}}


def _at(x, i):
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _expert_name(name: str) -> str:
    return {"gate_DF": "gate_EDF", "up_DF": "up_EDF", "down_FD": "down_EFD"}[name]


def _cut(w, width: int, axis: int):
    """[D, n*F] -> [n, D, F] for axis 1; [n*F, D] -> [n, F, D] for axis 0."""
    if axis == 0:
        return w.reshape(-1, width, w.shape[1])
    return w.reshape(w.shape[0], -1, width).swapaxes(0, 1)


def _uncut(blocks, axis: int):
    """The inverse of `_cut`."""
    n, a, b = blocks.shape
    return blocks.reshape(n * a, b) if axis == 0 else blocks.swapaxes(0, 1).reshape(a, n * b)
