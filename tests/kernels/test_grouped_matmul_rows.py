"""The feed-forward of arrived rows on grouped products, against the loop over blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import expert_rows, grouped_matmul_rows
from k2jax.kernels.expert_rows import Experts, sort_pairs
from tests.kernels.dense_products import DENSE

X, K, E, D, F, L, BLOCK, SLOT = 30, 3, 5, 6, 4, 2, 8, jnp.int32(1)


@functools.partial(jax.jit, static_argnums=0)
def by_blocks(keep, x, d_y, weight, experts, start, blocks):
    y, _ = expert_rows.forward(x, blocks, weight, experts, SLOT, BLOCK, 0)
    out, kept, total = expert_rows.backward_rows(x, d_y, blocks, weight, experts, SLOT, BLOCK, start, keep)
    return y, out, expert_rows.backward_weights(x, d_y, blocks, weight, kept, SLOT, BLOCK, total)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def by_parts(keep, part, gates_too, x, d_y, weight, experts, start, blocks):
    room = keep if gates_too else 0
    y, gates = grouped_matmul_rows.grouped_forward(DENSE, x, blocks, weight, experts, SLOT, BLOCK, room, part)
    given, gates = (DENSE, x, d_y, blocks, weight), gates if gates_too else None
    out, kept, total = grouped_matmul_rows.grouped_backward_rows(*given, experts, SLOT, start, gates, BLOCK, keep, part)
    return y, out, grouped_matmul_rows.grouped_backward_weights(*given, kept, SLOT, total, BLOCK)


@pytest.mark.parametrize(
    ("routing", "keep", "part", "gates_too"),
    [
        ("some", 3, 3, False),
        ("one", 3, 3, False),
        ("none", 3, 3, False),
        ("some", 0, 3, False),
        ("some", 3, 3, True),
        ("some", 30, 30, True),
    ],
)
def test_arrived_rows_on_grouped_products_equal_the_loop_over_blocks(routing, keep, part, gates_too):
    rng = np.random.default_rng(0)
    x, d_y, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((X, D), (X, D), (X, K)))
    experts, start = (
        Experts(*(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((L, E, D, F), (L, E, D, F), (L, E, F, D))))
        for _ in range(2)
    )
    chosen = {
        "some": np.where(rng.random((X, K)) < 0.4, -1, [rng.permutation(E)[:K] for _ in range(X)]),
        "one": np.tile([3, -1, -1], (X, 1)),
        "none": np.full((X, K), -1),
    }[routing]
    blocks = sort_pairs(jnp.asarray(chosen, jnp.int32), E, BLOCK)
    assert routing != "some" or blocks.count > 6  # more than two parts of three blocks
    arrays = x, d_y, weight, experts, start, blocks
    with jax.default_matmul_precision("highest"):
        expected, got = by_blocks(3, *arrays), by_parts(keep, part, gates_too, *arrays)
    assert routing == "none" or np.abs(np.asarray(expected[0])).max() > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


def test_a_part_is_kept_whole_or_not_at_all():
    with pytest.raises(ValueError, match="all blocks of a part are kept, or none; got keep=2, part=3"):
        grouped_matmul_rows.grouped_backward_rows(DENSE, *[None] * 8, block=8, keep=2, part=3)
