import dataclasses
import functools
import itertools
import json
import time

import numpy as np
import pytest

from k2jax.data import pipeline
from k2jax.data.corpora import Documents, prepare
from k2jax.data.pipeline import heldout_batches, timed, train_batches

MIXTURE = dict(web=0.4, code=0.3, math=0.2, knowledge=0.1)
DOMAIN_OF = {"w": "web", "c": "code", "m": "math", "k": "knowledge"}  # each text begins with its domain's name


@pytest.fixture
def corpus(four_domains, make_config):
    return prepare(make_config(four_domains, **MIXTURE))


@pytest.fixture
def config(four_domains, make_config):
    return make_config(four_domains, **MIXTURE)


def _take(batches, n):
    taken = [next(batches) for _ in range(n)]
    batches.close()
    return taken


def _assert_equal(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys() == {"tokens_BT", "segments_BT", "positions_BT"}
        for name in x:
            np.testing.assert_array_equal(x[name], y[name])


def _segments(batch):
    """(tokens, positions) of every document piece of a batch."""
    for tokens, segments, positions in zip(*(batch[n] for n in ("tokens_BT", "segments_BT", "positions_BT")), strict=True):
        for k in range(1, segments.max() + 1):
            inside = np.flatnonzero(segments == k)
            assert (np.diff(inside) == 1).all(), "a segment is one run"
            yield tokens[inside], positions[inside]


def test_a_segment_is_one_document_and_positions_restart(corpus, config):
    tokenizer = corpus.tokenizer
    known = set()
    for domain in corpus.train:
        documents = corpus.train[domain]
        known |= {documents.tokens[a:b].tobytes() for a, b in itertools.pairwise(documents.offsets)}
    whole = 0
    for batch in _take(train_batches(corpus, config, batch=4, seq_len=1600, seed=0), 20):
        assert all(x.shape == (4, 1601) and x.dtype == np.int32 for x in batch.values())
        padded = batch["segments_BT"] == 0
        assert (batch["tokens_BT"][padded] == tokenizer.pad).all() and not (batch["tokens_BT"][~padded] == tokenizer.pad).any()
        for tokens, positions in _segments(batch):
            assert positions.tolist() == list(range(len(tokens)))
            assert not (tokens[1:] == tokenizer.bos).any() and not (tokens[:-1] == tokenizer.eos).any()
            if tokens[0] == tokenizer.bos and tokens[-1] == tokenizer.eos:
                assert tokens.astype(np.uint16).tobytes() in known
                whole += 1
    assert whole > 50


def test_an_epoch_holds_every_token_of_every_document_once(four_domains, make_config):
    config = make_config(four_domains, web=1.0)
    corpus = prepare(config)
    documents = corpus.train["web"]
    n_rows = len(pipeline.pack(documents.offsets, 65))
    batches = train_batches(corpus, config, batch=1, seq_len=64, seed=3)
    epochs = []
    for _ in range(2):
        pieces = [tokens.tobytes() for _ in range(n_rows) for tokens, _ in _segments(next(batches))]
        counts = np.bincount(np.concatenate([np.frombuffer(p, np.int32) for p in pieces]), minlength=260)
        np.testing.assert_array_equal(counts, np.bincount(documents.tokens, minlength=260))
        # Short documents come whole, each exactly once.
        short = [
            documents.tokens[a:b].astype(np.int32).tobytes() for a, b in itertools.pairwise(documents.offsets) if b - a <= 65
        ]
        assert short and all(pieces.count(document) == 1 for document in short)
        epochs.append(pieces)
    batches.close()
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1], "every epoch is shuffled anew"


def test_shares_follow_the_mixture(corpus, config):
    rows, tokens, name = dict.fromkeys(MIXTURE, 0), dict.fromkeys(MIXTURE, 0), {}
    for domain in MIXTURE:  # a row shows its domain by the content of its pieces
        documents = corpus.train[domain]
        packed = pipeline.pack(documents.offsets, 257)
        for row in range(len(packed)):
            made = pipeline.empty_batch(1, 257, corpus.tokenizer.pad)
            pipeline.fill(made, 0, documents, packed, row)
            name[made["tokens_BT"].tobytes()] = domain
    for batch in _take(train_batches(corpus, config, batch=10, seq_len=256, seed=0), 100):
        for row, segments in zip(batch["tokens_BT"], batch["segments_BT"], strict=True):
            rows[name[row.tobytes()]] += 1
            tokens[name[row.tobytes()]] += (segments > 0).sum()
    for domain, weight in MIXTURE.items():
        assert abs(rows[domain] / sum(rows.values()) - weight) < 0.01
        # Small corpora pad more than real ones: the last row of each is nearly empty.
        assert abs(tokens[domain] / sum(tokens.values()) - weight) < 0.02


