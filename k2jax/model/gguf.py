"""A model of Llama's type in a GGUF file becomes a folder of weights, `k2jax.model.store`, with its tokenizer.

`python -m k2jax.model.gguf FILE TARGET`, then `python -m k2jax.infer.generate --checkpoint TARGET --prompt TEXT`.

A matrix in a file is [out, in], quantized in blocks along its input; here it has the numbers that those blocks stand for. Files
keep the two channels that RoPE turns together side by side in a head's rows of query and key, (2i, 2i + 1), where published
checkpoints have (i, i + R/2). The published order is restored: the folder is like one of `python -m k2jax.model.hf import`, and
can be exported like it.

One tensor is in memory at a time. The same command goes on after an interruption; no finished file is made again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import rich.progress
import tokenizers
import tyro
from rich.console import Console
from tokenizers import pre_tokenizers

from k2jax.config import AttentionConfig, ModelConfig, RopeConfig
from k2jax.model import store
from k2jax.model.hf_names import Entry, entries, to_ours
from k2jax.model.tensor_files import create

# Published name -> the file's; those of a layer without `model.layers.N.` and `blk.N.`, all without `.weight`.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROTATED = ("attn_q.weight", "attn_k.weight")
# How a file's `tokenizer.ggml.pre` cuts text before BPE: by GPT-2's pattern, and before that at every digit or not.
DIGITS_APART = {"gpt-2": False, "smollm": True}
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens: specials, and words that are never cut


class File(NamedTuple):
    """A file, checked; no tensor is read yet."""

    config: ModelConfig
    entries: list[Entry]
    fields: dict[str, object]
    tensors: dict  # name -> the gguf package's ReaderTensor

    def read(self, entry: Entry) -> np.ndarray:
        """A published tensor, float32."""
        name = file_name(entry.name)
        tensor, width = self.tensors[name], self.config.attention.d_rope
        x = _gguf().dequantize(tensor.data, tensor.tensor_type).reshape(entry.shape)
        return halves(x, width) if name.endswith(ROTATED) else x


def _gguf():
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'k2jax[gguf]'") from error
    return gguf


def file_name(published: str) -> str:
    """What a published tensor is called in a file."""
    name = published.removesuffix(".weight")
    if name in NAMES:
        return NAMES[name] + ".weight"
    _, _, layer, name = name.split(".", 3)
    return f"blk.{layer}.{NAMES[name]}.weight"


def halves(x: np.ndarray, width: int) -> np.ndarray:
    """Rows of heads of this width, from pairs of channels (2i, 2i + 1) to pairs (i, i + width/2)."""
    rows, columns = x.shape
    return x.reshape(rows // width, width // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def open_file(path: Path, dtype: str = "float32") -> File:
    """Reads a file's fields and the places of its tensors; `dtype` is of the model.

    Raises ValueError, naming the field or the tensors, if it is not a whole model that we can hold; ImportError without gguf.
    """
    gguf = _gguf()
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} can not be read, is no GGUF file, or is cut short ({error})") from None
    if reader.byte_order == "S":
        raise ValueError(f"blocks must be in this machine's order of bytes; {path} is in the other")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = config_of(fields, dtype)
    wanted = entries(config, tied="output.weight" not in tensors)
    held = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    store.compare(str(path), held, {file_name(entry.name): entry.shape for entry in wanted})
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError:
            raise ValueError(f"{tensor.name} in {path} is quantized as {kind.name}, which gguf does not read") from None
    return File(config, wanted, fields, tensors)


def config_of(fields: dict[str, object], dtype: str) -> ModelConfig:
    """Our config of a file's fields. Raises ValueError, naming the field, for what we cannot hold."""
    if (kind := fields.get("general.architecture")) != "llama":
        raise ValueError(f"general.architecture must be 'llama'; got {kind!r}")
    left = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}

    def take(name, *default):
        if name not in left and not default:
            raise ValueError(f"llama.{name} is missing")
        value = left.pop(name, *default)
        if not isinstance(value, int | float):
            raise ValueError(f"llama.{name} must be one number for all layers; got {value!r}")
        # Files have float32: 1e-5 is written 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    d_model, layers, heads = take("embedding_length"), take("block_count"), take("attention.head_count")
    width = take("attention.key_length", d_model // heads)
    if (turned := take("rope.dimension_count", width)) != width:
        raise ValueError(f"llama.rope.dimension_count must be the heads' width, {width}; got {turned}")
    config = ModelConfig(
        n_words=take("vocab_size", len(fields.get("tokenizer.ggml.tokens", ()))),
        d_model=d_model,
        n_layers=layers,
        n_dense=layers,
        d_dense=take("feed_forward_length"),
        context=take("context_length"),
        norm_eps=take("attention.layer_norm_rms_epsilon"),
        init_std=0.02,  # Llama's; files do not say
        dtype=dtype,
        attention=AttentionConfig(
            kind="gqa",
            n_heads=heads,
            n_kv_heads=take("attention.head_count_kv", heads),
            d_nope=0,
            d_rope=width,
            d_value=take("attention.value_length", d_model // heads),
            rope=RopeConfig(theta=take("rope.freq_base", 10_000.0), layout="half"),
        ),
    )
    if left:
        raise ValueError(f"fields that are not known, and may change the model: llama.{', llama.'.join(sorted(left))}")
    return config


def tokenizer_of(fields: dict[str, object]) -> tokenizers.Tokenizer:
    """The byte-level BPE in a file. Bytes that the model has no token for are left out of a text, as the model's own code does.

    Raises ValueError, naming the field, for a tokenizer of another kind.
    """
    given = {name: fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "tokens", "merges", "token_type")}
    begins = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    for wrong, rule in (
        (given["model"] != "gpt2", f"model must be 'gpt2', byte-level BPE; got {given['model']!r}"),
        (given["pre"] not in DIGITS_APART, f"pre must be one of {', '.join(DIGITS_APART)}; got {given['pre']!r}"),
        (None in (given["tokens"], given["merges"]), "tokens and tokenizer.ggml.merges must be there"),
        (begins, "add_bos_token must be false; got true"),
    ):
        if wrong:
            raise ValueError(f"tokenizer.ggml.{rule}; --weights-only leaves the tokenizer out")
    words = {word: i for i, word in enumerate(given["tokens"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(words, [tuple(pair.split(" ")) for pair in given["merges"]]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if DIGITS_APART[given["pre"]]:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), inner.pre_tokenizer])
    inner.decoder = tokenizers.decoders.ByteLevel()
    kinds = zip(given["tokens"], given["token_type"] or (), strict=False)
    inner.add_tokens(
        [
            tokenizers.AddedToken(word, special=kind == CONTROL, normalized=False)
            for word, kind in kinds
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return inner


def generation(fields: dict[str, object]) -> dict[str, object]:
    """What a published folder's generation_config.json says: the ids that begin, end and fill up texts."""
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = sorted({i for i in (ids["eos"], ids["eot"]) if i is not None})
    return {"bos_token_id": ids["bos"], "eos_token_id": ends, "pad_token_id": ids["padding"]}


def import_file(
    source: Path, target: Path, *, dtype: str = "float32", weights_only: bool = False, console: Console | None = None
) -> None:
    """Makes a folder of weights of a file.

    Args:
      dtype: of all weights, "float32" or "bfloat16", and of the model's activations.
      weights_only: whether to leave the tokenizer out.

    Raises ValueError if the source cannot be held whole, or the target holds something else; OSError if the disk is full;
    ImportError without the package gguf.
    """
    file, kind = open_file(source, dtype), np.dtype(dtype)
    tokenizer = None if weights_only else tokenizer_of(file.fields)
    stamp = source.stat()
    record = {"source": str(source.resolve()), "dtype": dtype, "size": stamp.st_size, "changed": stamp.st_mtime_ns}
    _claim(target, store.describe(file.config, record))
    if tokenizer is not None:
        tokenizer.save(str(target / "tokenizer.json"))
        (target / "generation_config.json").write_text(json.dumps(generation(file.fields), indent=2) + "\n")
    by_file: dict[str, list[Entry]] = {}
    for entry in file.entries:
        by_file.setdefault(store.file_of(entry.parts[0].name), []).append(entry)
    planned = store.files(file.config)
    for name in rich.progress.track(planned, description="", console=console, disable=console is None):
        if (target / name).exists():
            continue
        with create(target / name, {tensor: (shape, kind) for tensor, shape in planned[name].items()}) as places:
            for entry in by_file[name]:
                for part, y in zip(entry.parts, to_ours(entry, file.read(entry)), strict=True):
                    places[part.name].map("r+")[...] = y


def _claim(folder: Path, text: str) -> None:
    """Makes the folder one for this work: it is new, empty, or has this work's beginning, model.json of this text."""
    mark = folder / "model.json"
    if folder.is_dir() and any(folder.iterdir()) and not (mark.exists() and mark.read_text() == text):
        what = "is made of something else" if mark.exists() else "holds something else"
        raise ValueError(f"the target must be new, empty, or begun from the same source; {folder} {what}")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(text)


@dataclass(frozen=True)
class Command:
    """What to read, and where it goes."""

    source: tyro.conf.Positional[Path]  # a GGUF file
    target: tyro.conf.Positional[Path]  # new, empty, or begun by the same command
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations; float32 keeps quantized weights exactly
    weights_only: bool = False  # leave the tokenizer out; generate then takes --ids


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 if the disk failed, 2 for what is refused."""
    command = tyro.cli(Command, prog="python -m k2jax.model.gguf", description=__doc__, args=arguments)
    try:
        import_file(
            command.source,
            command.target,
            dtype=command.dtype,
            weights_only=command.weights_only,
            console=Console(stderr=True),
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
