import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2jax.data.corpora import Documents
from k2jax.data.packing import empty_batch, fill, pack


def _offsets(sizes):
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=80), width=st.integers(1, 40))
def test_every_token_once_no_document_cut_that_fits(sizes, width):
    offsets = _offsets(sizes)
    rows = pack(offsets, width)
    covered = np.zeros(offsets[-1], int)
    for start, length in zip(rows.start, rows.length, strict=True):
        covered[start : start + length] += 1
        document = np.searchsorted(offsets, start, side="right") - 1
        assert start + length <= offsets[document + 1], "a piece spans two documents"
        assert (start - offsets[document]) % width == 0, "a document is cut at multiples of the width only"
    assert (covered == 1).all()
    used = np.array([rows.length[a:b].sum() for a, b in zip(rows.first[:-1], rows.first[1:], strict=True)])
    assert (used <= width).all() and (used > 0).all()
    assert (2 * used <= width).sum() <= 1, "two rows that are half empty would have been one"
    if len(rows):
        np.testing.assert_allclose(rows.padding, 1 - sum(sizes) / (len(rows) * width), atol=1e-12)


def test_typical_documents_leave_little_padding():
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(5.5, 1.0, 5000).astype(int) + 2
    assert pack(_offsets(sizes), 257).padding < 0.01


def test_the_packing_is_deterministic():
    sizes = np.random.default_rng(0).integers(1, 300, 500)
    for a, b in zip(pack(_offsets(sizes), 65), pack(_offsets(sizes), 65), strict=True):
        np.testing.assert_array_equal(a, b)


def test_segments_and_positions_of_a_row(tmp_path):
    tokens = np.arange(100, 118, dtype=np.uint16)
    np.save(tmp_path / "x.tokens.npy", tokens)
    np.save(tmp_path / "x.offsets.npy", _offsets([3, 13, 2]))  # a document of 3, one of 13 (10 and a rest of 3), one of 2
    documents = Documents(tmp_path / "x")
    rows = pack(documents.offsets, 10)
    batch = empty_batch(len(rows), 10, pad=9)
    for b in range(len(rows)):
        fill(batch, b, documents, rows, b)
    assert batch["tokens_BT"].tolist() == [list(range(103, 113)), [100, 101, 102, 113, 114, 115, 116, 117, 9, 9]]
    assert batch["segments_BT"].tolist() == [[1] * 10, [1, 1, 1, 2, 2, 2, 3, 3, 0, 0]]
    assert batch["positions_BT"].tolist() == [list(range(10)), [0, 1, 2, 0, 1, 2, 0, 1, 0, 0]]
    assert all(x.dtype == np.int32 for x in batch.values())
    assert rows.padding == pytest.approx(0.1)