def test_weights_need_not_sum_to_one_and_zero_leaves_a_domain_out(corpus, config):
    scaled = dataclasses.replace(config, **{k: 7 * v for k, v in MIXTURE.items()})

    def make(c):
        return _take(train_batches(corpus, c, batch=2, seq_len=32, seed=0), 10)

    _assert_equal(make(config), make(scaled))
    only = dataclasses.replace(config, web=0.0, math=0.0, knowledge=0.0)
    begins = [t[1] for batch in make(only) for t, _ in _segments(batch) if t[0] == corpus.tokenizer.bos]
    assert begins and set(begins) == {ord("c")}


def test_the_seed_orders_and_nothing_else_does(corpus, config):
    def make(seed, **changes):
        return _take(train_batches(corpus, dataclasses.replace(config, **changes), batch=4, seq_len=64, seed=seed), 12)

    _assert_equal(make(5), make(5))
    _assert_equal(make(5), make(5, prefetch=0))
    _assert_equal(make(5), make(5, prefetch=7))
    assert not np.array_equal(make(5)[0]["tokens_BT"], make(6)[0]["tokens_BT"])


def test_resumes_exactly(corpus, config):
    batches = train_batches(corpus, config, batch=4, seq_len=64, seed=1)
    for _ in range(17):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = _take(batches, 30)  # passes an epoch of every domain
    fresh = train_batches(corpus, config, batch=4, seq_len=64, seed=1)
    next(fresh)
    fresh.set_state(state)
    assert fresh.get_state() == state
    _assert_equal(_take(fresh, 30), expected)


def test_position_of_another_order_is_refused(corpus, config):
    state = train_batches(corpus, config, batch=4, seq_len=64, seed=1).get_state()
    others = [dict(batch=2, seq_len=64, seed=1), dict(batch=4, seq_len=32, seed=1), dict(batch=4, seq_len=64, seed=2)]
    for other in others:
        with pytest.raises(ValueError, match="one corpus, mixture, batch, seq_len and data seed"):
            train_batches(corpus, config, **other).set_state(state)
    changed = dataclasses.replace(config, web=0.5)
    with pytest.raises(ValueError, match="mixture"):
        train_batches(corpus, changed, batch=4, seq_len=64, seed=1).set_state(state)


@pytest.mark.slow
def test_batches_and_positions_do_not_depend_on_workers(corpus, config):
    expected = _take(train_batches(corpus, config, batch=4, seq_len=64, seed=1), 12)
    for workers in (1, 2):
        batches = train_batches(corpus, dataclasses.replace(config, workers=workers), batch=4, seq_len=64, seed=1)
        got = [next(batches) for _ in range(5)]
        state = batches.get_state()
        batches.close()
        _assert_equal(got, expected[:5])
        # A position taken with workers resumes without, and the other way round.
        plain = train_batches(corpus, config, batch=4, seq_len=64, seed=1)
        plain.set_state(state)
        _assert_equal(_take(plain, 7), expected[5:])


def test_batches_are_cheap(corpus, config):
    batches = train_batches(corpus, dataclasses.replace(config, prefetch=0), batch=16, seq_len=256, seed=0)
    next(batches)
    start = time.process_time()
    for _ in range(100):
        next(batches)
    # About 1 ms; the bound leaves room for a busy machine.
    assert (time.process_time() - start) / 100 < 4e-3


