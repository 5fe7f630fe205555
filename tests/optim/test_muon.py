import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.config import OptimConfig
from k2jax.optim.muon import blocks_of, scale_by_muon


def relative(x, y):
    return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


def run(config, grads):
    """The update of the last of a list of gradients."""
    tx = scale_by_muon(config)
    state = tx.init(grads[0])
    update = jax.jit(tx.update)
    for grad in grads:
        out, state = update(grad, state)
    return out


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_equal_algorithm_1(nesterov, quintic):
    grads = [np.random.default_rng(i).standard_normal((8, 20)).astype(np.float32) for i in range(3)]
    got = run(OptimConfig(nesterov=nesterov), [{"gate_DF": g} for g in grads])["gate_DF"]
    momentum = np.zeros((8, 20))
    for g in grads:
        momentum = 0.95 * momentum + g
    fed = 0.95 * momentum + g if nesterov else momentum
    assert relative(got, 0.2 * np.sqrt(20) * quintic(fed)) < 1e-5


def test_nesterov_changes_the_update():
    grads = [{"gate_DF": np.random.default_rng(i).standard_normal((8, 20)).astype(np.float32)} for i in range(3)]
    plain, nesterov = (run(OptimConfig(nesterov=on), grads)["gate_DF"] for on in (False, True))
    assert relative(plain, np.asarray(nesterov)) > 0.05


# The aspect ratios of K2's matrices (q_down, k_rope, k_nope of all heads, output, expert, router), smaller.
@pytest.mark.parametrize("shape", [(112, 24), (448, 4), (16, 256), (128, 112), (112, 32), (112, 6)])
def test_update_rms_matches_adamw(shape):
    update = run(OptimConfig(), [{"gate_DF": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}])["gate_DF"]
    assert 0.14 < float(jnp.sqrt(jnp.mean(update**2))) < 0.23


def test_every_expert_of_every_layer_is_a_matrix_of_its_own(quintic):
    g = np.random.default_rng(0).standard_normal((2, 3, 8, 5)).astype(np.float32)
    g[1, 2] = 0  # an expert without a token
    got = run(OptimConfig(), [{"gate_EDF": g}])["gate_EDF"]
    want = [[0.2 * np.sqrt(8) * quintic(1.95 * one) for one in layer] for layer in g.astype(np.float64)]
    assert relative(got, np.array(want)) < 1e-5
    assert (got[1, 2] == 0).all()


ATTENTION = {
    "q_nope_QHN": (2, 6, 3, 4),
    "q_rope_QHR": (2, 6, 3, 2),
    "kv_down_DC": (2, 8, 5),
    "k_rope_DR": (2, 8, 2),
    "k_nope_CHN": (2, 5, 3, 4),
    "v_CHV": (2, 5, 3, 7),
    "o_HVD": (2, 3, 7, 8),
}
BLOCKS = {  # names of the leaves -> (matrices, n, m)
    "split": {
        "q_nope_QHN": (2, 6, 12),
        "q_rope_QHR": (2, 6, 6),
        "kv_down_DC": (2, 8, 5),
        "k_rope_DR": (2, 8, 2),
        "k_nope_CHN": (2, 5, 12),
        "v_CHV": (2, 5, 21),
        "o_HVD": (2, 21, 8),
    },
    "joint": {
        "q_nope_QHN+q_rope_QHR": (2, 6, 18),
        "kv_down_DC+k_rope_DR": (2, 8, 7),
        "k_nope_CHN+v_CHV": (2, 5, 33),
        "o_HVD": (2, 21, 8),
    },
    "per_head": {
        "q_nope_QHN": (6, 6, 4),
        "q_rope_QHR": (6, 6, 2),
        "kv_down_DC": (2, 8, 5),
        "k_rope_DR": (2, 8, 2),
        "k_nope_CHN": (6, 5, 4),
        "v_CHV": (6, 5, 7),
        "o_HVD": (6, 7, 8),
    },
}


