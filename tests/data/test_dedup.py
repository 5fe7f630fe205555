import random

import numpy as np

from k2jax.data import dedup

WORDS = [f"w{i}" for i in range(5000)]


def _text(rng, n=300):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def _edited(rng, text, share):
    """The text with a share of its words replaced."""
    words = text.split()
    for i in rng.sample(range(len(words)), round(share * len(words))):
        words[i] = rng.choice(WORDS)
    return " ".join(words)


def _jaccard(a, b):
    x, y = (set(zip(*(text.split()[i:] for i in range(5)), strict=False)) for text in (a, b))
    return len(x & y) / len(x | y)


def test_planted_near_duplicates_are_removed_and_nothing_else():
    rng = random.Random(0)
    originals = [_text(rng, rng.randint(150, 600)) for _ in range(400)]
    copies = [_edited(rng, text, 0.02) for text in originals[:200]]
    similar = [_jaccard(a, b) for a, b in zip(originals, copies, strict=False)]
    assert min(similar) > 0.6 and np.median(similar) < 0.9, "the copies must be near, not exact"
    drop = dedup.near_duplicates(originals + copies)
    assert not drop[:400].any()
    assert drop[400:].mean() > 0.95


def test_case_punctuation_and_layout_do_not_hide_a_duplicate():
    rng = random.Random(1)
    text = _text(rng, 100)
    other = "\n".join(word.upper() + "," for word in text.split())
    assert dedup.near_duplicates([text, other]).tolist() == [False, True]


def test_scripts_without_spaces():
    rng = random.Random(2)
    chinese = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(300))
    changed = chinese[:150] + "改" + chinese[151:]
    other = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(300))
    assert dedup.near_duplicates([chinese, other, changed]).tolist() == [False, False, True]


def test_signatures_estimate_the_jaccard_similarity():
    rng = random.Random(3)
    for share in (0.01, 0.05, 0.2):
        errors = []
        for _ in range(20):
            a = _text(rng)
            b = _edited(rng, a, share)
            (x, y), _ = dedup.signatures([a, b])
            errors.append((x == y).mean() - _jaccard(a, b))
        # 64 columns: a standard error of at most 0.0625 a pair, 0.014 for the mean of 20.
        assert abs(np.mean(errors)) < 0.05


def test_signatures_do_not_depend_on_the_chunks(monkeypatch):
    rng = random.Random(4)
    texts = [_text(rng, rng.randint(0, 40)) for _ in range(50)]
    whole, has = dedup.signatures(texts)
    monkeypatch.setattr(dedup, "CHUNK_BYTES", 200)
    np.testing.assert_array_equal(dedup.signatures(texts)[0], whole)
    assert has.tolist() == [len(text.split()) >= 5 for text in texts]


def test_exact_duplicates_stay_once_in_the_earlier_domain_and_order_does_not_matter():
    rng = random.Random(5)
    a, b, c = (_text(rng, 30) for _ in range(3))
    near = _edited(rng, a, 0.02) + " and a longer end"
    kept, removed = dedup.deduplicate({"web": [a, b, "x y"], "code": [b, c, near, "x y"]})
    assert removed == {"exact": 2, "near": 1}
    # Of the near-duplicates the longer one stays; texts under five words are only compared exactly.
    assert {k: set(v) for k, v in kept.items()} == {"web": {b, "x y"}, "code": {c, near}}
    again, _ = dedup.deduplicate({"web": ["x y", b, a], "code": ["x y", near, c, b]})
    assert again == kept


def test_thousand_documents_take_little_time():
    import time

    rng = random.Random(6)
    texts = [_text(rng, 500) for _ in range(1000)]  # 2.4 MB
    start = time.process_time()
    dedup.near_duplicates(texts)
    assert time.process_time() - start < 3
