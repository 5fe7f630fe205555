import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.config import OptimConfig
from k2jax.kernels import newton_schulz
from k2jax.kernels.newton_schulz import coefficients
from k2jax.optim import muon
from k2jax.optim.muon import blocks_of, scale_by_muon


def float32(**fields):
    """The tests' references are exact, so Newton-Schulz takes its operands whole."""
    return OptimConfig(ns_dtype="float32", **fields)


def relative(x, y):
    return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


def run(config, grads):
    """The update of the last of a list of gradients."""
    tx = scale_by_muon(config, d_model=16)
    state = tx.init(grads[0])
    update = jax.jit(tx.update)
    for grad in grads:
        out, state = update(grad, state)
    return out


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_equal_algorithm_1(nesterov, quintic):
    grads = [np.random.default_rng(i).standard_normal((8, 20)).astype(np.float32) for i in range(3)]
    got = run(float32(nesterov=nesterov), [{"gate_DF": g} for g in grads])["gate_DF"]
    momentum = np.zeros((8, 20))
    for g in grads:
        momentum = 0.95 * momentum + g
    fed = 0.95 * momentum + g if nesterov else momentum
    assert relative(got, 0.2 * np.sqrt(20) * quintic(fed)) < 1e-5


def test_nesterov_changes_the_update():
    grads = [{"gate_DF": np.random.default_rng(i).standard_normal((8, 20)).astype(np.float32)} for i in range(3)]
    plain, nesterov = (run(float32(nesterov=on), grads)["gate_DF"] for on in (False, True))
    assert relative(plain, np.asarray(nesterov)) > 0.05


# The aspect ratios of K2's matrices (q_down, k_rope, k_nope of all heads, output, expert, router), smaller.
@pytest.mark.parametrize("shape", [(112, 24), (448, 4), (16, 256), (128, 112), (112, 32), (112, 6)])
def test_update_rms_matches_adamw(shape):
    update = run(float32(), [{"gate_DF": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}])["gate_DF"]
    assert 0.14 < float(jnp.sqrt(jnp.mean(update**2))) < 0.23


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 16)])
def test_scale_modes(shape, quintic):
    """Of one momentum: by the longer side, by the measured RMS, by the model's width; only the first two see the shape."""
    g = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    g[1] = 0
    o = np.array([quintic(1.95 * one) for one in g.astype(np.float64)])
    want = {
        "adjusted": 0.3 * np.sqrt(max(shape)) * o,
        "update_norm": np.stack([0.3 * o[0] / np.sqrt(np.mean(o[0] ** 2)), np.zeros(shape)]),
        "baseline": 0.3 * np.sqrt(16) * o,
    }
    for scale, expected in want.items():
        got = run(float32(scale=scale, update_rms=0.3), [{"gate_EDF": g}])["gate_EDF"]
        assert relative(got, expected) < 1e-5, scale
        assert (got[1] == 0).all()


@pytest.mark.parametrize(("name", "steps"), [("you", 5), ("polar_express", 6), ("eight_two", 10), ("jordan", 3)])
def test_the_named_coefficients_and_steps_are_used(name, steps):
    g = np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32)
    u, s, v = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s /= np.sqrt(np.sum(s**2))
    for a, b, c in coefficients(name, steps):
        s = a * s + b * s**3 + c * s**5
    got = run(float32(ns_coefficients=name, ns_steps=steps), [{"gate_DF": g}])["gate_DF"]
    assert relative(got, 0.2 * np.sqrt(20) * (u * s) @ v) < 1e-5


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_operands_of_half_precision(dtype, error, quintic):
    """The default is K2's bfloat16; sums, momentum and the update are float32 (tolerance: three times what is seen)."""
    g = np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32)
    for size in (1.0, 1e-4, 1e12):
        got = run(OptimConfig(ns_dtype=dtype), [{"gate_DF": size * g}])["gate_DF"]
        assert got.dtype == jnp.float32
        found = relative(got, 0.2 * np.sqrt(20) * quintic(1.95 * g.astype(np.float64)))
        assert 1e-6 < found < error


