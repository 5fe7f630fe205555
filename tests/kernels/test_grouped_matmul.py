import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import grouped_matmul
from k2jax.kernels.grouped_matmul import RAGGED, routed_swiglu, sort_into_blocks
from tests.kernels.dense_products import DENSE


def loop_over_experts(x_XD, expert_XK, weight_XK, gate_EDF, up_EDF, down_EFD):
    """The obvious implementation: every expert sees every token, and a token keeps what it chose."""
    y = jnp.zeros_like(x_XD)
    for e in range(gate_EDF.shape[0]):
        weight_X1 = jnp.where(expert_XK == e, weight_XK, 0).sum(1, keepdims=True)
        y += weight_X1 * ((jax.nn.silu(x_XD @ gate_EDF[e]) * (x_XD @ up_EDF[e])) @ down_EFD[e])
    return y


def choices(routing, X, K, E):
    rng = np.random.default_rng(0)
    if routing == "one":  # every token on the same experts, all others empty
        return np.tile(np.arange(K) + 1, (X, 1))
    if routing == "skewed":
        return np.stack([rng.choice(E, K, replace=False, p=np.arange(1, E + 1) / (E * (E + 1) / 2)) for _ in range(X)])
    return np.stack([rng.permutation(E)[:K] for _ in range(X)])


@pytest.mark.parametrize(("X", "routing"), [(1, "uniform"), (37, "one"), (200, "skewed")])
def test_equals_a_loop_over_experts(X, routing):
    E, K, D, F = 12, 3, 8, 5
    keys = jax.random.split(jax.random.key(1), 5)
    args = (
        jax.random.normal(keys[0], (X, D)),
        jax.random.uniform(keys[1], (X, K)),
        jax.random.normal(keys[2], (E, D, F)),
        jax.random.normal(keys[3], (E, D, F)),
        jax.random.normal(keys[4], (E, F, D)),
    )
    expert = jnp.asarray(choices(routing, X, K, E), jnp.int32)

    def run(function):
        def scalar(x, weight, *matrices):
            y = function(x, expert, weight, *matrices)
            return (y * jnp.sin(jnp.arange(y.size).reshape(y.shape))).sum(), y

        (_, y), grads = jax.value_and_grad(scalar, argnums=(0, 1, 2, 3, 4), has_aux=True)(*args)
        return y, grads

    with jax.default_matmul_precision("highest"):
        got, expected = run(routed_swiglu), run(loop_over_experts)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=3e-6 * float(jnp.abs(b).max()) + 1e-7)

    jax.tree.map(close, got, expected)


@pytest.mark.parametrize("products", [DENSE, RAGGED], ids=["as-the-kernels", "ragged"])
def test_grouped_products_equal_the_loop_over_blocks(products):
    X, K, E, D, F = 50, 3, 6, 24, 20
    rng = np.random.default_rng(0)
    x, d_y, weight, gate, up, down = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((X, D), (X, D), (X, K), (E, D, F), (E, D, F), (E, F, D))
    )
    chosen = jnp.asarray(np.stack([1 + rng.permutation(E - 1)[:K] for _ in range(X)]), jnp.int32)  # none to expert 0
    blocks = grouped_matmul.sort_into_blocks(chosen, E, 16, 3)
    weight_P = grouped_matmul._padded_weight(blocks, weight)
    given = x, weight_P, blocks, gate, up, down

    def both(forward, backward):
        y_PD, *halves = forward(*given)
        return y_PD, *halves, *backward(*given, *halves, d_y)

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda: both(grouped_matmul._loop_forward, grouped_matmul._loop_backward))()
        grouped = (functools.partial(f, products) for f in (grouped_matmul._grouped_forward, grouped_matmul._grouped_backward))
        got = jax.jit(lambda: both(*grouped))()
    places = int(blocks.count) * 16  # beyond them the grouped form may leave anything
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        a, b = (a[:places], b[:places]) if number < 5 else (a, b)
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("turn", [1, 5])
def test_every_choice_has_one_place_in_a_block_of_its_expert(turn):
    E, block = 7, 4
    expert = jnp.asarray(choices("skewed", 50, 3, E), jnp.int32)
    blocks = sort_into_blocks(expert, E, block, turn)
    slots = np.asarray(blocks.slot_XK)
    assert len(np.unique(slots)) == slots.size
    assert (np.asarray(blocks.expert_tM).ravel()[slots // block] == expert).all()
    assert (np.asarray(blocks.token_P)[slots] == np.arange(50)[:, None]).all()
    loads = np.bincount(np.asarray(expert).ravel(), minlength=E)
    assert blocks.count == (-(-loads // block)).sum()
    assert blocks.expert_tM.shape[1] == turn and blocks.expert_tM.size * block == blocks.token_P.size


def test_large_keys_do_not_overflow():
    """Above 2**31 (experts x rows) the sort falls back to a key with a payload; both orders agree."""
    from k2jax.kernels.grouped_matmul import argsort

    expert = jax.random.randint(jax.random.key(0), (1000,), 0, 9)
    np.testing.assert_array_equal(argsort(expert, 9), argsort(expert, 2**30))
    np.testing.assert_array_equal(argsort(expert, 9), np.argsort(np.asarray(expert), kind="stable"))


def test_memory_does_not_grow_with_experts_times_tokens():
    X, K, D, F = 2048, 4, 8, 4

    def temp(E):
        shapes = [(X, D), (X, K), (E, D, F), (E, D, F), (E, F, D)]
        x, w, *m = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        expert = jax.ShapeDtypeStruct((X, K), jnp.int32)
        step = jax.jit(jax.grad(lambda *a: routed_swiglu(*a).sum(), argnums=(0, 2, 3, 4, 5)))
        return step.lower(x, expert, w, *m).compile().memory_analysis().temp_size_in_bytes

    bound = 56 * 64 * (2 * D + 2 * F + 4) * 4 * 3 + 56 * 3 * D * F * 4 * 3  # a block and a matrix an expert
    assert bound < 56 * X * D * 4 / 2  # far below every token beside every expert
    assert temp(64) - temp(8) < bound
