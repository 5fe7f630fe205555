"""Which published tensor holds which of our weights, and how: the names of Kimi K2, DeepSeek-V3 and Llama.

Published matrices are [out, in]; ours are [in, out], with heads as axes of their own. Per head, `q_b_proj` has our `q_nope` and
`q_rope` side by side and `kv_b_proj` our `k_nope` and `v`; `kv_a_proj_with_mqa` has `kv_down` and `k_rope`. The channels that
RoPE rotates are in the order of `RopeConfig.layout` on both sides. MTP's `eh_proj` reads the embedding first, then the hidden
state, as published code does and against DeepSeek-V3's equation 21, which ours follows: its halves change places.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from k2jax.config import ModelConfig
from k2jax.model.store import BIAS, files

Order = Literal["same", "transposed", "swapped"]
STRIP = 64  # rows


class Part(NamedTuple):
    """Where a published tensor, or a part of it, lies among ours."""

    name: str
    index: tuple[int, ...]  # within our tensor: of an expert, or nothing
    shape: tuple[int, ...]  # of that place


class Entry(NamedTuple):
    """A published tensor."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]  # side by side along the last axis of ours
    order: Order
    copy: bool = False  # repeats another one: written on export, compared on import


def to_ours(entry: Entry, x: np.ndarray) -> list[np.ndarray]:
    """The parts of a published tensor."""
    y = x if entry.order == "same" else transposed(x)
    if entry.order == "swapped":
        y = np.roll(y, len(y) // 2, axis=0)
    widths = [part.shape[-1] for part in entry.parts]
    y = y.reshape(*entry.parts[0].shape[:-1], sum(widths))
    return np.split(y, np.cumsum(widths)[:-1], axis=-1)


def to_published(entry: Entry, parts: list[np.ndarray]) -> np.ndarray:
    """The inverse of `to_ours`."""
    y = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
    if entry.order == "same":
        return y
    y = y.reshape(entry.shape[::-1])
    return transposed(np.roll(y, len(y) // 2, axis=0) if entry.order == "swapped" else y)


def transposed(x: np.ndarray) -> np.ndarray:
    """A matrix's transpose in order. By strips, since NumPy's own copy of `x.T` is four times slower on large ones."""
    y = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, len(x), STRIP):
        y[:, i : i + STRIP] = x[i : i + STRIP].T
    return y


# Published name within a layer -> ours, and how many leading axes of ours are the matrix's input.
_LATENT = {
    "self_attn.q_a_proj.weight": (("q_down_DQ",), 1),
    "self_attn.q_a_layernorm.weight": (("q_norm_Q",), 0),
    "self_attn.q_b_proj.weight": (("q_nope_QHN", "q_rope_QHR"), 1),
    "self_attn.kv_a_proj_with_mqa.weight": (("kv_down_DC", "k_rope_DR"), 1),
    "self_attn.kv_a_layernorm.weight": (("kv_norm_C",), 0),
    "self_attn.kv_b_proj.weight": (("k_nope_CHN", "v_CHV"), 1),
    "self_attn.o_proj.weight": (("o_HVD",), 2),
}
_GROUPED = {
    "self_attn.q_proj.weight": (("q_DHR",), 1),
    "self_attn.k_proj.weight": (("k_DGR",), 1),
    "self_attn.v_proj.weight": (("v_DGV",), 1),
    "self_attn.o_proj.weight": (("o_HVD",), 2),
}
_SWIGLU = {"gate_proj": "gate_DF", "up_proj": "up_DF", "down_proj": "down_FD"}
_EXPERTS = {"gate_proj": "gate_EDF", "up_proj": "up_EDF", "down_proj": "down_EFD"}


def entries(config: ModelConfig, tied: bool = False) -> list[Entry]:
    """Every published tensor of a model, in the order of its layers. A tied head is read from the embedding."""
    shapes = {name: shape for tensors in files(config).values() for name, shape in tensors.items()}
    return list(_entries(config, shapes, tied))


def _entries(config: ModelConfig, shapes: dict, tied: bool) -> Iterator[Entry]:
    def same(name, ours, copy=False):
        return Entry(name, shapes[ours], (Part(ours, (), shapes[ours]),), "same", copy)

    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    yield same(embed, "embed_WD")
    for i in range(config.n_layers + config.n_mtp):
        published, l = f"model.layers.{i}.", i - config.n_dense
        if i < config.n_dense:
            yield from _layer(config, shapes, published, f"dense.{i}.", experts=False)
        elif i < config.n_layers:
            yield from _layer(config, shapes, published, f"moe.{l}.", experts=True)
        else:
            yield same(published + "embed_tokens.weight", "embed_WD", copy=True)
            yield same(published + "enorm.weight", "mtp.embed_norm_D")
            yield same(published + "hnorm.weight", "mtp.hidden_norm_D")
            yield matrix(shapes, published + "eh_proj.weight", ("mtp.project_JD",), order="swapped")
            yield from _layer(config, shapes, published, "mtp.block.0.", experts=True)
            yield same(published + "shared_head.norm.weight", "mtp.norm_D")
            yield same(published + "shared_head.head.weight", "head_WD", copy=True)
    yield same("model.norm.weight", "norm_D")
    yield same(embed if tied else head, "head_WD")


def _layer(config: ModelConfig, shapes: dict, published: str, ours: str, *, experts: bool) -> Iterator[Entry]:
    for name, (leaves, inputs) in (_LATENT if config.attention.kind == "mla" else _GROUPED).items():
        yield matrix(shapes, published + name, tuple(f"{ours}attention.{leaf}" for leaf in leaves), inputs)
    yield matrix(shapes, published + "input_layernorm.weight", (ours + "attention_norm_D",), 0)
    yield matrix(shapes, published + "post_attention_layernorm.weight", (ours + "ffn_norm_D",), 0)
    if not experts:
        for name, leaf in _SWIGLU.items():
            yield matrix(shapes, f"{published}mlp.{name}.weight", (f"{ours}ffn.{leaf}",))
        return
    yield matrix(shapes, published + "mlp.gate.weight", (ours + "ffn.router_DE",))
    yield matrix(shapes, published + "mlp.gate.e_score_correction_bias", (ours + BIAS,), 0)
    for e in range(config.moe.n_experts):
        for name, leaf in _EXPERTS.items():
            yield matrix(shapes, f"{published}mlp.experts.{e}.{name}.weight", (f"{ours}ffn.{leaf}",), index=(e,))
    for name, leaf in _SWIGLU.items() if config.moe.n_shared else ():
        yield matrix(shapes, f"{published}mlp.shared_experts.{name}.weight", (f"{ours}ffn.shared_{leaf}",))


def matrix(
    shapes: dict, name: str, leaves: tuple[str, ...], inputs: int = 1, order: Order = "transposed", index: tuple[int, ...] = ()
) -> Entry:
    """A published matrix whose input is the first `inputs` axes of our leaves; without any it is a vector, as it is."""
    parts = tuple(Part(leaf, index, shapes[leaf][len(index) :]) for leaf in leaves)
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    if not inputs:
        return Entry(name, shape, parts, "same")
    return Entry(name, (math.prod(shape[inputs:]), math.prod(shape[:inputs])), parts, order)
