"""From a corpus's name to token arrays on disk: read, remove duplicates, hold out, train the tokenizer, tokenize.

Tiers: `builtin` (no download), `pip` and `apt` (builtin and free texts of those registries), the user's own folder, and
`hf:NAME`. The result is cached under `DataConfig.cache` and memory-mapped; preparing needs the text in memory.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import rich.progress
from rich.console import Console

from k2jax.config import DataConfig
from k2jax.data import builtin, dedup, files, recipes, tokenizers

VERSION = 1  # of what this file and its sources do to text: a change of either makes prepared corpora stale
TOKENIZER_BYTES = 8_000_000  # of the training split that a BPE is trained on; more changes 1024 entries little
BATCH_BYTES = 2_000_000  # of text tokenized at a time


@dataclasses.dataclass(frozen=True)
class Documents:
    """Tokens of the documents of one domain and split, memory-mapped. Each is [BOS], its text, [EOS]."""

    stem: Path  # of STEM.tokens.npy and STEM.offsets.npy

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All documents in a row, [n], uint16 or uint32."""
        return np.asarray(np.load(f"{self.stem}.tokens.npy", mmap_mode="r"))

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Document i is tokens[offsets[i]:offsets[i + 1]]; int64."""
        return np.asarray(np.load(f"{self.stem}.offsets.npy", mmap_mode="r"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self):
        # Worker processes map the files themselves; a pickled memory map would carry the tokens.
        return Documents, (self.stem,)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus: token arrays of each domain, train and held-out, and their tokenizer."""

    tier: str  # builtin, pip, apt, folder or hf
    sha256: str  # of the set of (domain, document) after removal of duplicates; independent of tokenizer and split
    folder: Path
    tokenizer: tokenizers.Tokenizer
    train: dict[str, Documents]  # only domains that have documents
    heldout: dict[str, Documents]
    bytes: dict[str, int]  # of UTF-8 text a domain, both splits
    removed: dict[str, int]  # duplicates, "exact" and "near"

    @property
    def tokens(self) -> int:
        """Tokens of the training split, all domains."""
        return sum(len(documents.tokens) for documents in self.train.values())

    def summary(self) -> str:
        """One line a domain: megabytes of text and tokens of both splits; then the totals."""
        lines = [f"corpus {self.tier}, sha256 {self.sha256[:16]}, {self.tokenizer.n_words:,} words"]
        for domain, size in self.bytes.items():
            train, heldout = len(self.train[domain].tokens), len(self.heldout[domain].tokens)
            lines.append(f"  {domain:<10}{size / 1e6:8.2f} MB {train:>12,} train tokens {heldout:>10,} held out")
        removed = f"removed {self.removed['exact']:,} exact and {self.removed['near']:,} near duplicates"
        lines.append(f"  {'all':<10}{sum(self.bytes.values()) / 1e6:8.2f} MB {self.tokens:>12,} train tokens; {removed}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Source:
    tier: str
    identity: str  # what a cached result is valid for
    read: Callable[[Callable[[str], None]], dict[str, list[str]]]


def prepare(config: DataConfig, *, console: Console | None = None) -> Corpus:
    """The corpus of a config, from the cache or built into it.

    Args:
      config: its fields `corpus`, `tokenizer`, `vocab` and `heldout` determine the result; the mixture is checked.
      console: where progress and the summary go; nothing is printed without it.

    Raises:
      ValueError: the corpus is missing, empty, unreadable or not UTF-8; a domain with a mixture weight has fewer than
        two documents; the tokenizer file is not one.
      ImportError: an optional package that this corpus needs is missing.
      OSError: the cache cannot be written; nothing of the attempt is left.
    """
    source = _source(config)
    tokenizer = _given_tokenizer(config)
    made_by = tokenizer.fingerprint if tokenizer else f"bpe {config.vocab}"
    key = hashlib.sha256(json.dumps([VERSION, source.identity, made_by, config.heldout]).encode()).hexdigest()[:16]
    folder = config.cache.expanduser() / f"{source.tier}-{key}"
    if not (folder / "corpus.json").exists():
        _build(config, source, tokenizer, folder, console)
    corpus = load(folder)
    _check_mixture(config, {domain: len(corpus.train[domain]) + len(corpus.heldout[domain]) for domain in corpus.train})
    if console:
        console.print(corpus.summary(), highlight=False, markup=False, soft_wrap=True)
    return corpus


def load(folder: Path) -> Corpus:
    """A corpus that `prepare` made in this folder."""
    meta = json.loads((folder / "corpus.json").read_text())
    return Corpus(
        tier=meta["tier"],
        sha256=meta["sha256"],
        folder=folder,
        tokenizer=tokenizers.load(folder),
        train={domain: Documents(folder / f"train.{domain}") for domain in meta["bytes"]},
        heldout={domain: Documents(folder / f"heldout.{domain}") for domain in meta["bytes"]},
        bytes=meta["bytes"],
        removed=meta["removed"],
    )


def _source(config: DataConfig) -> _Source:
    name, downloads = config.corpus, config.cache.expanduser() / "downloads"
    if name == "builtin":
        return _Source("builtin", builtin.identity(), builtin.documents)
    if name in recipes.TIERS:
        return _Source(
            name, f"{builtin.identity()} {recipes.identity(name)}", functools.partial(recipes.documents, name, downloads)
        )
    if name.startswith("hf:"):
        return _Source("hf", name, lambda report: files.read_hugging_face(name.removeprefix("hf:")))
    folder = Path(name).expanduser()
    found = [
        (str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in files.list_files(folder) if p.exists()
    ]
    return _Source("folder", f"{folder.resolve()} {found}", functools.partial(files.read_folder, folder))


def _given_tokenizer(config: DataConfig) -> tokenizers.Tokenizer | None:
    """The tokenizer, or None for one that is trained on the corpus."""
    if config.tokenizer == "bpe":
        return None
    if config.tokenizer == "byte":
        return tokenizers.ByteTokenizer()
    return tokenizers.TiktokenTokenizer(Path(config.tokenizer).expanduser())


def _check_mixture(config: DataConfig, documents: dict[str, int]) -> None:
    for domain, weight in config.mixture.items():
        if weight > 0 and documents.get(domain, 0) < 2:
            raise ValueError(
                f"a domain with a mixture weight needs two documents, one to train on and one to hold out; {config.corpus!r} "
                f"has {documents.get(domain, 0)} of {domain}, whose weight is {weight} (set data.{domain} to 0 to leave it out)"
            )


def split(texts: list[str], heldout: float) -> tuple[list[str], list[str]]:
    """Training and held-out documents, told apart by their hashes alone.

    A document is held out when its hash, read as a fraction, is below `heldout`; of two or more documents at least one
    falls on either side (those with the least and the greatest hash).
    """
    texts = sorted(texts, key=dedup.document_hash)
    position = [int.from_bytes(dedup.document_hash(text)[:8], "big") / 2**64 for text in texts]
    n_heldout = int(np.searchsorted(position, heldout))
    n_heldout = min(max(n_heldout, 1), len(texts) - 1) if len(texts) > 1 else 0
    return texts[n_heldout:], texts[:n_heldout]


def content_hash(domains: dict[str, list[str]]) -> str:
    """SHA-256 of a set of documents and their domains, whatever their order."""
    lines = sorted(f"{domain} {dedup.document_hash(text).hex()}\n" for domain, texts in domains.items() for text in texts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _build(
    config: DataConfig, source: _Source, tokenizer: tokenizers.Tokenizer | None, folder: Path, console: Console | None
) -> None:
    """Reads a corpus and writes its tokens into `folder`, whole or not at all."""
    columns = (
        rich.progress.SpinnerColumn(),
        "{task.description}",
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with (
        rich.progress.Progress(*columns, console=console, disable=console is None, transient=True) as progress,
        _new_folder(folder) as temporary,
    ):
        task = progress.add_task("corpus", total=None)

        def report(step: str) -> None:
            progress.update(task, description=step)

        domains = source.read(report)
        if not any(domains.values()):
            raise ValueError(f"a corpus must hold text; {config.corpus!r} holds only white space or nothing")
        _check_mixture(config, {domain: len(texts) for domain, texts in domains.items()})
        domains, removed = dedup.deduplicate(domains, report)
        domains = {domain: texts for domain, texts in domains.items() if texts}
        sizes = {domain: sum(len(text.encode()) for text in texts) for domain, texts in domains.items()}
        splits = {domain: split(texts, config.heldout) for domain, texts in domains.items()}
        _check_mixture(config, {domain: len(texts) for domain, texts in domains.items()})
        if tokenizer is None:
            report("training the tokenizer")
            tokenizer = tokenizers.train_bpe(_sample({d: train for d, (train, _) in splits.items()}), config.vocab)
        report("tokenizing")
        progress.update(task, total=sum(sizes.values()))
        for domain, (train, heldout) in splits.items():
            for name, texts in (("train", train), ("heldout", heldout)):
                _write(temporary / f"{name}.{domain}", texts, tokenizer, functools.partial(progress.advance, task))
        tokenizer.save(temporary)
        meta = {"tier": source.tier, "sha256": content_hash(domains), "bytes": sizes, "removed": removed}
        (temporary / "corpus.json").write_text(json.dumps(meta, indent=2))


def _sample(train: dict[str, list[str]]) -> list[str]:
    """The documents a tokenizer is trained on: of every domain the same share, in the order of their hashes."""
    share = TOKENIZER_BYTES / max(1, sum(len(text) for texts in train.values() for text in texts))
    chosen = []
    for texts in train.values():
        quota = share * sum(map(len, texts))
        for text in texts:
            if quota <= 0:
                break
            chosen.append(text)
            quota -= len(text)
    return chosen


def _write(stem: Path, texts: list[str], tokenizer: tokenizers.Tokenizer, advance: Callable[[int], None]) -> None:
    """Tokenizes documents into STEM.tokens.npy and STEM.offsets.npy."""
    dtype = np.uint16 if tokenizer.n_words <= 1 << 16 else np.uint32
    tokens, lengths = [np.zeros(0, dtype)], []
    bos, eos = np.array([tokenizer.bos], dtype), np.array([tokenizer.eos], dtype)
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            tokens += [bos, ids.astype(dtype), eos]
            lengths.append(len(ids) + 2)
        advance(sum(len(text.encode()) for text in batch))
    np.save(f"{stem}.tokens.npy", np.concatenate(tokens))
    np.save(f"{stem}.offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """Consecutive documents of about `BATCH_BYTES` together."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well and is gone when it does not.

    Two processes may prepare the same corpus: the first to finish gives it, the other's result is dropped.
    """
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(".preparing-*"):  # of a process that was killed
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=".preparing-", dir=folder.parent))
        yield temporary
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "corpus.json").exists():
                raise
    except OSError as error:
        raise OSError(
            error.errno, f"the prepared corpus cannot be written to {folder.parent}: {error.strerror or error}"
        ) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
