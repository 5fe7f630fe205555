"""A dense layer as shared expert and blocks in expert places, for fewer places than fill evenly, and over two ranks."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from k2jax.config import MeshConfig, ModelConfig, MoEConfig
from k2jax.parallel import dense
from k2jax.parallel.expert import Exchange
from k2jax.parallel.layout import DENSE, layout

D, F, E, L = 3, 2, 10, 4  # two stages of four slots, five places a rank
NAMES = ("gate_DF", "up_DF", "down_FD")
EXPERTS = {"gate_DF": "gate_EDF", "up_DF": "up_EDF", "down_FD": "down_EFD"}


def model(blocks, shared):
    moe = MoEConfig(n_experts=E, n_active=4, n_shared=shared, d_expert=F)
    return ModelConfig(d_model=D, n_layers=8, n_dense=5, d_dense=(shared + blocks) * F, moe=moe)


def shapes(config):
    moe, wide = config.moe, config.moe.n_shared * F
    ffn = {"gate_EDF": (L, E // 2, D, F), "up_EDF": (L, E // 2, D, F), "down_EFD": (L, E // 2, F, D), "router_DE": (L, D, E)}
    if moe.n_shared:
        ffn |= {"shared_gate_DF": (L, D, wide), "shared_up_DF": (L, D, wide), "shared_down_FD": (L, wide, D)}
    natural = {"gate_DF": (D, config.d_dense), "up_DF": (D, config.d_dense), "down_FD": (config.d_dense, D)}
    return {"slots": {"ffn": ffn}, "dense": {name: (3, *shape) for name, shape in natural.items()}}


def on_ranks(f, config, *trees):
    """`f(layout, exchange, tree...)` on 2 stages x 2 expert ranks; results [Z, R, ...]."""
    lay = layout(config, MeshConfig(pipeline=2, chunks=2))
    mesh = jax.make_mesh((2, 2), ("pipeline", "expert"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("pipeline", "expert")

    def body(*trees):
        out = f(lay, Exchange(2, E, 1), *(jax.tree.map(lambda x: x[0, 0], tree) for tree in trees))
        return jax.tree.map(lambda x: x[None, None], out)

    return lay, jax.tree.map(
        np.asarray, jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*trees)
    )


def draw(config, seed, whole_numbers=False):
    rng = np.random.default_rng(seed)
    of = (lambda s: rng.integers(-9, 9, s)) if whole_numbers else (lambda s: rng.normal(size=s))
    tree = jax.tree.map(lambda s: of((2, 2, *s)).astype(np.float32), shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    for name in NAMES:  # the ranks of a stage hold the same dense matrices
        tree["dense"][name][:, 1] = tree["dense"][name][:, 0]
    return tree


def ffn(x, gate, up, down):
    return np.asarray((jax.nn.silu(x @ gate) * (x @ up)) @ down)


CASES = [(3, 1), (4, 2), (2, 0), (0, 1)]  # blocks, shared


@pytest.mark.parametrize(("blocks", "shared"), CASES)
def test_shared_expert_and_blocks_are_the_dense_feed_forward(blocks, shared):
    config = model(blocks, shared)
    tree = draw(config, 0)
    lay, placed = on_ranks(lambda lay, exchange, w: dense.place(config, lay, exchange, w), config, tree)
    choices = np.asarray(dense.experts_of_tokens(config, 12))
    assert choices.shape == (12, 4) and ((choices >= 0).sum(1) == blocks).all()
    if blocks:  # replicas take turns
        assert len({tuple(row) for row in choices}) == E // blocks
    x = np.random.default_rng(1).normal(size=(12, D)).astype(np.float32)
    for z, s in np.argwhere(lay.kind_ZL == DENSE):
        j = list(lay.dense_slot_ZJ[z]).index(s)
        slot = {name: np.concatenate(w[z, :, s]) for name, w in placed["slots"]["ffn"].items() if name in EXPERTS.values()}
        y = np.zeros_like(x)
        if shared:
            y += ffn(x, *(placed["slots"]["ffn"][f"shared_{name}"][z, 0, s] for name in NAMES))
        for n, row in enumerate(choices):
            for e in row[row >= 0]:
                y[n] += ffn(x[n], *(slot[EXPERTS[name]][e] for name in NAMES))
        expected = ffn(x, *(tree["dense"][name][z, 0, j] for name in NAMES))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    for name, w in placed["slots"]["ffn"].items():  # other slots keep what they have
        other = lay.kind_ZL != DENSE
        np.testing.assert_array_equal(np.moveaxis(w, 1, 2)[other], np.moveaxis(tree["slots"]["ffn"][name], 1, 2)[other])


@pytest.mark.parametrize(("blocks", "shared"), CASES)
def test_gradients_are_collected_by_the_transpose_of_placing(blocks, shared):
    """<place(w), g> = <w, collect(g)> over the dense matrices, exactly, for whole numbers."""
    config = model(blocks, shared)
    tree, total = draw(config, 2, True), draw(config, 3, True)
    lay, placed = on_ranks(lambda lay, exchange, w: dense.place(config, lay, exchange, w), config, tree)
    _, collected = on_ranks(lambda lay, exchange, g: dense.collect(config, lay, exchange, g), config, total)
    is_dense = lay.kind_ZL == DENSE
    left = 0.0
    for name, w in placed["slots"]["ffn"].items():
        if name == "router_DE" or (name in EXPERTS.values() and not blocks):
            continue
        g = total["slots"]["ffn"][name]
        # The shared expert's gradient is each rank's own, and so is that of every replica of a block.
        left += (np.moveaxis(w, 1, 2)[is_dense] * np.moveaxis(g, 1, 2)[is_dense]).sum()
    held = lay.dense_ZJ >= 0
    right = 0.0
    for name in NAMES:
        w, g = (np.moveaxis(t["dense"][name], 1, 2)[held] for t in (tree, collected))
        right += (w * g).sum()
    assert left == right and left != 0
    for name, g in collected["slots"]["ffn"].items():
        given = total["slots"]["ffn"][name]
        np.testing.assert_array_equal(np.moveaxis(g, 1, 2)[~is_dense], np.moveaxis(given, 1, 2)[~is_dense])
        assert not np.moveaxis(g, 1, 2)[is_dense].any()
