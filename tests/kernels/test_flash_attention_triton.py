"""The kernels for NVIDIA in Pallas's interpreter, at tiny sizes, against a dense float64 reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.kernels import flash_attention_triton as triton
from k2jax.kernels.flash_attention_triton import Tile, first_keys, last_queries, parts


def dense(q, k, v, segments, d_o, scale, soft_cap):
    """Output, largest logits, and gradients of q, k and v, with all logits of every head at once."""
    q, k, v, d_o = (np.asarray(x, np.float64) for x in (q, k, v, d_o))
    B, T, H, _ = q.shape
    G = k.shape[2]
    k, v = (np.repeat(x, H // G, axis=2) for x in (k, v))
    s = np.einsum("bthx,bshx->bhts", q, k) * scale
    allowed = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0) & np.tri(T, dtype=bool)
    allowed = np.broadcast_to(allowed[:, None], s.shape)
    c = soft_cap * np.tanh(s / soft_cap) if soft_cap else s
    c = np.where(allowed, c, -1e9)
    p = np.where(allowed, np.exp(c - c.max(-1, keepdims=True)), 0)
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    o = np.einsum("bhts,bshv->bthv", p, v)
    d_p = np.einsum("bthv,bshv->bhts", d_o, v)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale * ((1 - np.tanh(s / soft_cap) ** 2) if soft_cap else 1)
    d_k, d_v = np.einsum("bhts,bthx->bshx", d_s, q), np.einsum("bhts,bthv->bshv", p, d_o)
    d_k, d_v = (x.reshape(B, T, G, H // G, -1).sum(3) for x in (d_k, d_v))
    return o, np.where(allowed, s, -np.inf).max((0, 2, 3)), np.einsum("bhts,bshx->bthx", d_s, k), d_k, d_v


def draw(T, H, G, Y, V, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (2, T, H, Y), (2, T, G, Y), (2, T, G, V), (2, T, H, V)
    q, k, v, d_o = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    segments = np.ones((2, T), np.int32)
    segments[0, T // 3 :], segments[1, T // 2 :], segments[1, T - 3 :] = 2, 2, 0  # two documents a row, padding
    return q, k, v, segments, d_o


def run(q, k, v, segments, d_o, scale, soft_cap, tile):
    o, max_logit, lse = triton.forward(q, k, v, segments, scale, soft_cap, tile=tile, interpret=True)
    saved = (o, lse, d_o, scale, soft_cap)
    return o, max_logit, *triton.backward(q, k, v, segments, *saved, tiles=(tile, tile), interpret=True)


@pytest.mark.parametrize(
    ("T", "heads", "widths", "soft_cap", "tile", "dtype", "error"),
    [
        (37, (4, 2), (24, 20), 1.5, (16, 16), "float32", 3e-6),  # cut off at every edge, grouped heads, widths in parts
        (40, (2, 2), (48, 8), 0.0, (16, 32), "bfloat16", 2e-2),  # of its rounding errors: 1.2e-2 is seen
    ],
    ids=["ragged-and-capped", "bfloat16"],
)
def test_equals_dense_attention(T, heads, widths, soft_cap, tile, dtype, error):
    given = draw(T, *heads, *widths, dtype)
    got = run(*given, 0.3, soft_cap, Tile(*tile, warps=4, stages=2))
    expected = dense(*given, 0.3, soft_cap)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)  # logits accumulate in float32 whatever the inputs are
    for number in (0, 2, 3, 4):
        assert got[number].dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got[number], np.float64), expected[number], atol=error * np.abs(expected[number]).max()
        )


def test_blocks_after_a_query_and_before_its_document_are_never_read():
    q, k, v, _, d_o = draw(64, 1, 1, 16, 16)
    segments = np.repeat(np.array([[1, 2], [1, 1]], np.int32), 32, axis=1)
    tile = Tile(16, 16, 4, 2)
    # Nothing times nan is nan: it shows wherever a block of it is multiplied.
    first = np.arange(64)[None, :, None, None] < 32
    _, _, d_q, d_k, d_v = run(
        *(jnp.where(first, x, jnp.nan) for x in (q, k, v)), segments, jnp.where(first, d_o, 0), 0.3, 0.0, tile
    )
    assert np.isfinite(np.asarray(d_q)[:, :32]).all()
    assert np.isfinite(np.asarray(d_k)[0, :32]).all() and np.isfinite(np.asarray(d_v)[0, :32]).all()
    assert np.isnan(np.asarray(d_k)[1, :32]).any()  # later queries of the same document do come in
    o, _, d_q, d_k, d_v = run(*(jnp.where(first, jnp.nan, x) for x in (q, k, v)), segments, d_o, 0.3, 0.0, tile)
    assert all(np.isfinite(np.asarray(x)[0, 32:]).all() for x in (o, d_q, d_k, d_v))
    assert np.isnan(np.asarray(o)[1, 32:]).all()


@pytest.mark.parametrize("numbers", ["rising", "any"])
def test_no_allowed_pair_lies_outside_the_blocks_that_are_visited(numbers):
    rng = np.random.default_rng(1)
    segments = rng.integers(0, 6, (3, 50)).astype(np.int32)
    segments[0] = 0
    segments = np.sort(segments, axis=1) if numbers == "rising" else segments
    queries, keys = 8, 16
    first, last = (np.asarray(f(jnp.asarray(segments), queries, keys)) for f in (first_keys, last_queries))
    b, t, u = np.nonzero((segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0) & np.tri(50, dtype=bool))
    assert (first[b, t // queries] <= u // keys).all() and (last[b, u // keys] > t // queries).all()
    assert (first[0] == 4).all() and (last[0] == 0).all()  # nothing but padding: no block
    if numbers == "rising":
        least = np.full(first.shape, 4)
        np.minimum.at(least, (b, t // queries), u // keys)
        seen = least < 4
        assert (first[seen] >= least[seen] - 1).all() and first.max() > 0


@pytest.mark.parametrize("width", [1, 16, 24, 64, 96, 128, 192, 576])
def test_parts_are_powers_of_two_that_cover_a_width(width):
    cut = parts(width)
    assert [first for first, _ in cut] == np.cumsum([0, *(size for _, size in cut[:-1])]).tolist()
    assert all(size >= 16 and size & (size - 1) == 0 for _, size in cut)
    assert width <= sum(cut[-1]) < width + 16
    assert parts(192) == [(0, 128), (128, 64)] and triton.fits(192, 128) and not triton.fits(256, 128)
