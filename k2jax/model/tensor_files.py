"""Files of named tensors in the safetensors format, mapped into memory: nothing is read before it is looked at.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, place of the bytes), and
the bytes. The library of that name writes a file from tensors that are all in memory; here a file is laid out first and filled
piece by piece, so that a checkpoint may be larger than memory.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes, the format's own limit


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self, mode: str = "r") -> np.ndarray:
        """The tensor, mapped; `r` only to read, `r+` to write."""
        return np.memmap(self.path, self.dtype, mode, self.offset, self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file. Raises ValueError, naming the file, if it is cut short or no such file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{path} is cut short or no safetensors file: its {size} bytes do not hold its header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file: its header is not JSON") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"a tensor must be one of {', '.join(DTYPES)}; {name} in {path} is {entry['dtype']}")
        tensor = Stored(path, tuple(entry["shape"]), DTYPES[entry["dtype"]], 8 + length + start)
        if end - start != tensor.nbytes:
            raise ValueError(f"{name} in {path} has {end - start} bytes; its shape {tensor.shape} takes {tensor.nbytes}")
        if tensor.offset + tensor.nbytes > size:
            raise ValueError(f"{path} is cut short: {name} ends at byte {tensor.offset + tensor.nbytes}, the file at {size}")
        tensors[name] = tensor
    return tensors


@contextlib.contextmanager
def create(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> Iterator[dict[str, Stored]]:
    """Makes a file of tensors of these shapes and dtypes, which the context fills through `map("r+")`.

    The file has its name once the context ends well. Raises OSError at once if the disk has no room for it.
    """
    header, offset = {}, 0
    for name, (shape, dtype) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes begin at a multiple of 8
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        size = file.tell() + offset
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk must be an error here, not a signal at a write
        else:
            file.truncate(size)
    yield read_header(partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
