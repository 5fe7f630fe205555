"""Rows of a fixed number of tokens, packed from whole documents."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from k2jax.data.corpora import Documents


class Rows(NamedTuple):
    """A packing: row r holds pieces `first[r] .. first[r + 1] - 1`, one after the other.

    Pieces cover every token of every document once. A document longer than a row is cut into row-sized pieces and a
    rest; shorter documents and rests are never cut.
    """

    first: Int[np.ndarray, "r1"]
    start: Int[np.ndarray, "pieces"]  # position of a piece in the token array
    length: Int[np.ndarray, "pieces"]
    width: int  # tokens of a row

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def padding(self) -> float:
        """Share of the positions of all rows that hold no token."""
        return 1 - float(self.length.sum()) / (len(self) * self.width) if len(self) else 0.0


def pack(offsets: Int[np.ndarray, "n1"], width: int) -> Rows:
    """Packs documents into rows of `width` tokens by best fit, longest piece first.

    Document i is tokens `offsets[i] .. offsets[i + 1] - 1`. Each piece goes into the fullest row that has room for it.
    Depends on the offsets and the width alone.
    """
    start, length = _pieces(np.asarray(offsets, np.int64), width)
    order = np.argsort(-length, kind="stable")
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(width)]  # by room left
    rooms = 0  # bit r is set when a row with room r is open
    for piece, need in zip(order.tolist(), length[order].tolist(), strict=True):
        fitting = rooms >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
            rows[row].append(piece)
        else:
            row, room = len(rows), width
            rows.append([piece])
        left = room - need
        if left:
            open_rows[left].append(row)
            rooms |= 1 << left
    flat = np.fromiter((piece for row in rows for piece in row), np.int64)
    first = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Rows(first=first, start=start[flat], length=length[flat], width=width)


def _pieces(offsets: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of the pieces that documents are cut into."""
    sizes = np.diff(offsets)
    counts = -(-sizes // width)  # 0 for an empty document
    owner = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = offsets[owner] + number * width
    return start, np.minimum(width, offsets[owner + 1] - start)


def fill(batch: dict[str, np.ndarray], b: int, documents: Documents, rows: Rows, row: int) -> None:
    """Writes packed row `row` into row `b` of a batch of zeros and padding."""
    at = 0
    tokens, segments, positions = batch["tokens_BT"][b], batch["segments_BT"][b], batch["positions_BT"][b]
    pieces = range(rows.first[row], rows.first[row + 1])
    for segment, (start, length) in enumerate(zip(rows.start[pieces].tolist(), rows.length[pieces].tolist(), strict=True), 1):
        end = at + length
        tokens[at:end] = documents.tokens[start : start + length]
        segments[at:end] = segment
        positions[at:end] = _COUNT[:length] if length <= len(_COUNT) else np.arange(length)
        at = end


_COUNT = np.arange(1 << 13, dtype=np.int32)


def empty_batch(batch: int, width: int, pad: int) -> dict[str, np.ndarray]:
    """A batch that holds padding alone: token `pad`, segment 0, position 0; int32, [batch, width]."""
    shape = (batch, width)
    return {
        "tokens_BT": np.full(shape, pad, np.int32),
        "segments_BT": np.zeros(shape, np.int32),
        "positions_BT": np.zeros(shape, np.int32),
    }