def test_prefetch_hides_a_slow_producer(corpus, config, monkeypatch):
    real = pipeline.empty_batch

    def slow(*args):
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(pipeline, "empty_batch", slow)

    def waited_share(prefetch):
        batches = train_batches(corpus, dataclasses.replace(config, prefetch=prefetch), batch=2, seq_len=32, seed=0)
        stream, waited, start = timed(batches), 0.0, None
        for n, (batch, seconds) in enumerate(itertools.islice(stream, 16)):
            assert set(batch) == {"tokens_BT", "segments_BT", "positions_BT"}
            waited += seconds if n else 0.0  # the first batch cannot be there before it is asked for
            start = start or time.perf_counter()
            time.sleep(0.06)  # the step
        batches.close()
        return waited / (time.perf_counter() - start)

    assert waited_share(2) < 0.05
    assert waited_share(0) > 0.15


def test_heldout_batches_are_the_same_ones_and_come_once(corpus):
    for domain in MIXTURE:
        a, b = (heldout_batches(corpus, domain, batch=4, seq_len=64, count=1000) for _ in range(2))
        _assert_equal(a, b)
        _assert_equal(heldout_batches(corpus, domain, batch=4, seq_len=64, count=2), a[:2])
        seen = np.concatenate([tokens for batch in a for tokens, _ in _segments(batch)])
        np.testing.assert_array_equal(np.bincount(seen), np.bincount(corpus.heldout[domain].tokens))
        assert all(x.shape == (4, 65) for batch in a for x in batch.values())


def test_heldout_text_never_trains(corpus, config):

    def texts(documents):
        return {documents.tokens[a:b].tobytes() for a, b in itertools.pairwise(documents.offsets)}

    for domain in MIXTURE:
        assert texts(corpus.heldout[domain]) and not texts(corpus.heldout[domain]) & texts(corpus.train[domain])


def test_unknown_domains_are_named(four_domains, make_config, corpus, tmp_path, write):
    with pytest.raises(ValueError, match="none of 'novels'"):
        heldout_batches(corpus, "novels", batch=1, seq_len=8, count=1)
    small = prepare(make_config(write(tmp_path / "web", {"a.txt": "one text", "b.txt": "another"})))
    with pytest.raises(ValueError, match=r"code has weight 0.5"):
        train_batches(small, make_config(tmp_path / "web", code=0.5), batch=1, seq_len=8, seed=0)


class Read(Documents):
    """Documents that note which tokens are read."""

    @functools.cached_property
    def seen(self):
        return set()

    @property
    def tokens(self):
        return self

    def __getitem__(self, part):
        self.seen.update(range(part.start, part.stop))
        return Documents(self.stem).tokens[part]


def _share(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


@pytest.mark.parametrize("rows", [[0, 1, 4, 5], [2, 3, 6, 7], [7], list(range(8))])
def test_a_host_builds_its_rows_of_the_same_batches_and_reads_no_others(corpus, config, rows):
    def make(c, **options):
        return _take(train_batches(c, config, batch=8, seq_len=64, seed=2, **options), 6)

    reading = dataclasses.replace(corpus, train={domain: Read(documents.stem) for domain, documents in corpus.train.items()})
    whole = make(corpus)
    _assert_equal(make(reading, wanted=rows), [_share(batch, rows) for batch in whole])
    share = sum(len(documents.seen) for documents in reading.train.values())
    # Rows read ahead count too, and a row may come again in the next epoch: an upper bound.
    assert share <= (6 + config.prefetch + 1) * len(rows) * 65

    for domain in MIXTURE:
        shape = dict(batch=8, seq_len=64, count=1000)
        kept = [_share(batch, rows) for batch in heldout_batches(corpus, domain, **shape)]
        reading = dataclasses.replace(corpus, heldout={domain: Read(corpus.heldout[domain].stem)})
        _assert_equal(heldout_batches(reading, domain, **shape, wanted=rows), kept)
        assert len(reading.heldout[domain].seen) == sum((batch["segments_BT"] > 0).sum() for batch in kept)


def test_a_position_goes_on_with_other_rows(corpus, config):
    def make(rows):
        return train_batches(corpus, config, batch=8, seq_len=64, seed=2, wanted=rows)

    first = make([0, 1])
    _take(first, 5)
    state = first.get_state()
    assert state == {**make(None).get_state(), "next": 5}
    others = make([3, 6])
    others.set_state(json.loads(json.dumps(state)))
    _assert_equal(_take(others, 4), [_share(batch, [3, 6]) for batch in _take(make(None), 9)[5:]])
