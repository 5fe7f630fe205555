import dataclasses
import errno
import io
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from k2jax.data import corpora, dedup, files
from k2jax.data.corpora import content_hash, load, prepare, split


def _documents(documents, tokenizer):
    return [
        tokenizer.decode(documents.tokens[a + 1 : b - 1])
        for a, b in zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    ]


def test_every_document_lands_in_one_split_of_its_domain(four_domains, make_config):
    corpus = prepare(make_config(four_domains, code=1.0, math=1.0, knowledge=1.0))
    texts = files.read_folder(four_domains)
    for domain in texts:
        train, heldout = (_documents(part[domain], corpus.tokenizer) for part in (corpus.train, corpus.heldout))
        assert sorted(train + heldout) == sorted(texts[domain])
        assert heldout and not set(train) & set(heldout)
        limit = 0.1 * 2**64
        assert {t for t in texts[domain] if int.from_bytes(dedup.document_hash(t)[:8]) < limit} == set(heldout)
        assert corpus.bytes[domain] == sum(len(t.encode()) for t in texts[domain])
        tokens, offsets = corpus.train[domain].tokens, corpus.train[domain].offsets
        assert tokens.dtype == np.uint16 and offsets[0] == 0 and offsets[-1] == len(tokens)
        assert (tokens[offsets[:-1]] == corpus.tokenizer.bos).all() and (tokens[offsets[1:] - 1] == corpus.tokenizer.eos).all()
    assert corpus.tokens == sum(len(d.tokens) for d in corpus.train.values())
    assert (corpus.tier, len(corpus.sha256)) == ("folder", 64)


def test_split_shares_and_small_domains():
    texts = [f"text {i}" for i in range(5000)]
    train, heldout = split(texts, 0.02)
    assert 0.015 < len(heldout) / 5000 < 0.025 and sorted(train + heldout) == sorted(texts)
    assert set(split(texts[:100], 0.02)[1]) <= set(heldout) | {min(texts[:100], key=dedup.document_hash)}
    for share in (1e-9, 1 - 1e-9):
        train, heldout = split(["a", "b", "c"], share)
        assert train and heldout
    assert split(["a"], 0.5) == (["a"], [])


def test_the_tokenizer_never_sees_what_is_held_out(tmp_path, write, make_config):
    held, i = "", 0
    while not held or int.from_bytes(dedup.document_hash(held)[:8]) >= 0.1 * 2**64:
        held, i = f"{i} " + "qzxj " * 500, i + 1
    write(tmp_path / "t", {f"{k}.txt": f"some words of text number {k} to train on" for k in range(30)})
    write(tmp_path / "t", {"held.txt": held})
    corpus = prepare(make_config(tmp_path / "t", tokenizer="bpe", vocab=400))
    assert held in _documents(corpus.heldout["web"], corpus.tokenizer)
    assert len(corpus.tokenizer.encode(" qzxj")) >= 4, "qzxj fills the held-out text and must not be merged"
    assert len(corpus.tokenizer.encode(" some")) <= 2


def test_duplicates_are_removed(tmp_path, write, make_config):
    text = " ".join(f"word{i}" for i in range(200))
    near = text.replace("word100", "other")
    distinct = {f"{k}.txt": f"a text numbered {k} and nothing else" for k in range(10)}
    corpus = prepare(make_config(write(tmp_path / "t", {"x.txt": text, "y.txt": text, "z.txt": near, **distinct})))
    assert corpus.removed == {"exact": 1, "near": 1}
    assert len(corpus.train["web"]) + len(corpus.heldout["web"]) == 11


def test_sha256_is_of_the_content_alone(tmp_path, write, make_config):
    texts = [f"text number {i} with its words" for i in range(20)]
    one = write(tmp_path / "one", {f"{i}.txt": t for i, t in enumerate(texts)})
    two = write(tmp_path / "two", {f"sub/{99 - i}.md": t for i, t in enumerate(texts)})
    a, b = prepare(make_config(one)), prepare(make_config(two, tokenizer="bpe", vocab=300, heldout=0.3))
    assert a.sha256 == b.sha256 == content_hash({"web": texts[::-1]})
    assert content_hash({"web": texts[1:]}) != a.sha256 != content_hash({"code": texts})


def test_prepared_once_and_anew_when_something_changes(four_domains, make_config, monkeypatch):
    config = make_config(four_domains, tokenizer="bpe", vocab=300)
    first = prepare(config)
    built = []
    real = dedup.deduplicate
    monkeypatch.setattr(dedup, "deduplicate", lambda *args: built.append(1) or real(*args))
    again = prepare(dataclasses.replace(config, web=0.5, code=0.5, workers=2))
    assert again.folder == first.folder and not built, "mixture and workers are no part of a prepared corpus"
    assert prepare(dataclasses.replace(config, vocab=310)).tokenizer.n_words == 310
    assert prepare(dataclasses.replace(config, tokenizer="byte")).tokenizer.n_words == 260
    assert len(prepare(dataclasses.replace(config, heldout=0.5)).heldout["web"]) > len(first.heldout["web"])
    (four_domains / "web" / "new.txt").write_text("a new document")
    assert prepare(config).sha256 != first.sha256
    assert len(built) == 4
    assert load(first.folder).sha256 == first.sha256