def test_every_expert_of_every_layer_is_a_matrix_of_its_own(quintic):
    g = np.random.default_rng(0).standard_normal((2, 3, 8, 5)).astype(np.float32)
    g[1, 2] = 0  # an expert without a token
    got = run(float32(), [{"gate_EDF": g}])["gate_EDF"]
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
    got = run(float32(split=split), [grads])["moe"]["attention"]
    for layer in range(2):
        want = by_hand(split, {k: v[layer].astype(np.float64) for k, v in grads["moe"]["attention"].items()}, quintic)
        for name, w in want.items():
            assert relative(got[name][layer], w) < 1e-5, name


def test_gqa_heads_are_joint_or_apart(normal):
    tree = {"q_DHR": (8, 4, 6), "k_DGR": (8, 2, 6), "v_DGV": (8, 2, 5), "o_HVD": (4, 5, 8)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in tree.items()}
    assert [(b.count, b.n, b.m) for b in blocks_of(tree, "split")] == [(1, 8, 12), (1, 20, 8), (1, 8, 24), (1, 8, 10)]
    assert [(b.count, b.n, b.m) for b in blocks_of(tree, "per_head")] == [(2, 8, 6), (4, 5, 8), (4, 8, 6), (2, 8, 5)]


def test_leaves_of_one_shape_together_equal_each_alone(monkeypatch):
    """Matrices of one shape in stacks of different length, one alone, and one that lies the other way."""
    shapes = {"gate_EDF": (2, 5, 8, 20), "up_EDF": (2, 5, 8, 20), "q_down_DQ": (3, 8, 20), "k_rope_DR": (8, 20)}
    shapes |= {"down_EFD": (2, 5, 20, 8), "kv_down_DC": (8, 9)}
    rng = np.random.default_rng(0)
    grads = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(2)]
    alone = {name: run(float32(), [{name: g[name]} for g in grads])[name] for name in shapes}
    assert sorted(len(batch) for batch in muon._batches(blocks_of(grads[0], "split"))) == [1, 1, 4]
    for chunk in (newton_schulz.CHUNK_BYTES, 4 * 4 * 8 * 20):  # all at once, and four at a time
        monkeypatch.setattr(newton_schulz, "CHUNK_BYTES", chunk)
        together = run(float32(), grads)
        for name in shapes:
            assert relative(together[name], np.asarray(alone[name])) < 1e-6
    monkeypatch.setattr(muon, "BATCH_BYTES", 0)
    assert [len(batch) for batch in muon._batches(blocks_of(grads[0], "split"))] == [1] * 6


def test_momentum_is_float32_whatever_the_gradient():
    grad = {"gate_DF": jnp.ones((4, 6), jnp.bfloat16)}
    tx = scale_by_muon(float32(), d_model=16)
    out, state = tx.update(grad, tx.init(grad))
    assert out["gate_DF"].dtype == state.momentum["gate_DF"].dtype == jnp.float32


def test_wrong_leaves_are_named():
    for tree, words in (
        ({"moe": {"norm_D": jnp.ones(4)}}, "letters of moe/norm_D do not make one"),
        ({"moe": {"gate_EDF": jnp.ones((4, 0, 8))}}, r"rows and columns; moe/gate_EDF has shape \(4, 0, 8\)"),
        ({"moe": {"gate_EDF": jnp.ones((4, 4))}}, r"moe/gate_EDF must have the axes EDF; got shape \(4, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            scale_by_muon(float32(), d_model=16).init(tree)
    with pytest.raises(ValueError, match="dense/k_rope_DR is missing"):
        scale_by_muon(float32(split="joint"), d_model=16).init({"dense": {"kv_down_DC": jnp.ones((4, 4))}})
