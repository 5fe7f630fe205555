import json
import sys
import types

import pytest

from k2jax.data import files


def test_every_kind_of_file_and_domain(tmp_path, write):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    module = pytest.importorskip("array_record.python.array_record_module")
    write(tmp_path, {"a.txt": "one", "code/b.py": "two", "x/math/c.md": "three", "knowledge/d.rst": "four", "skip.bin": "no"})
    rows = [{"text": "five", "domain": "code"}, {"text": "six"}, {"text": "  "}]
    write(tmp_path, {"knowledge/e.jsonl": "\n".join(map(json.dumps, rows)) + "\n\n"})
    parquet.write_table(pyarrow.table({"text": ["seven", "eight"], "n": [1, 2]}), tmp_path / "f.parquet")
    (tmp_path / "math").mkdir()
    writer = module.ArrayRecordWriter(str(tmp_path / "math" / "g.arrayrecord"), "group_size:1")
    writer.write("neun ñ".encode())
    writer.close()
    found = {domain: sorted(texts) for domain, texts in files.read_folder(tmp_path).items()}
    assert found == {
        "web": ["eight", "one", "seven"],
        "code": ["five", "two"],
        "math": ["neun ñ", "three"],
        "knowledge": ["four", "six"],
    }


def test_long_prose_is_cut_at_blank_lines_and_sources_are_not():
    paragraphs = [f"paragraph {i} " * 20 for i in range(50)]
    text = "\n\n".join(paragraphs)
    parts = files.cut(text, 1000)
    assert "".join(parts) == text and len(parts) > 10
    assert all(len(part) <= 1002 for part in parts) and all(part.startswith("paragraph") for part in parts)
    assert files.cut("x" * 5000 + "\n\ny", 1000) == ["x" * 5000 + "\n\n", "y"]
    assert files.cut("x" * 5000, 1000) == ["x" * 5000]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("bad.txt", b"good so far \xff\xfe", r"bad\.txt is not: byte 0xff at offset 12"),
        ("bad.py", b"\xe9", r"bad\.py is not: byte 0xe9 at offset 0"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"bad\.jsonl is not: byte 0xe9 at offset 24"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', r"bad\.jsonl, line 2"),
        ("bad.jsonl", b'{"txt": "a"}\n', r'line 1 has no "text"'),
        ("bad.jsonl", b'["a"]\n', r'line 1 has no "text"'),
        ("bad.jsonl", b'{"text": 5}\n', r"must be a string; .*line 1 has 5"),
        ("bad.jsonl", b'{"text": "a", "domain": "novels"}\n', r"one of web, code, math, knowledge; .*'novels'"),
        ("bad.jsonl", b'{"text": "ab\\ud800"}\n', r"lone surrogate at character 2"),
        ("bad.parquet", b"not parquet", r"bad\.parquet is not"),
        ("bad.arrayrecord", b"not records", r"bad\.arrayrecord is not"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    for suffix, package in ((".parquet", "pyarrow"), (".arrayrecord", "array_record")):
        if name.endswith(suffix):
            pytest.importorskip(package)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        files.read_folder(tmp_path)


def test_table_without_text_and_file_that_cannot_be_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"column named text; .*t\.parquet has content"):
        files.read_folder(tmp_path)
    (tmp_path / "t.parquet").unlink()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"readable; .*gone\.txt is not: No such file"):
        files.read_folder(tmp_path)


def test_missing_folder_and_folder_without_text(tmp_path):
    with pytest.raises(ValueError, match=r"builtin, pip, apt, hf:NAME or a folder that exists; got '.*absent'"):
        files.list_files(tmp_path / "absent")
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds none"):
        files.list_files(tmp_path)


@pytest.mark.parametrize("name, module", [("a.parquet", "pyarrow"), ("a.arrayrecord", "array_record.python")])
def test_missing_packages_name_the_extra(tmp_path, monkeypatch, name, module):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'k2jax\[data\]'"):
        files.read_folder(tmp_path)


class _Table(list):
    column_names = ("text", "domain")


def test_hugging_face_names(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if name == "absent":
            raise ConnectionError("Couldn't reach the hub\nmore")
        return _Table([{"text": "a", "domain": "math"}, {"text": "b", "domain": None}, {"text": " ", "domain": None}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert files.read_hugging_face("org/name:part") == {"web": ["b"], "code": [], "math": ["a"], "knowledge": []}
    assert asked == [("org/name", "part", "train")]
    with pytest.raises(ValueError, match=r"hf:absent is not: Couldn't reach the hub$"):
        files.read_hugging_face("absent")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"datasets: pip install 'k2jax\[data\]'"):
        files.read_hugging_face("org/name")