def test_documents_travel_to_workers_as_paths(four_domains, make_config):
    documents = prepare(make_config(four_domains)).train["web"]
    sent = pickle.dumps(documents)
    assert len(documents.tokens) > 5000 > len(sent)
    np.testing.assert_array_equal(pickle.loads(sent).tokens, documents.tokens)


def test_prints_only_when_asked(four_domains, make_config, capsys):
    prepare(make_config(four_domains))
    assert capsys.readouterr() == ("", "")
    stream = io.StringIO()
    prepare(make_config(four_domains), console=Console(file=stream, width=200))
    assert "web" in stream.getvalue() and "train tokens" in stream.getvalue() and "sha256" in stream.getvalue()


@pytest.mark.parametrize(
    "texts, message",
    [
        ({"a.txt": " \n\n"}, "must hold text; '.*t' holds only white space"),
        ({"a.txt": ""}, "must hold text"),
        ({"a.png": "x"}, "holds none"),
        ({"a.txt": "the only document"}, r"has 1 of web, whose weight is 1.0"),
        ({"a.txt": "same", "b.txt": "same"}, r"has 1 of web"),
        ({"code/a.py": "x = 1", "code/b.py": "x = 2"}, r"has 0 of web, whose weight is 1.0 \(set data.web to 0"),
    ],
)
def test_bad_corpora_leave_nothing_behind(tmp_path, write, make_config, texts, message):
    config = make_config(write(tmp_path / "t", texts))
    with pytest.raises(ValueError, match=message):
        prepare(config)
    assert not config.cache.exists() or not list(config.cache.iterdir())


def test_missing_corpus_and_tokenizer_are_named(tmp_path, four_domains, make_config):
    with pytest.raises(ValueError, match=r"or a folder that exists; got 'nowhere'"):
        prepare(make_config("nowhere"))
    with pytest.raises(ValueError, match=r"bpe, byte or the path .*; got wordpiece"):
        prepare(make_config(four_domains, tokenizer="wordpiece"))
    (tmp_path / "file.txt").write_text("a file")
    with pytest.raises(ValueError, match="a folder that exists"):
        prepare(make_config(tmp_path / "file.txt"))


def test_mixture_weight_on_an_absent_domain_is_found_in_the_cache_too(four_domains, make_config, tmp_path, write):
    folder = write(tmp_path / "w", {"a.txt": "one text", "b.txt": "another one"})
    prepare(make_config(folder))
    with pytest.raises(ValueError, match=r"has 0 of math, whose weight is 0\.3"):
        prepare(make_config(folder, math=0.3))


def test_full_disk_is_reported_and_the_attempt_removed(four_domains, make_config, monkeypatch):
    config = make_config(four_domains)
    calls = []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    real = np.save
    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(OSError, match=r"cannot be written to .*cache: No space left on device") as caught:
            prepare(config)
    assert caught.value.errno == errno.ENOSPC
    assert list(config.cache.iterdir()) == []
    assert prepare(config).tokens > 0, "the next attempt starts clean"


def test_a_file_size_limit_is_reported_like_a_full_disk(four_domains, make_config):
    """The real thing: the operating system refuses to write on."""
    config = make_config(four_domains)
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from k2jax.config import DataConfig\nfrom k2jax.data.corpora import prepare\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    prepare(DataConfig(corpus=sys.argv[1], tokenizer='byte', cache=Path(sys.argv[2])))\n"
        "except OSError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(four_domains), str(config.cache)], capture_output=True, text=True)
    assert "cannot be written to" in done.stdout and done.stderr == ""
    assert list(config.cache.iterdir()) == []


def test_two_processes_may_prepare_the_same_corpus(four_domains, make_config, monkeypatch):
    config = make_config(four_domains)
    real, nested = dedup.deduplicate, []

    def other_process_finishes_first(*args):
        if not nested:
            nested.append(None)
            nested[0] = prepare(config)
        return real(*args)

    monkeypatch.setattr(dedup, "deduplicate", other_process_finishes_first)
    corpus = prepare(config)
    assert corpus.folder == nested[0].folder and corpus.sha256 == nested[0].sha256
    assert [p.name for p in config.cache.iterdir()] == [corpus.folder.name]


def test_leftovers_of_killed_processes_go_after_a_day(four_domains, make_config):
    config = make_config(four_domains)
    old, young = config.cache / ".preparing-old", config.cache / ".preparing-young"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (time.time() - 2 * 86_400,) * 2)
    prepare(config)
    assert young.exists() and not old.exists()


def test_tokenizer_sample_takes_the_same_share_of_every_domain(monkeypatch):
    monkeypatch.setattr(corpora, "TOKENIZER_BYTES", 3000)
    train = {"web": ["w" * 100] * 90, "code": ["c" * 100] * 10}
    sample = corpora._sample(train)
    assert abs(sum(t[0] == "w" for t in sample) - 27) <= 1 and abs(sum(t[0] == "c" for t in sample) - 3) <= 1
