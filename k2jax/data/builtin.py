"""The builtin corpus: text that every installation of k2jax holds, so that training needs no download.

code: sources of the standard library (tests left out) and of the packages k2jax depends on. web: their documentation
strings, which stand in place of web text and are not web text. math: seeded exercises (`mathematics.py`). knowledge:
reference articles and factual tables (`facts.py`). A file gives its source or its documentation, never both, so that
no held-out text stands inside a training document of another domain. Packages are read as text; none is imported.
"""

import hashlib
import importlib.metadata
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

from k2jax.data import facts, mathematics

# Import name -> distribution. All are k2jax's main dependencies or theirs.
PACKAGES = {
    **{"jax": "jax", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint", "grain": "grain", "etils": "etils"},
    **{"numpy": "numpy", "scipy": "scipy", "matplotlib": "matplotlib", "PIL": "pillow", "fontTools": "fonttools"},
    **{"rich": "rich", "pygments": "pygments", "tyro": "tyro", "jaxtyping": "jaxtyping", "treescope": "treescope"},
    **{"tensorstore": "tensorstore", "tokenizers": "tokenizers", "huggingface_hub": "huggingface-hub", "fsspec": "fsspec"},
    **{"tensorboardX": "tensorboardX", "google": "protobuf", "absl": "absl-py", "pyparsing": "pyparsing", "tqdm": "tqdm"},
    **{"dateutil": "python-dateutil", "humanize": "humanize", "click": "click", "yaml": "PyYAML", "idna": "idna"},
    **{"docstring_parser": "docstring-parser", "contourpy": "contourpy", "packaging": "packaging"},
}
SKIPPED = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__", "_vendor", "vendored"}
CODE_BYTES = 11_000_000
WEB_BYTES = 11_000_000
MATH_BYTES = 4_500_000
DOCSTRING_SHARE = 0.33  # a file with more documentation than this gives its documentation and not its source
LONGEST = 40_000  # characters of the longest source that is a document; longer ones are mostly tables
SHORTEST = 200  # characters of the shortest documentation string that is a document

# A string in triple quotes that begins a line: documentation of a module, class, function or `add_newdoc` call.
DOCSTRING = re.compile(r'^[ \t]*[rRuU]?("""|\'\'\')(.*?)\1', re.DOTALL | re.MULTILINE)


def identity() -> str:
    """What the corpus depends on besides this code: the versions of Python and of the packages read."""
    found = {name: _version(name) for name in PACKAGES.values()}
    return f"python {sysconfig.get_python_version()} {sysconfig.get_config_var('VERSION')} {found}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _package_folders() -> dict[str, Path]:
    """Import name -> folder. Finding a top-level package does not import it."""
    folders = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(next(iter(spec.submodule_search_locations)))
    return folders


def sources(root: Path, prefix: str) -> list[tuple[str, str]]:
    """(name, text) of the .py files under a folder, tests left out, in the order of their names."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if SKIPPED & set(inside.parts[:-1]) or path.name.startswith("test_"):
            continue
        try:
            found.append((f"{prefix}/{inside.as_posix()}", path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError):  # a few stdlib files are deliberately in other encodings
            continue
    return found


def docstrings(text: str) -> list[str]:
    """Documentation strings of a source file, dedented."""
    return [inspect.cleandoc(match[2]).strip() for match in DOCSTRING.finditer(text)]


def split_sources(files: list[tuple[str, str]], code_bytes: int, web_bytes: int) -> tuple[list[str], list[str]]:
    """Sources and documentation, each file giving one of them.

    Files that are short and poor in documentation give their source, in the order of the hash of their name, until
    `code_bytes` are reached; the others give every documentation string of at least `SHORTEST` characters, until
    `web_bytes` are.
    """
    code, documentation, code_size, web_size = [], [], 0, 0
    for _, text in sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest()):
        strings = docstrings(text)
        if code_size < code_bytes and len(text) <= LONGEST and sum(map(len, strings)) <= DOCSTRING_SHARE * len(text):
            code.append(text)
            code_size += len(text.encode())
        elif web_size < web_bytes:
            documentation += [string for string in strings if len(string) >= SHORTEST]
            web_size += sum(len(string.encode()) for string in strings if len(string) >= SHORTEST)
    return code, documentation


def documents(
    report: Callable[[str], None] = lambda step: None,
    code_bytes: int = CODE_BYTES,
    web_bytes: int = WEB_BYTES,
    math_bytes: int = MATH_BYTES,
) -> dict[str, list[str]]:
    """Domain -> documents. `report` is told each step; the sizes can be lowered, which changes the corpus."""
    stdlib, folders = Path(sysconfig.get_paths()["stdlib"]), _package_folders()
    report("reading the standard library and installed packages")
    files = sources(stdlib, "stdlib")
    for name, folder in folders.items():
        files += sources(folder, name)
    code, documentation = split_sources(files, code_bytes, web_bytes)
    report("writing exercises and facts")
    return {
        "web": documentation,
        "code": code,
        "math": mathematics.documents(math_bytes),
        "knowledge": facts.documents(stdlib, folders, list(PACKAGES.values())),
    }
