import jax
import numpy as np
import pytest

from k2jax.optim.probes import compare_entropy, effective_rank, probe, spectral_norm, svd_entropy


def with_values(rng, values, n, m):
    """A float64 matrix with these singular values."""
    u, v = (np.linalg.qr(rng.standard_normal((side, len(values))))[0] for side in (n, m))
    return u * values @ v.T


def entropy_by_svd(x):
    s2 = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False) ** 2
    p = s2 / s2.sum()
    return -(p * np.log(p)).sum() / np.log(len(p))


def test_spectral_norm_is_within_a_percent_of_the_svd():
    """Spectra that are hard for it: dense at the top, two equal values there, all equal, and long tails."""
    rng, n, m = np.random.default_rng(0), 48, 64
    spectra = {
        "normal": np.linalg.svd(rng.standard_normal((n, m)), compute_uv=False),
        "dense at the top": rng.uniform(0.7, 1.1, n),
        "two equal": np.r_[3.0, 3.0, rng.uniform(0, 1, n - 2)],
        "two nearly equal": np.r_[1.0, 0.99, rng.uniform(0, 0.9, n - 2)],
        "all equal": np.ones(n),
        "rank one": np.r_[7.0, np.zeros(n - 1)],
        "power law": 1e3 * np.arange(1.0, n + 1) ** -2,
        "tiny": 1e-9 * rng.uniform(0, 1, n),
    }
    x = np.stack([with_values(rng, s, n, m) for s in spectra.values()]).astype(np.float32)
    largest = [s.max() for s in spectra.values()]
    wide, tall = jax.jit(spectral_norm)(x.reshape(2, 4, n, m)), jax.jit(spectral_norm)(x.mT)
    assert wide.shape == (2, 4)
    for name, got, again, want in zip(spectra, wide.flatten(), tall, largest, strict=True):
        assert 0.99 * want <= got <= want * (1 + 1e-5), name
        assert 0.99 * want <= again <= want * (1 + 1e-5), name
    assert jax.jit(spectral_norm)(np.zeros((3, 2), np.float32)) == 0


def test_entropy_is_one_for_a_uniform_spectrum_and_zero_at_rank_one():
    rng, n, m = np.random.default_rng(0), 8, 20
    half = np.r_[np.ones(4), np.zeros(4)]
    x = [with_values(rng, s, n, m) for s in (np.ones(n), np.r_[5.0, np.zeros(n - 1)], half)]
    x = np.stack([*x, np.zeros((n, m)), rng.standard_normal((n, m))]).astype(np.float32)
    got = jax.jit(svd_entropy)(x)
    np.testing.assert_allclose(got, [1, 0, np.log(4) / np.log(8), 0, entropy_by_svd(x[-1])], atol=1e-5)
    np.testing.assert_allclose(jax.jit(svd_entropy)(1e4 * x.mT), got, atol=1e-5)  # neither the size nor the side matters
    np.testing.assert_allclose(jax.jit(effective_rank)(x), [8, 1, 4, 0, 8 ** entropy_by_svd(x[-1])], rtol=1e-4)
    assert jax.jit(svd_entropy)(np.ones((1, 5), np.float32)) == 0


SHAPES = {
    "embed_WD": (11, 8),
    "norm_D": (8,),
    "moe": {
        "attention": {"q_nope_QHN": (2, 6, 3, 4), "o_HVD": (2, 3, 3, 8), "q_norm_Q": (2, 6)},
        "ffn": {"router_DE": (2, 8, 4), "gate_EDF": (2, 4, 8, 7)},
    },
    "mtp": {"project_JD": (16, 8)},
}


@pytest.fixture
def steps(normal):
    """Weights before and after a step."""
    before, update = normal(SHAPES, 0), normal(SHAPES, 1)
    return before, jax.tree.map(lambda w, u: w + 0.1 * u, before, update)


def test_a_tree_is_probed_matrix_by_matrix(steps):
    before, after = steps
    probes = probe(before, after)
    attention, ffn = after["moe"]["attention"], after["moe"]["ffn"]
    matrices = {  # [layers, experts, n, m]
        "moe/attention/q_nope_QHN": attention["q_nope_QHN"].reshape(2, 1, 6, 12),
        "moe/attention/o_HVD": attention["o_HVD"].reshape(2, 1, 9, 8),
        "moe/ffn/router_DE": ffn["router_DE"][:, None],
        "moe/ffn/gate_EDF": ffn["gate_EDF"],
        "mtp/project_JD": after["mtp"]["project_JD"][None, None],
    }
    assert set(probes) == set(matrices)
    for name, x in matrices.items():
        got, entropy = probes[name], np.array([[entropy_by_svd(w) for w in layer] for layer in x])
        np.testing.assert_allclose(got.spectral_norm, np.linalg.norm(x, 2, axis=(-2, -1)).max(1), rtol=1e-2)
        np.testing.assert_allclose(got.entropy, entropy.mean(1), atol=1e-5)
        np.testing.assert_allclose(got.effective_rank, (float(min(x.shape[2:])) ** entropy).mean(1), rtol=1e-4)
        np.testing.assert_allclose(got.weight_rms, np.sqrt((x**2).mean((1, 2, 3))), rtol=1e-5)
    change = attention["o_HVD"] - before["moe"]["attention"]["o_HVD"]
    np.testing.assert_allclose(probes["moe/attention/o_HVD"].update_rms, np.sqrt((change**2).mean((1, 2, 3))), rtol=1e-5)


def test_entropies_are_compared_over_all_matrices(steps):
    flat, _ = steps

    def spiked(path, w):
        """The routers, and one expert of four in each layer, are of lower entropy: one direction is strengthened."""
        if path[-1].key == "router_DE":
            return w + 100
        if path[-1].key == "gate_EDF":
            return w + 100 * (np.arange(4) == 1)[None, :, None, None].astype(np.float32)
        return w

    found = compare_entropy(flat, jax.tree.map_with_path(spiked, flat))
    assert found["moe/ffn/router_DE"][:2] == (2, 1.0) and found["moe/ffn/router_DE"].gap > 0.5
    assert found["moe/ffn/gate_EDF"][:2] == (8, 0.25) and found["moe/attention/o_HVD"] == (2, 0.0, 0.0)
    total = found.pop("all")
    assert total.matrices == sum(c.matrices for c in found.values()) == 15
    np.testing.assert_allclose(total.higher, 4 / 15)
    np.testing.assert_allclose(total.gap, sum(c.gap * c.matrices for c in found.values()) / 15, rtol=1e-5)
