import base64
import builtins
import re

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from k2jax.data import tokenizers
from k2jax.data.tokenizers import K2_PATTERN, BpeTokenizer, ByteTokenizer, TiktokenTokenizer, train_bpe

TEXTS = [
    "The theory of the thing there is that they thought.",
    "def f(x):\n    return x + 12345\n",
    "中文字 don't HelloWorld",
] * 20


def _write_ranks(path, tokens):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A tiktoken.model of the 256 bytes and a few merges."""
    merges = [b"th", b"the", b" the", b"in", b"ing", b"45", b"345", b"2345", b"\n\n", b"is", b"is ", b"'t", b"on", b"on't"]
    return _write_ranks(tmp_path_factory.mktemp("ranks") / "tiktoken.model", [bytes([i]) for i in range(256)] + merges)


@pytest.fixture(scope="module")
def every(ranks):
    return {"bpe": train_bpe(TEXTS, 320), "byte": ByteTokenizer(), "tiktoken": TiktokenTokenizer(ranks)}


@pytest.mark.parametrize("kind", ["bpe", "byte", "tiktoken"])
def test_round_trip_on_any_text(every, kind):
    tokenizer = every[kind]

    @given(st.text(max_size=60) | st.text("'’sStT don1234 \n\t\r中é<|[BOS]_", max_size=40))
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.n_words for i in ids)
        assert not {tokenizer.bos, tokenizer.eos, tokenizer.pad} & set(ids)

    check()


@pytest.mark.parametrize("kind", ["bpe", "byte", "tiktoken"])
def test_batches_and_saving_change_nothing(every, kind, tmp_path):
    tokenizer = every[kind]
    texts = [*TEXTS[:3], "", "[BOS] is text here, <|im_end|> too"]
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in texts]
    assert all(isinstance(ids, np.ndarray) and ids.dtype == np.int32 for ids in batch)
    tokenizer.save(tmp_path)
    again = tokenizers.load(tmp_path)
    assert [again.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.n_words, again.bos, again.eos, again.pad) == (tokenizer.n_words, tokenizer.bos, tokenizer.eos, tokenizer.pad)


def test_fingerprints_differ(every):
    prints = [t.fingerprint for t in every.values()] + [train_bpe(TEXTS, 321).fingerprint]
    assert len(set(prints)) == 4
    assert train_bpe(TEXTS, 320).fingerprint == every["bpe"].fingerprint


def test_special_tokens_decode_to_their_names(every):
    for tokenizer in every.values():
        assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("x"), tokenizer.eos]) == "[BOS]x[EOS]"


def test_bpe_learns_and_fills_its_vocabulary(every):
    bpe = every["bpe"]
    assert bpe.n_words == 320
    assert len(bpe.encode("the theory of the thing")) < 15 < len("the theory of the thing")
    assert train_bpe(["ab"], 1000).n_words == 256 + 4 + 1  # there is one pair to merge


def _pieces(text):
    split = library.pre_tokenizers.Split(library.Regex(K2_PATTERN), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("中文字 word", ["中文字", " word"]),
        ("a中b", ["a", "中", "b"]),  # Han is never part of a word
        ("don't WE'LL x'd", ["don't", " WE'LL", " x'd"]),
        ("helloWorld HTTPServer ABC", ["hello", "World", " HTTPServer", " ABC"]),
        ("12345 7", ["123", "45", " ", "7"]),
        ("x != y;\n\n  z", ["x", " !=", " y", ";\n\n", " ", " z"]),
        ("a  \n b   ", ["a", "  \n", " b", "   "]),
        ("(word", ["(word"]),  # one character that is no letter or digit goes with the word
    ],
)
def test_k2_split(text, pieces):
    assert _pieces(text) == pieces


def test_tiktoken_merges_inside_pieces_only(every):
    tokenizer = every["tiktoken"]

    def pieces(text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text)]

    assert pieces("2345") == ["2", "3", "4", "5"]  # cut to 234 and 5 first, so no merge with 5 happens
    assert pieces("x45") == ["x", "45"]
    assert pieces("the the") == ["the", " the"]
    assert pieces("don't") == ["d", "on't"]  # the contraction belongs to its word


def test_k2_special_ids(tmp_path):
    """With as many ranks as K2's file has, the specials get the published ids."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [bytes([i, j]) for i in range(256) for j in range(256)] + [
        bytes([i, j, 7]) for i in range(256) for j in range(256)
    ]
    tokens += [bytes([i, j, 8]) for i in range(256) for j in range(256)]
    tokenizer = TiktokenTokenizer(_write_ranks(tmp_path / "k2.model", tokens[:163_584]))
    assert tokenizer.n_words == 163_840
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (163_584, 163_585, 163_839)
    published = {
        **{"<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "<|im_system|>": 163594},
        **{"<|im_middle|>": 163601, "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596},
        **{"<|tool_call_begin|>": 163597, "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599},
        **{"<|start_header_id|>": 163590, "<|end_header_id|>": 163591, "[EOT]": 163593, "[UNK]": 163838},
    }
    assert {name: tokenizer.specials[name] for name in published} == published
    assert tokenizer.decode([163_586]) == "<|im_end|>"


def test_long_texts_are_cut_and_come_back_whole(every):
    tokenizer = every["tiktoken"]
    text = " " * 60_000 + "x" * 60_000 + "a b " * 110_000
    pieces = list(tokenizer._pieces(text))
    assert "".join(pieces) == text and max(map(len, pieces)) <= tokenizer.LONGEST_TEXT
    assert max(len(run) for piece in pieces for run in re.findall(r"\s+|\S+", piece)) == tokenizer.LONGEST_RUN
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "0 ranks"),
        (b"not a rank file\n", "line 1"),
        (b"YQ== 0\nYg== 5\n", "without gaps"),
        (b"YQ== 0\nYg== 1\n", "lacks byte 0"),
        (b"YQ== 0\n!!!! 1\n", "line 2"),
    ],
)
def test_bad_rank_files(tmp_path, content, message):
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TiktokenTokenizer(path)


def test_missing_rank_file(tmp_path):
    with pytest.raises(ValueError, match=r"tiktoken.model that can be read; got .*absent.model"):
        TiktokenTokenizer(tmp_path / "absent.model")


def test_missing_tiktoken_names_the_extra(ranks, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tiktoken":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'k2jax\[data\]'"):
        TiktokenTokenizer(ranks)


def test_names_of_specials_in_text_stay_text():
    tokenizer = train_bpe(["[BOS] [BOS] [BOS]"], 300)
    assert isinstance(tokenizer, BpeTokenizer)
    assert tokenizer.bos not in tokenizer.encode("[BOS]")
