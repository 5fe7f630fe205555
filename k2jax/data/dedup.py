"""Removal of duplicate documents: exact ones by hash, near ones by MinHash and locality-sensitive hashing.

MinHash (Broder 1997) estimates the Jaccard similarity of two documents' sets of word 5-grams; bands of the signature
are compared instead of all pairs. Everything is vectorised over the bytes of many documents at a time.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, UInt64

SHINGLE = 5  # words
BANDS, ROWS = 16, 4  # of the signature: a pair at similarity 0.8 meets in some band with probability 0.9998
SIMILAR = 0.6  # estimated similarity from which a document is a near-duplicate; changing one word in 20 gives 0.63
CHUNK_BYTES = 1 << 20
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)


def document_hash(text: str) -> bytes:
    """SHA-256 of a document."""
    return hashlib.sha256(text.encode()).digest()


def deduplicate(
    domains: dict[str, list[str]], report: Callable[[str], None] = lambda step: None
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Domain -> documents without exact and near duplicates, and how many of each kind were removed.

    Duplicates are sought over all domains together; the earlier domain keeps an exact duplicate. Of near-duplicates
    the longest stays. The result depends on the set of documents alone: it is in the order of the documents' hashes.
    """
    report("removing exact duplicates")
    kept: dict[bytes, tuple[str, str]] = {}
    for domain, texts in domains.items():
        for text in texts:
            kept.setdefault(document_hash(text), (domain, text))
    unique = sorted(kept.items(), key=lambda item: (-len(item[1][1]), item[0]))
    report("removing near duplicates")
    drop = near_duplicates([text for _, (_, text) in unique])
    result: dict[str, list[str]] = {domain: [] for domain in domains}
    for _, (domain, text) in sorted(item for item, gone in zip(unique, drop, strict=True) if not gone):
        result[domain].append(text)
    total = sum(map(len, domains.values()))
    return result, {"exact": total - len(unique), "near": int(drop.sum())}


def near_duplicates(texts: list[str]) -> Bool[np.ndarray, "n"]:
    """True for every document that resembles an earlier one.

    Documents of fewer than five words are never near-duplicates.
    """
    signatures_NM, has_shingles_N = signatures(texts)
    members = np.flatnonzero(has_shingles_N)
    drop_N = np.zeros(len(texts), bool)
    for band in range(BANDS):
        key = np.zeros(len(members), np.uint64)
        for column in range(band * ROWS, (band + 1) * ROWS):
            key = _mix(key + signatures_NM[members, column])
        order = np.argsort(key, kind="stable")
        key, rows = key[order], members[order]
        starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, int)
        first = np.repeat(rows[starts], np.diff(np.append(starts, len(key))))
        pairs = first != rows
        first, rows = first[pairs], rows[pairs]
        for i in range(0, len(rows), 1 << 16):
            a, b = first[i : i + (1 << 16)], rows[i : i + (1 << 16)]
            similarity = (signatures_NM[a] == signatures_NM[b]).mean(axis=1)
            drop_N[b[similarity >= SIMILAR]] = True
    return drop_N


def signatures(texts: list[str]) -> tuple[UInt64[np.ndarray, "n m"], Bool[np.ndarray, "n"]]:
    """MinHash signatures, and whether a document has a shingle at all.

    Two signatures agree in a column with the probability of the documents' Jaccard similarity.
    """
    signatures_NM = np.full((len(texts), BANDS * ROWS), np.iinfo(np.uint64).max, np.uint64)
    has_shingles_N = np.zeros(len(texts), bool)
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 1 << 64, BANDS * ROWS, np.uint64)
    factors = rng.integers(0, 1 << 64, BANDS * ROWS, np.uint64) | np.uint64(1)
    first, chunk, size = 0, [], 0
    for i, text in enumerate(texts):
        data = text.lower().encode()
        chunk.append(data)
        size += len(data)
        if size >= CHUNK_BYTES or i == len(texts) - 1:
            hashes, owners = _shingles(chunk)
            if len(hashes):
                starts = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]]))
                rows = first + owners[starts]
                has_shingles_N[rows] = True
                for m in range(BANDS * ROWS):
                    signatures_NM[rows, m] = np.minimum.reduceat((hashes ^ masks[m]) * factors[m], starts)
            first, chunk, size = i + 1, [], 0
    return signatures_NM, has_shingles_N


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words that spreads every bit (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _shingles(documents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all word 5-grams of some documents, and the number of the document each belongs to.

    A word is a run of letters and digits; of scripts without spaces every character is a word.
    """
    data = np.frombuffer(b" ".join(documents) + b" ", np.uint8)
    wide = data >= 0xE0  # first byte of a character of three or four bytes
    continuation = (data & 0xC0) == 0x80
    narrow = ((data >= 97) & (data <= 122)) | ((data >= 48) & (data <= 57)) | ((data >= 0xC0) & (data < 0xE0))
    inside = narrow | wide | continuation
    before = np.concatenate([[False], inside[:-1]])
    starts = np.flatnonzero((inside & ~before) | wide)
    if len(starts) < SHINGLE:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    # A word ends where the run ends or the next wide character begins.
    run_ends = np.flatnonzero(before & ~inside)
    ends = np.minimum(run_ends[np.searchsorted(run_ends, starts, side="right")], np.append(starts[1:], len(data)))
    # Polynomial hashes of all words from one running sum, modulo 2**64.
    powers = np.cumprod(np.full(len(data), _BASE, np.uint64))
    prefix = np.concatenate([np.zeros(1, np.uint64), np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers)])
    inverse = np.cumprod(np.full(len(data), _INVERSE, np.uint64))
    words = _mix((prefix[ends] - prefix[starts]) * inverse[starts])
    lengths = np.array([len(d) + 1 for d in documents])
    owners = np.searchsorted(np.cumsum(lengths), starts, side="right")
    hashes = np.zeros(len(words) - SHINGLE + 1, np.uint64)
    for j in range(SHINGLE):
        hashes = _mix(hashes + words[j : j + len(hashes)])
    same = owners[: len(hashes)] == owners[SHINGLE - 1 :]
    return hashes[same], owners[: len(hashes)][same]
