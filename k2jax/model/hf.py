"""Published checkpoints of Kimi K2, DeepSeek-V3 and Llama: reads them into our folders of weights, and writes them.

`python -m k2jax.model.hf import SOURCE TARGET`: a published folder (config.json, safetensors shards and their index) becomes a
folder of weights, `k2jax.model.store`, which training and `k2jax.infer.generate` read. FP8 weights become bfloat16.
`python -m k2jax.model.hf export SOURCE TARGET`: a folder of weights, or of a training run, becomes a published one.
`python -m k2jax.model.hf inspect SOURCE`: what a published folder holds, and whether it is whole.

One tensor is in memory at a time. The same command goes on after an interruption; no finished file is made again.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np
import rich.progress
import tyro
from rich.console import Console

from k2jax.config import ModelConfig
from k2jax.model import store
from k2jax.model.hf_config import from_published, to_published
from k2jax.model.hf_names import Entry, Part, entries, to_ours
from k2jax.model.hf_names import to_published as fuse
from k2jax.model.tensor_files import Stored, create, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALE, BLOCK = "_scale_inv", 128  # FP8: `NAME_scale_inv` has a float32 for each block of 128 x 128
TOKENIZERS = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json")
MARK = ".source.json"  # what a folder under work is made of
FP8, BF16, FP32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


class Published(NamedTuple):
    """A published folder, checked against its config; no tensor is read yet."""

    config: ModelConfig
    entries: list[Entry]
    tensors: dict[str, Stored]

    def read(self, name: str) -> np.ndarray:
        """A tensor; FP8 ones times their scales, in bfloat16."""
        x = self.tensors[name]
        return dequantized(x.map(), self.tensors[name + SCALE].map()) if x.dtype == FP8 else x.map()

    def dtype(self, name: str) -> np.dtype:
        """Of what `read` gives."""
        dtype = self.tensors[name].dtype
        return BF16 if dtype == FP8 else dtype


def dequantized(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A matrix in bfloat16 from its FP8 blocks of 128 x 128 and their scales; the last blocks may be cut off."""
    rows, columns = x.shape
    y = np.empty(x.shape, BF16)
    for i in range(0, rows, BLOCK):
        across = np.repeat(scale[i // BLOCK], BLOCK)[:columns]
        y[i : i + BLOCK] = (x[i : i + BLOCK].astype(np.float32) * across).astype(BF16)
    return y


def open_published(folder: Path) -> Published:
    """Reads the config and the headers of a published folder.

    Raises ValueError, naming the field, file or tensors, if it is not a whole model that we can hold.
    """
    config, tied = from_published(_read_json(folder / "config.json"))
    tensors = _headers(folder)
    wanted = entries(config, tied)
    shapes = {entry.name: entry.shape for entry in wanted}
    for entry in wanted:
        if (x := tensors.get(entry.name)) and x.dtype == FP8:
            shapes[entry.name + SCALE] = tuple(-(-n // BLOCK) for n in entry.shape)
    # Old checkpoints keep the rotation's frequencies, which the config determines.
    held = {name: x.shape for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    store.compare(str(folder), held, shapes)
    return Published(config, wanted, tensors)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a published folder holds {path.name}; {path} can not be read ({error})") from None


def _headers(folder: Path) -> dict[str, Stored]:
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"a published folder holds {INDEX} or {SINGLE}; {folder} has neither")
        return read_header(folder / SINGLE)
    shard_of, tensors = _read_json(folder / INDEX).get("weight_map"), {}
    if not isinstance(shard_of, dict):
        raise ValueError(f"an index names the shard of each tensor in its weight_map; {folder / INDEX} has none")
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).exists():
            raise ValueError(f"{folder} is not whole: {shard}, which its index names, is missing")
        header = read_header(folder / shard)
        if apart := sorted({name for name, s in shard_of.items() if s == shard} ^ header.keys()):
            raise ValueError(f"{folder / shard} does not hold what the index says: it differs in {', '.join(apart[:8])}")
        tensors |= header
    return tensors


def import_weights(source: Path, target: Path, *, dtype: str | None = None, console: Console | None = None) -> None:
    """Makes a folder of weights of a published one.

    Args:
      dtype: of all weights, "float32" or "bfloat16"; None keeps what is published, FP8 as bfloat16. The selection bias is
        float32 always.

    Raises ValueError if the source is not whole, or the target holds something else; OSError if the disk is full.
    """
    published = open_published(source)
    record = {"source": str(source.resolve()), "dtype": dtype, "shards": _stamps(x.path for x in published.tensors.values())}
    by_file: dict[str, list[Entry]] = {}
    for entry in published.entries:
        by_file.setdefault(store.file_of(entry.parts[0].name), []).append(entry)
    kinds = {name: kind for group in by_file.values() for name, kind in _kinds(published, group, dtype).items()}
    _claim(target, record)
    (target / "model.json").write_text(store.describe(published.config, record))
    with _progress(sum(published.tensors[e.name].nbytes for e in published.entries), console) as advance:
        for file, shapes in store.files(published.config).items():
            if not (target / file).exists():
                with create(target / file, {name: (shape, kinds[name]) for name, shape in shapes.items()}) as places:
                    for entry in by_file[file]:
                        _import_one(published, entry, places)
                        advance(published.tensors[entry.name].nbytes)
            else:
                advance(sum(published.tensors[e.name].nbytes for e in by_file[file]))
    for name in TOKENIZERS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _kinds(published: Published, group: list[Entry], dtype: str | None) -> dict[str, np.dtype]:
    """The dtype of each of our tensors; those put together of many must be of one."""
    kinds: dict[str, np.dtype] = {}
    for entry in group:
        kind = np.dtype(dtype) if dtype else published.dtype(entry.name)
        for part in entry.parts if not entry.copy else ():
            kind = FP32 if part.name.endswith(store.BIAS) else kind
            if kinds.setdefault(part.name, kind) != kind:
                raise ValueError(f"experts of a layer must have one dtype; {entry.name} is {kind}, others {kinds[part.name]}")
    return kinds


def _import_one(published: Published, entry: Entry, places: Mapping[str, Stored]) -> None:
    x = published.read(entry.name)
    if entry.copy:
        whole = "model.embed_tokens.weight" if entry.parts[0].name == "embed_WD" else "lm_head.weight"
        if not np.array_equal(x.view(np.uint8), published.read(whole).view(np.uint8)):
            raise ValueError(f"MTP shares the embedding and the head; {entry.name} differs from {whole}")
        return
    for part, y in zip(entry.parts, to_ours(entry, x), strict=True):
        places[part.name].map("r+")[part.index] = y


def export_weights(
    source: Path, target: Path, *, dtype: str = "bfloat16", shard_bytes: int = 5 * 10**9, console: Console | None = None
) -> None:
    """Makes a published folder of a folder of weights or of a training run, whose weights are then in memory at once.

    Args:
      dtype: of all weights, "float32" or "bfloat16"; the selection bias is float32 always.
      shard_bytes: a shard ends before the tensor with which it would be larger.

    Raises like `import_weights`.
    """
    config, read, record = _our_weights(source)
    fields = to_published(config, dtype)
    wanted = [(entry, FP32 if entry.name.endswith("_bias") else np.dtype(dtype)) for entry in entries(config)]
    sizes = [math.prod(entry.shape) * kind.itemsize for entry, kind in wanted]
    shards = _shards(sizes, shard_bytes)
    names = (
        [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    _claim(target, {"source": str(source.resolve()), "dtype": dtype, "shard_bytes": shard_bytes, **record})
    with _progress(sum(sizes), console) as advance:
        for name, places in zip(names, shards, strict=True):
            if not (target / name).exists():
                with create(target / name, {wanted[i][0].name: (wanted[i][0].shape, wanted[i][1]) for i in places}) as stored:
                    for i in places:
                        entry, kind = wanted[i]
                        stored[entry.name].map("r+")[...] = fuse(entry, [read(p) for p in entry.parts]).astype(kind, copy=False)
                        advance(sizes[i])
            else:
                advance(sum(sizes[i] for i in places))
    weight_map = {wanted[i][0].name: name for name, places in zip(names, shards, strict=True) for i in places}
    if len(shards) > 1:
        _write_json(target / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})
    _write_json(target / "config.json", fields)
    for name in TOKENIZERS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _our_weights(source: Path) -> tuple[ModelConfig, Callable[[Part], np.ndarray], dict]:
    """The config, a function that reads a part of a tensor, and what tells this source from another."""
    if (source / "model.json").exists():
        config = store.read_config(source)
        held = store.tensors(source, config)
        return config, lambda part: held[part.name].map()[part.index], {"files": _stamps(x.path for x in held.values())}
    config, *trees = store.load(source, "float32")
    arrays = {}
    for leaf, x in zip(jax.tree.leaves(store.leaves(config)), jax.tree.leaves(trees), strict=True):
        x = np.asarray(x)
        arrays |= zip(leaf.names, x if leaf.stacked else [x], strict=True)
    return config, lambda part: arrays[part.name][part.index], {"step": store.last_step(source)}


def _shards(sizes: list[int], most: int) -> list[list[int]]:
    """Tensors in order, cut into shards of at most so many bytes, or of one tensor."""
    shards, total = [[]], 0
    for i, size in enumerate(sizes):
        if shards[-1] and total + size > most:
            shards.append([])
            total = 0
        shards[-1].append(i)
        total += size
    return shards


def _stamps(paths: Iterator[Path]) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(set(paths))}


def _claim(folder: Path, record: dict) -> None:
    """Makes the folder one for this work: it is new, empty, or has this work's beginning."""
    mark = folder / MARK
    if folder.is_dir() and any(folder.iterdir()) and not (mark.exists() and json.loads(mark.read_text()) == record):
        what = "is made of something else" if mark.exists() else "holds something else"
        raise ValueError(f"the target must be new, empty, or begun from the same source; {folder} {what}")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(mark, record)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _progress(total: int, console: Console | None) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; gives the function that moves it."""
    columns = (
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, disable=console is None) as progress:
        task = progress.add_task("", total=total)
        yield lambda n: progress.advance(task, n)


def summary(folder: Path) -> str:
    """What a published folder holds, in a few lines. Raises like `open_published`."""
    published = open_published(folder)
    config, a, m = published.config, published.config.attention, published.config.moe
    dtypes: dict[str, int] = {}
    for entry in published.entries:
        code = str(published.tensors[entry.name].dtype)
        dtypes[code] = dtypes.get(code, 0) + math.prod(entry.shape) * (not entry.copy)
    width = a.kv_rank + a.d_rope if a.kind == "mla" else a.n_kv_heads * (a.d_rope + a.d_value)
    experts = f", {m.n_active} of {m.n_experts} experts and {m.n_shared} shared" if config.n_moe else ""
    lines = [
        f"{config.n_layers} layers ({config.n_dense} dense) of width {config.d_model}, {a.n_heads} heads ({a.kind}){experts}",
        f"{sum(dtypes.values()):,} weights: " + ", ".join(f"{n:,} {code}" for code, n in sorted(dtypes.items())),
        f"{len(published.tensors):,} tensors, {sum(x.nbytes for x in published.tensors.values()):,} bytes, "
        f"{len({x.path for x in published.tensors.values()})} files",
        f"context {config.context:,}, YaRN factor {a.rope.yarn_factor:g}; {width} numbers a token and layer in the cache",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Import:
    """A published folder becomes a folder of weights."""

    source: tyro.conf.Positional[Path]  # config.json and safetensors
    target: tyro.conf.Positional[Path]  # new, empty, or begun by the same command
    dtype: Literal["keep", "float32", "bfloat16"] = "keep"  # keep is the published one; FP8 becomes bfloat16

    def __call__(self) -> None:
        dtype = None if self.dtype == "keep" else self.dtype
        import_weights(self.source, self.target, dtype=dtype, console=Console(stderr=True))


@dataclass(frozen=True)
class Export:
    """A folder of weights, or of a training run, becomes a published one."""

    source: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]  # new, empty, or begun by the same command
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shard_gb: float = 5.0  # size of a shard; a larger tensor has one of its own

    def __call__(self) -> None:
        size = int(self.shard_gb * 1e9)
        export_weights(self.source, self.target, dtype=self.dtype, shard_bytes=size, console=Console(stderr=True))


@dataclass(frozen=True)
class Inspect:
    """What a published folder holds, and whether it is whole."""

    source: tyro.conf.Positional[Path]

    def __call__(self) -> None:
        print(summary(self.source))


Command = (
    Annotated[Import, tyro.conf.subcommand("import")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 if the disk failed, 2 for what is refused."""
    command = tyro.cli(Command, prog="python -m k2jax.model.hf", description=__doc__, args=arguments)
    try:
        command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
