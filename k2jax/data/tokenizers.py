"""Text to token ids and back: a byte-level BPE trained here, plain bytes, or a `tiktoken.model` file such as Kimi K2's.

All three split no document's text into specials: "[BOS]" in a text is five characters, never the special token.
"""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers

# How K2 cuts text before BPE, its alternatives in order (facts of the released tokenizer): a run of Han; an optional
# other character and a word with a lowercase end, Han excluded, with its contraction; the same led by capitals; up to
# three digits; an optional space and punctuation with newlines; newlines; trailing white space; white space.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
K2_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Slot of K2's named specials after the mergeable ranks: id = number of ranks + slot. The other slots are reserved.
K2_SPECIALS = {
    **{"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6},
    **{"<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11},
    **{"<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13, "<|tool_call_argument_begin|>": 14},
    **{"<|tool_call_end|>": 15, "<|im_middle|>": 17, "[UNK]": 254, "[PAD]": 255},
}
K2_SLOTS = 256
SPECIALS = ("[BOS]", "[EOS]", "[PAD]", "[UNK]")  # of the tokenizers made here


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    n_words: int  # ids are below it
    bos: int
    eos: int
    pad: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what determines the ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without specials."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of many texts, int32, each as `encode` gives them."""

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of ids, the inverse of `encode`. Specials read as their names; bytes that are not UTF-8 as U+FFFD."""

    def save(self, folder: Path) -> None:
        """Writes what `load` needs into a folder that exists."""


class ByteTokenizer:
    """The bytes of UTF-8, 0..255, and four specials."""

    n_words, bos, eos, pad = 260, 256, 257, 258
    fingerprint = hashlib.sha256(b"byte 256 " + " ".join(SPECIALS).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return b"".join(bytes([i]) if i < 256 else SPECIALS[i - 256].encode() for i in ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps({"kind": "byte"}))


class BpeTokenizer:
    """Byte-level BPE of the `tokenizers` library; text is cut by K2's pattern first."""

    def __init__(self, inner: tokenizers.Tokenizer):
        # Text may contain the names of specials; they are ordinary characters there.
        inner.encode_special_tokens = True
        self._inner = inner
        self.n_words = inner.get_vocab_size()
        self.bos, self.eos, self.pad = (inner.token_to_id(name) for name in SPECIALS[:3])

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(e.ids, np.int32) for e in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self._inner.save(str(folder / "tokenizer.json"))


def train_bpe(texts: Iterator[str] | list[str], vocab: int) -> BpeTokenizer:
    """Trains byte-level BPE. Deterministic in the texts and their order.

    Args:
      texts: training documents.
      vocab: entries, specials and 256 bytes included; fewer come out when the texts hold fewer pairs to merge.
    """
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(K2_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return BpeTokenizer(inner)


class TiktokenTokenizer:
    """A `tiktoken.model` file with K2's pattern and K2's 256 special slots after its ranks.

    Of K2's own file, 163,584 ranks, the named specials get the published ids ([BOS] 163584, [PAD] 163839).
    """

    # Longer pieces make tiktoken's matching of runs slow; K2's own tokenizer cuts at these lengths too.
    LONGEST_TEXT, LONGEST_RUN = 400_000, 25_000

    def __init__(self, path: Path):
        try:
            import tiktoken
        except ImportError as error:
            raise ImportError("tiktoken.model files need the package tiktoken: pip install 'k2jax[data]'") from error
        self._path, ranks = Path(path), read_ranks(path)
        names = {slot: name for name, slot in K2_SPECIALS.items()}
        slots = {names.get(slot, f"<|reserved_token_{len(ranks) + slot}|>"): len(ranks) + slot for slot in range(K2_SLOTS)}
        self._inner = tiktoken.Encoding("k2", pat_str=K2_PATTERN, mergeable_ranks=ranks, special_tokens=slots)
        self.specials = {name: slots[name] for name in K2_SPECIALS}
        self.n_words = len(ranks) + K2_SLOTS
        self.bos, self.eos, self.pad = (slots[name] for name in SPECIALS[:3])
        self.fingerprint = hashlib.sha256(self._path.read_bytes() + K2_PATTERN.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return [i for piece in self._pieces(text) for i in self._inner.encode_ordinary(piece)]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._inner.decode(list(ids))

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps({"kind": "tiktoken"}))
        if self._path.resolve() != (folder / "tiktoken.model").resolve():
            shutil.copyfile(self._path, folder / "tiktoken.model")

    def _pieces(self, text: str) -> Iterator[str]:
        for i in range(0, len(text), self.LONGEST_TEXT):
            part, start = text[i : i + self.LONGEST_TEXT], 0
            for run in re.finditer(r"\s+|\S+", part) if len(part) > self.LONGEST_RUN else ():
                for cut in range(run.start() + self.LONGEST_RUN, run.end(), self.LONGEST_RUN):
                    yield part[start:cut]
                    start = cut
            yield part[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Mergeable ranks of a tiktoken file: lines of a token in base64, a space and its rank.

    Raises:
      ValueError: the file is missing or empty, a line is no such pair, the ranks are not 0, 1, 2 ..., or a single byte
        has no rank.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"a tokenizer is bpe, byte or the path of a tiktoken.model that can be read; got {path} ({error.strerror})"
        ) from error
    ranks = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"each line of a tiktoken.model is a base64 token and its rank; {path}, line {number}: {line[:40]!r}"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise ValueError(
            f"the ranks of a tiktoken.model count from 0 without gaps or repetition; {path} has {len(ranks)} ranks that do not"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"a tiktoken.model has a rank for each of the 256 bytes; {path} lacks byte {missing[0]}")
    return ranks


def load(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into a folder."""
    text = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    kind = json.loads(text).get("kind")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "tiktoken":
        return TiktokenTokenizer(Path(folder) / "tiktoken.model")
    return BpeTokenizer(tokenizers.Tokenizer.from_str(text))