@pytest.mark.parametrize("split", BLOCKS)
def test_split_makes_the_documented_matrices(split):
    tree = {"attention": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in ATTENTION.items()}}
    blocks = {"+".join(path[-1] for path in b.paths): (b.count, b.n, b.m) for b in blocks_of(tree, split)}
    assert blocks == BLOCKS[split]


def by_hand(split, g, quintic):
    """The update of one layer's attention from its gradients, matrix by matrix: head h of the released fused matrices has
    the columns [nope | rope] and [K | V] side by side."""

    def ns(x):
        return 0.2 * np.sqrt(max(x.shape)) * quintic(1.95 * x)

    def flat(x):
        return x.reshape(x.shape[0], -1)

    out, heads = {}, range(3)
    if split == "split":
        for name, x in g.items():
            out[name] = ns(x.reshape(-1, 8) if name == "o_HVD" else flat(x)).reshape(x.shape)
    elif split == "per_head":
        for name, x in g.items():
            if x.ndim == 2:
                out[name] = ns(x)
            elif name == "o_HVD":
                out[name] = np.stack([ns(x[h]) for h in heads])
            else:
                out[name] = np.stack([ns(x[:, h]) for h in heads], axis=1)
    else:
        for first, second in (("q_nope_QHN", "q_rope_QHR"), ("k_nope_CHN", "v_CHV")):
            a, b = g[first], g[second]
            fused = ns(np.hstack([part[:, h] for h in heads for part in (a, b)]))
            width = a.shape[-1] + b.shape[-1]
            out[first] = np.stack([fused[:, h * width :][:, : a.shape[-1]] for h in heads], axis=1)
            out[second] = np.stack([fused[:, h * width + a.shape[-1] :][:, : b.shape[-1]] for h in heads], axis=1)
        fused = ns(np.hstack([g["kv_down_DC"], g["k_rope_DR"]]))
        out["kv_down_DC"], out["k_rope_DR"] = fused[:, :5], fused[:, 5:]
        out["o_HVD"] = ns(g["o_HVD"].reshape(21, 8)).reshape(3, 7, 8)
    return out


@pytest.mark.parametrize("split", BLOCKS)
def test_split_reassembles_the_update_in_the_stored_layout(split, normal, quintic):
    grads = normal({"moe": {"attention": ATTENTION}}, 0)
    got = run(OptimConfig(split=split), [grads])["moe"]["attention"]
    for layer in range(2):
        want = by_hand(split, {k: v[layer].astype(np.float64) for k, v in grads["moe"]["attention"].items()}, quintic)
        for name, w in want.items():
            assert relative(got[name][layer], w) < 1e-5, name


def test_gqa_heads_are_joint_or_apart(normal):
    tree = {"q_DHR": (8, 4, 6), "k_DGR": (8, 2, 6), "v_DGV": (8, 2, 5), "o_HVD": (4, 5, 8)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in tree.items()}
    assert [(b.count, b.n, b.m) for b in blocks_of(tree, "split")] == [(1, 8, 12), (1, 20, 8), (1, 8, 24), (1, 8, 10)]
    assert [(b.count, b.n, b.m) for b in blocks_of(tree, "per_head")] == [(2, 8, 6), (4, 5, 8), (4, 8, 6), (2, 8, 5)]


def test_momentum_is_float32_whatever_the_gradient():
    grad = {"gate_DF": jnp.ones((4, 6), jnp.bfloat16)}
    tx = scale_by_muon(OptimConfig())
    out, state = tx.update(grad, tx.init(grad))
    assert out["gate_DF"].dtype == state.momentum["gate_DF"].dtype == jnp.float32


def test_wrong_leaves_are_named():
    for tree, words in (
        ({"moe": {"norm_D": jnp.ones(4)}}, "letters of moe/norm_D do not make one"),
        ({"moe": {"gate_EDF": jnp.ones((4, 4))}}, r"moe/gate_EDF must have the axes EDF; got shape \(4, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            scale_by_muon(OptimConfig()).init(tree)
    with pytest.raises(ValueError, match="dense/k_rope_DR is missing"):
        scale_by_muon(OptimConfig(split="joint")).init({"dense": {"kv_down_DC": jnp.ones((4, 4))}})
