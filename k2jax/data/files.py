"""The user's own text: a folder of files, or a data set by its Hugging Face name."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

DOMAINS = ("web", "code", "math", "knowledge")
PROSE = (".txt", ".md", ".rst", ".tex")
SOURCE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".sh", ".hs", ".lean")
RECORDS = (".jsonl", ".parquet", ".arrayrecord")
LONGEST = 1 << 16  # characters of a prose file above which it is cut at blank lines into several documents


def list_files(folder: Path) -> list[Path]:
    """Files of a corpus folder in the order of their names.

    Raises:
      ValueError: the folder does not exist, is a file, or holds no file of a known kind.
    """
    if not folder.is_dir():
        raise ValueError(f"corpus must be builtin, pip, apt, hf:NAME or a folder that exists; got {str(folder)!r}")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in PROSE + SOURCE + RECORDS and not p.is_dir())
    if not found:
        raise ValueError(
            f"a corpus folder holds files named {' '.join(f'*{s}' for s in PROSE + SOURCE + RECORDS)}; {folder} holds none"
        )
    return found


def read_folder(folder: Path, report: Callable[[str], None] = lambda step: None) -> dict[str, list[str]]:
    """Domain -> documents of a folder.

    A text file is a document (prose above 65,536 characters is cut at blank lines), a record of a .jsonl, .parquet or
    .arrayrecord file is one: field or column `text`, and `domain` where present. Otherwise the first subfolder named
    web, code, math or knowledge gives the domain, else it is web.

    Raises:
      ValueError: a file cannot be read, is not UTF-8 (with file and byte offset), or a record lacks text or names
        another domain.
    """
    domains: dict[str, list[str]] = {name: [] for name in DOMAINS}
    for path in list_files(folder):
        report(f"reading {path.name}")
        default = next((part for part in path.relative_to(folder).parts[:-1] if part in DOMAINS), "web")
        for domain, text in _read_file(path, default):
            if text.strip():
                domains[domain].append(text)
    return domains


def _read_file(path: Path, default: str) -> Iterator[tuple[str, str]]:
    suffix = path.suffix.lower()
    if suffix in RECORDS:
        yield from {".jsonl": _jsonl, ".parquet": _parquet, ".arrayrecord": _array_record}[suffix](path, default)
    else:
        text = decode(_bytes(path), path)
        yield from ((default, part) for part in (cut(text) if suffix in PROSE else [text]))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"every file of a corpus must be readable; {path} is not: {error.strerror}") from error


def decode(data: bytes, path: Path, start: int = 0) -> str:
    """UTF-8 bytes as text; `start` is where they begin in the file.

    Raises:
      ValueError: they are not UTF-8; names the file and the offset of the first wrong byte.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = start + error.start
        raise ValueError(f"a corpus must be UTF-8; {path} is not: byte {data[error.start]:#04x} at offset {where}") from error


def cut(text: str, longest: int = LONGEST) -> list[str]:
    """A long text as parts of at most about `longest` characters that end at blank lines; joined they are the text.

    A paragraph longer than that stays whole.
    """
    parts, start = [], 0
    while len(text) - start > longest:
        end = text.rfind("\n\n", start + 1, start + longest)
        end = text.find("\n\n", start + longest) if end < 0 else end
        if end < 0:
            break
        parts.append(text[start : end + 2])
        start = end + 2
    return [*parts, text[start:]]


def _record(text: object, domain: object, where: str, default: str) -> tuple[str, str]:
    """Domain and text of a record, checked."""
    if not isinstance(text, str):
        raise ValueError(f"a record's text must be a string; {where} has {text!r}")
    domain = default if domain is None else domain
    if domain not in DOMAINS:
        raise ValueError(f"a record's domain must be one of {', '.join(DOMAINS)}; {where} has {domain!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a record's text must be valid Unicode; {where} has a lone surrogate at character {error.start}"
        ) from error
    return domain, text


def _jsonl(path: Path, default: str) -> Iterator[tuple[str, str]]:
    start = 0
    for number, line in enumerate(_bytes(path).splitlines(keepends=True), 1):
        text = decode(line, path, start)
        start += len(line)
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'a line of a .jsonl file is {{"text": ...}}; {path}, line {number}: {error.msg}') from error
        if not isinstance(record, dict) or "text" not in record:
            raise ValueError(f'a line of a .jsonl file is {{"text": ...}}; {path}, line {number} has no "text"')
        yield _record(record["text"], record.get("domain"), f"{path}, line {number}", default)


def _rows(columns: Iterable[str], rows: Iterable[dict], where: str, default: str) -> Iterator[tuple[str, str]]:
    if "text" not in columns:
        raise ValueError(f"a table of documents has a column named text; {where} has {', '.join(columns)}")
    for number, row in enumerate(rows):
        yield _record(row["text"], row.get("domain"), f"{where}, row {number}", default)


def _parquet(path: Path, default: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} needs the package pyarrow: pip install 'k2jax[data]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        wanted = [name for name in ("text", "domain") if name in names]
        rows = (row for batch in file.iter_batches(columns=wanted) for row in batch.to_pylist())
        yield from _rows(names, rows, str(path), default)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"a .parquet file must be readable; {path} is not: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"a corpus must be UTF-8; a text of {path} is not at its byte {error.start}") from error


def _array_record(path: Path, default: str) -> Iterator[tuple[str, str]]:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise ImportError(f"{path} needs the package array_record: pip install 'k2jax[data]'") from error
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        records = reader.read_all()
        reader.close()
    except Exception as error:  # the reader raises bare errors of its C++ library
        raise ValueError(f"an .arrayrecord file must be readable; {path} is not: {error}") from error
    for number, record in enumerate(records):
        try:
            yield default, record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"a corpus must be UTF-8; record {number} of {path} is not at its byte {error.start}") from error


def read_hugging_face(name: str) -> dict[str, list[str]]:
    """Domain -> documents of the `train` split of a data set `NAME` or `NAME:SUBSET` with a column `text`.

    A column `domain` gives the domain, else it is web.

    Raises:
      ImportError: the package `datasets` is not installed.
      ValueError: the data set cannot be had, or lacks the column.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"the corpus hf:{name} needs the package datasets: pip install 'k2jax[data]'") from error
    repository, _, subset = name.partition(":")
    try:
        table = datasets.load_dataset(repository, subset or None, split="train")
    except Exception as error:  # network, name, permission and format each raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"hf:NAME must be a data set that can be downloaded or is cached; hf:{name} is not: {reason}"
        ) from error
    domains: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for domain, text in _rows(table.column_names, table, f"hf:{name}", "web"):
        if text.strip():
            domains[domain].append(text)
    return domains
