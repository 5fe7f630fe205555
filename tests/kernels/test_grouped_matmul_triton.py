"""NVIDIA's grouped products in Pallas's interpreter, at tiny sizes."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import grouped_matmul_triton as triton
from k2jax.kernels.grouped_matmul import Products
from k2jax.kernels.grouped_matmul_triton import Groups, Taken

# Tiles so small that little matrices have several, some of them cut off by the edges.
SMALL = {"tile": (16, 16), "interpret": True}
KERNELS = Products(functools.partial(triton.multiply, **SMALL), functools.partial(triton.weight_gradient, **SMALL))


def integers(*shape, seed=0):
    """Whose products are exact in float32, and which are exact in every dtype."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.bfloat16)


COUNTS = {"uneven": [0, 37, 5, 0, 50, 16], "all-to-one": [0, 0, 60, 0, 0, 0], "none": [0] * 6}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_are_exact_and_touch_only_their_experts_places(counts):
    counts, before, E, i, j = np.array(counts), 3, 6, 40, 24
    first = before + np.cumsum(counts) - counts
    P, X = 115, 30
    groups = Groups(*(jnp.asarray(a, jnp.int32) for a in (first, first + counts, E + np.arange(E))))  # the second stack
    x, y, w, total = integers(X, i), integers(P, j, seed=1), integers(2 * E, i, j, seed=2), integers(2 * E, i, j, seed=3)
    row = np.random.default_rng(4).integers(0, X, P).astype(np.int32)
    taken = Taken(x, jnp.asarray(row))
    xs, ys, ws = (np.asarray(a, np.float64) for a in (x[row], y, w))
    forth, back = KERNELS.multiply([taken, taken], [w, w], groups), KERNELS.multiply([y], [w], groups, transposed=True)
    assert forth.shape == (P, j) and back.shape == (P, i) and forth.dtype == back.dtype == jnp.bfloat16
    sums = KERNELS.weight_gradient(taken, y, groups, total.astype(jnp.float32))
    alone = KERNELS.weight_gradient(y, taken, groups)
    expected = np.asarray(total, np.float64)
    for e in range(E):
        here = slice(first[e], first[e] + counts[e])
        np.testing.assert_array_equal(forth[here], jnp.asarray(2 * xs[here] @ ws[E + e], jnp.bfloat16))
        np.testing.assert_array_equal(back[here], jnp.asarray(ys[here] @ ws[E + e].T, jnp.bfloat16))
        np.testing.assert_array_equal(alone[e], jnp.asarray(ys[here].T @ xs[here], jnp.bfloat16))
        expected[E + e] += xs[here].T @ ys[here]
    np.testing.assert_array_equal(sums, expected)


def test_tiles_go_with_rows_and_not_with_experts():
    counts = np.zeros(384, int)
    counts[[5, 6, 300]] = 1000, 1, 127
    first = np.cumsum(counts) - counts
    groups = Groups(*(jnp.asarray(a, jnp.int32) for a in (first, first + counts, np.arange(384))))
    start, end, matrix = np.asarray(triton._tiles(groups, 128, 1200))
    lives = start < end
    assert lives.sum() == 8 + 1 + 1 and lives.size <= 1200 // 128 + 384
    assert matrix[lives].tolist() == [5] * 8 + [6, 300]
    assert np.minimum(start[lives] + 128, end[lives]).tolist() == [*range(128, 1000, 128), 1000, 1001, 1128]
