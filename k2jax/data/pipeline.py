"""Batches of packed rows, mixed over domains, from a prepared corpus; endless, prefetched and resumable (grain).

A batch is a dict of int32 arrays [B, T + 1]: `tokens_BT`, `segments_BT` (0 is padding, 1, 2, ... the documents of a
row) and `positions_BT` (0 at the first token of each document). The order depends on corpus, mixture, batch, seq_len
and seed, and on nothing else: not on workers, prefetching, the rows that one of many hosts needs, or where a run was stopped.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from k2jax.config import DataConfig
from k2jax.data.corpora import Corpus, Documents
from k2jax.data.packing import Rows, empty_batch, fill, pack

Batch = dict[str, np.ndarray]


class Timed(NamedTuple):
    """A batch and the seconds its consumer waited for it."""

    batch: Batch
    seconds: float


class _Shuffled:
    """A random-access source of (domain, row): every row once an epoch, each epoch in its own order, without end.

    grain's own shuffle costs milliseconds an element when there are few rows; a permutation an epoch does not.
    """

    def __init__(self, domain: str, n_rows: int, seed: int):
        self._domain, self._n_rows, self._seed, self._epoch = domain, n_rows, seed, (-1, None)

    def __len__(self) -> int:
        return 1 << 48

    def __getitem__(self, index: int) -> tuple[str, int]:
        epoch, place = divmod(int(index), self._n_rows)
        known, order = self._epoch
        if epoch != known:
            key = hashlib.sha256(f"{self._seed} {self._domain} {epoch}".encode()).digest()
            order = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "big"))).permutation(self._n_rows)
            self._epoch = epoch, order  # one assignment: reader threads see a whole pair
        return self._domain, int(order[place])


class _Collate:
    """(domain, row) pairs of a whole batch -> its `wanted` rows. Picklable, so that worker processes can hold it."""

    def __init__(self, documents: dict[str, Documents], rows: dict[str, Rows], width: int, pad: int, wanted: list[int]):
        self._documents, self._rows, self._width, self._pad, self._wanted = documents, rows, width, pad, wanted

    def __call__(self, chosen) -> Batch:
        batch = empty_batch(len(self._wanted), self._width, self._pad)
        for b, place in enumerate(self._wanted):
            domain, row = chosen[place]
            fill(batch, b, self._documents[domain], self._rows[domain], row)
        return batch


class Batches:
    """The endless iterator over training batches. Its position is a small dict that JSON can hold.

    grain's own state depends on the number of workers; this one counts batches, so a run may resume with other workers.
    """

    def __init__(self, dataset: grain.MapDataset, workers: int, prefetch: int, order: str, padding: dict[str, float]):
        self._dataset, self._workers, self._prefetch, self._order = dataset, workers, prefetch, order
        self.padding = padding  # domain -> share of positions that hold no token
        self._next, self._iterator = 0, None

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = iter(self._from(self._next))
        batch = next(self._iterator)
        self._next += 1
        return batch

    def get_state(self) -> dict:
        """The position: what `set_state` takes to go on with the batch that `next` would have given."""
        return {"next": self._next, "order": self._order}

    def set_state(self, state: dict) -> None:
        """Moves to a position.

        Raises:
          ValueError: the state is of another corpus, mixture, batch, seq_len or seed.
        """
        if state["order"] != self._order:
            raise ValueError(
                "a data position belongs to one corpus, mixture, batch, seq_len and data seed; the saved one is of order "
                f"{state['order'][:12]}, this run's is {self._order[:12]}"
            )
        self.close()
        self._next = int(state["next"])

    def close(self) -> None:
        """Ends the threads and worker processes that read ahead; `next` starts them again."""
        close = getattr(self._iterator, "close", None)
        self._iterator = None
        if close is not None:
            close()

    def _from(self, start: int) -> grain.IterDataset:
        threads = 1 if self._prefetch and not self._workers else 0
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(1, self._prefetch) if threads else 0)
        dataset = self._dataset[start:].to_iter_dataset(options)
        if self._workers:
            _parse_flags()
            ahead = max(1, self._prefetch)
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._workers, per_worker_buffer_size=ahead))
        return dataset


def _parse_flags() -> None:
    # grain's worker processes read absl flags, which a program that is no absl app has not parsed.
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["k2jax"])


def train_batches(
    corpus: Corpus, config: DataConfig, *, batch: int, seq_len: int, seed: int, wanted: Sequence[int] | None = None
) -> Batches:
    """Endless training batches; each domain's share of the rows is its share of the mixture weights.

    Within a domain every row comes once an epoch, in an order that changes with the epoch.

    Args:
      batch: rows.
      seq_len: tokens the model sees; rows hold one more, the last target.
      seed: of the order.
      wanted: the rows to build, by default all; no token of the others is read, and the position is the same for any.

    Raises:
      ValueError: a domain with a weight is not in the corpus.
    """
    mixture = {domain: weight for domain, weight in config.mixture.items() if weight > 0}
    for domain, weight in mixture.items():
        if domain not in corpus.train:
            raise ValueError(
                f"a domain with a mixture weight must be in the corpus; {domain} has weight {weight}, the corpus has none of it"
            )
    total = sum(mixture.values())
    mixture = {domain: weight / total for domain, weight in mixture.items()}
    rows = {domain: pack(corpus.train[domain].offsets, seq_len + 1) for domain in mixture}
    sources = [grain.MapDataset.source(_Shuffled(domain, len(rows[domain]), seed)) for domain in mixture]
    dataset = grain.MapDataset.mix(sources, list(mixture.values())) if len(sources) > 1 else sources[0]
    # Batched as a MapDataset: batched after the workers, batches would depend on how many there are.
    documents = {domain: corpus.train[domain] for domain in mixture}
    collate = _Collate(documents, rows, seq_len + 1, corpus.tokenizer.pad, _rows(wanted, batch))
    dataset = dataset.batch(batch, drop_remainder=True, batch_fn=collate)
    order = json.dumps([corpus.sha256, corpus.tokenizer.fingerprint, corpus.tokens, mixture, batch, seq_len, seed])
    padding = {domain: rows[domain].padding for domain in mixture}
    return Batches(dataset, config.workers, config.prefetch, hashlib.sha256(order.encode()).hexdigest(), padding)


def _rows(wanted: Sequence[int] | None, batch: int) -> list[int]:
    return list(range(batch) if wanted is None else wanted)


def heldout_batches(
    corpus: Corpus, domain: str, *, batch: int, seq_len: int, count: int, wanted: Sequence[int] | None = None
) -> list[Batch]:
    """The first `count` batches of a domain's held-out rows in a fixed order; always the same ones.

    Each row comes once. When the domain has fewer rows the list is shorter, and padding rows (segment 0) fill its
    last batch. `wanted` are the rows of each batch to build, by default all.

    Raises:
      ValueError: the corpus holds nothing out of this domain.
    """
    if domain not in corpus.heldout or not len(corpus.heldout[domain]):
        raise ValueError(f"a domain that validates must have held-out documents; the corpus has none of {domain!r}")
    documents = corpus.heldout[domain]
    rows, width = pack(documents.offsets, seq_len + 1), seq_len + 1
    source, total, places, batches = _Shuffled(domain, len(rows), 0), min(count * batch, len(rows)), _rows(wanted, batch), []
    for first in range(0, total, batch):
        made = empty_batch(len(places), width, corpus.tokenizer.pad)
        for b, place in enumerate(places):
            if first + place < total:
                fill(made, b, documents, rows, source[first + place][1])
        batches.append(made)
    return batches


def timed(batches: Iterator[Batch]) -> Iterator[Timed]:
    """Each batch with the seconds its consumer waited for it: the measured data wait."""
    clock = time.perf_counter
    while True:
        start = clock()
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield Timed(batch, clock() - start)
