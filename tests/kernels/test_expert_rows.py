import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import expert_rows
from k2jax.kernels.expert_rows import Experts, block_rows, sort_pairs

X, K, E, D, F, L = 40, 3, 5, 6, 4, 2
SLOT = jnp.int32(1)


def ffn(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def dense(x_XD, expert_XK, weight_XK, experts):
    """Every pair by itself."""
    y_XD = jnp.zeros_like(x_XD)
    for e in range(E):
        w_X = jnp.where(expert_XK == e, weight_XK, 0).sum(-1, keepdims=True)
        y_XD = y_XD + w_X * ffn(x_XD, *(w[SLOT, e] for w in experts))
    return y_XD


def draw(routing):
    rng = np.random.default_rng(0)
    x, d_y = rng.normal(size=(2, X, D)).astype(np.float32)
    weight = rng.uniform(0.1, 1, (X, K)).astype(np.float32)
    experts = Experts(*(rng.normal(size=s).astype(np.float32) for s in ((L, E, D, F), (L, E, D, F), (L, E, F, D))))
    choices = np.stack([rng.permutation(E)[:K] for _ in range(X)])
    if routing == "one expert":
        choices = np.tile(np.array([3, -1, -1]), (X, 1))
    elif routing == "an expert without rows":
        choices = np.where(choices == 2, -1, choices)
    elif routing == "none":
        choices = np.full((X, K), -1)
    elif routing == "some pairs":
        choices = np.where(rng.random((X, K)) < 0.5, -1, choices)
    return jnp.asarray(x), jnp.asarray(d_y), jnp.asarray(choices, jnp.int32), jnp.asarray(weight), experts


ROUTINGS = "random", "one expert", "an expert without rows", "none", "some pairs"


@pytest.mark.parametrize(
    ("routing", "keep", "gates_too"),
    [(routing, keep, False) for routing in ROUTINGS for keep in (0, 2, 100)] + [("some pairs", 2, True)],
)
def test_both_halves_equal_the_sum_over_experts_for_any_routing(routing, keep, gates_too):
    x, d_y, choices, weight, experts = draw(routing)
    block = 8
    start = Experts(*(jnp.full(w.shape, 0.5) for w in experts))  # accumulators are added to

    def ours(x, d_y, weight):
        blocks = sort_pairs(choices, E, block)
        y, gates = expert_rows.forward(x, blocks, weight, experts, SLOT, block, keep if gates_too else 0)
        given = (x, d_y, blocks, weight)
        out, kept, total = expert_rows.backward_rows(*given, experts, SLOT, block, start, keep, gates if gates_too else None)
        return y, out, expert_rows.backward_weights(*given, kept, SLOT, block, total)

    y, out, total = jax.jit(ours)(x, d_y, weight)
    expected, vjp = jax.vjp(lambda x, w, experts: dense(x, choices, w, experts), x, weight, experts)
    d_x, d_weight, d_experts = vjp(d_y)
    assert np.abs(np.asarray(expected)).max() > 0 or routing == "none"
    for a, b in ((y, expected), (out.d_x_XD, d_x), (out.d_weight_XK, np.where(choices >= 0, d_weight, 0))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(total, d_experts, strict=True):
        np.testing.assert_allclose(a - 0.5, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gates_from_the_forward_pass_spare_two_products_and_change_no_bit(dtype):
    x, d_y, choices, weight, experts = draw("random")
    (x, d_y), experts = (a.astype(dtype) for a in (x, d_y)), Experts(*(w.astype(dtype) for w in experts))
    start, block = Experts(*(jnp.zeros(w.shape, jnp.float32) for w in experts)), 8
    blocks = sort_pairs(choices, E, block)
    keep = blocks.expert_M.size

    def ours(gates):
        return expert_rows.backward_rows(x, d_y, blocks, weight, experts, SLOT, block, start, keep, gates)

    gates = jax.jit(lambda x: expert_rows.forward(x, blocks, weight, experts, SLOT, block, keep)[1])(x)
    assert gates.gate.shape == (keep, block, F) and gates.gate.dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ours)(gates), jax.jit(ours)(None))
    products = [str(jax.make_jaxpr(ours)(given)).count("dot_general") for given in (None, gates)]
    assert products == [5, 3]  # gate, up, and through the three matrices


def test_blocks_cover_every_pair_once():
    *_, choices, _, _ = draw("some pairs")
    blocks = sort_pairs(choices, E, 8)
    seen = []
    for m in range(int(blocks.count)):
        start, end = int(blocks.start_M[m]), int(min(blocks.start_M[m] + 8, blocks.end_M[m]))
        pairs = np.asarray(blocks.pair_N)[start:end]
        assert (np.asarray(choices).reshape(-1)[pairs] == blocks.expert_M[m]).all()
        seen += pairs.tolist()
    assert sorted(seen) == np.flatnonzero(np.asarray(choices).reshape(-1) >= 0).tolist()


def test_a_block_has_about_half_an_experts_share():
    assert block_rows(4096 * 8, 24) == 512
    assert block_rows(2048, 64) == 16
    assert block_rows(8, 64) == 16
    assert block_rows(2048, 16) == 64
