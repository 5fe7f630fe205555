"""Factual text from tables that a Python installation holds: the `knowledge` domain of the builtin corpus.

Reference articles (pydoc topics, package descriptions, licences) stand as they are; tables (Unicode, encodings, HTML
entities, physical constants, colours, languages, the calendar) are told in sentences. Files are read as text.
"""

import ast
import calendar
import codecs
import html.entities
import http
import importlib.metadata
import locale
import mimetypes
import re
import unicodedata
from pathlib import Path

CATEGORIES = {
    **{"Lu": "an uppercase letter", "Ll": "a lowercase letter", "Lt": "a titlecase letter", "Lm": "a modifier letter"},
    **{"Lo": "a letter without case", "Mn": "a non-spacing mark", "Mc": "a spacing mark", "Me": "an enclosing mark"},
    **{"Nd": "a decimal digit", "Nl": "a letter number", "No": "a number", "Pc": "a connector", "Pd": "a dash"},
    **{"Ps": "an opening bracket", "Pe": "a closing bracket", "Pi": "an opening quotation mark"},
    **{"Pf": "a closing quotation mark", "Po": "a punctuation mark", "Sm": "a mathematical symbol"},
    **{"Sc": "a currency sign", "Sk": "a modifier symbol", "So": "a symbol", "Zs": "a space"},
}
CODECS = (
    "cp037", "cp437", "cp500", "cp720", "cp737", "cp775", "cp850", "cp852", "cp855", "cp857", "cp860", "cp862", "cp864",
    "cp866", "cp869", "cp874", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258",
    "iso8859-2", "iso8859-3", "iso8859-4", "iso8859-5", "iso8859-6", "iso8859-7", "iso8859-8", "iso8859-9", "iso8859-10",
    "iso8859-13", "iso8859-14", "iso8859-15", "iso8859-16", "koi8-r", "koi8-u", "mac-cyrillic", "mac-greek", "mac-roman",
    "mac-turkish", "tis-620",
)  # fmt: skip
ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX"}
ROMAN |= {5: "V", 4: "IV", 1: "I"}


def documents(stdlib: Path, packages: dict[str, Path], distributions: list[str]) -> list[str]:
    """Every document; what an installation lacks is left out.

    Args:
      stdlib: folder of the standard library.
      packages: import name -> folder of the installed packages that may hold a table.
      distributions: names of the installed distributions whose descriptions and licences are read.
    """
    made = topics(stdlib) + descriptions(distributions) + characters() + encodings() + entities() + codes() + years()
    if "scipy" in packages:
        made += constants(packages["scipy"] / "constants" / "_codata.py")
    if "matplotlib" in packages:
        made += colours(packages["matplotlib"] / "_color_data.py")
    if "pygments" in packages:
        made += languages(packages["pygments"] / "lexers" / "_mapping.py")
    return made


def _literals(path: Path) -> dict[str, object]:
    """Name -> value of the module-level assignments of literals in a source file; nothing is run."""
    if not path.is_file():
        return {}
    found = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                found[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                continue
    return found


def _grouped(sentences: list[str], size: int) -> list[str]:
    """Documents of `size` sentences."""
    return [" ".join(sentences[i : i + size]) for i in range(0, len(sentences), size)]


def topics(stdlib: Path) -> list[str]:
    """Articles of Python's reference manual that `help()` shows."""
    return list(_literals(stdlib / "pydoc_data" / "topics.py").get("topics", {}).values())


def descriptions(distributions: list[str]) -> list[str]:
    """Descriptions and licences of installed distributions."""
    made = []
    for name in distributions:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        made.append(distribution.metadata.get_payload() or distribution.metadata.get("Description") or "")
        for file in distribution.files or []:
            if "licen" in str(file).lower() and file.suffix in ("", ".txt", ".md", ".rst"):
                try:
                    made.append(Path(file.locate()).read_text(encoding="utf-8"))
                except (OSError, UnicodeDecodeError):
                    continue
    return made


def _character(code: int, name: str) -> str:
    char = chr(code)
    kind = CATEGORIES.get(unicodedata.category(char), "a character")
    shown = f" ({char})" if not unicodedata.combining(char) else ""
    said = [f"U+{code:04X}{shown} is {kind} called {name}"]
    parts = unicodedata.decomposition(char).split()
    if parts and not parts[0].startswith("<"):
        said.append("made of " + " and ".join(unicodedata.name(chr(int(p, 16)), f"U+{p}").lower() for p in parts))
    if (value := unicodedata.numeric(char, None)) is not None:
        said.append(f"worth {value:g}")
    if char.lower() != char:
        said.append(f"whose small form is {char.lower()}")
    elif char.upper() != char:
        said.append(f"whose capital is {char.upper()}")
    if unicodedata.mirrored(char):
        said.append("mirrored in text that runs from right to left")
    return ", ".join(said) + "."


def characters() -> list[str]:
    """Unicode characters with names of their own, 12 a document."""
    named = ((code, unicodedata.name(chr(code), "")) for code in range(0x20, 0x1FB00))
    generic = (
        "CJK ",
        "HANGUL SYLLABLE",
        "TANGUT",
        "KHITAN",
        "CUNEIFORM",
        "EGYPTIAN",
        "ANATOLIAN",
        "NUSHU",
        "VAI ",
        "YI ",
        "BAMUM",
    )
    sentences = [_character(code, name) for code, name in named if name and not name.startswith(generic)]
    return _grouped(sentences, 12)


def encodings() -> list[str]:
    """What the upper bytes of single-byte encodings stand for, one document an encoding and half."""
    made = []
    for codec in CODECS:
        decode, sentences = codecs.lookup(codec).decode, []
        for byte in range(128, 256):
            char = decode(bytes([byte]), "ignore")[0]
            if char and (name := unicodedata.name(char, "")):
                sentences.append(f"0x{byte:02X} is {char}, {name.lower()}")
        for i in range(0, len(sentences), 64):
            made.append(f"In the encoding {codec} the byte " + "; ".join(sentences[i : i + 64]) + ".")
    return made


def entities() -> list[str]:
    """Named entities of HTML."""
    sentences = []
    for name, value in sorted(html.entities.html5.items()):
        if name.endswith(";"):
            meaning = " followed by ".join(unicodedata.name(c, f"U+{ord(c):04X}").lower() for c in value)
            sentences.append(f"In HTML &{name} stands for {value.strip() or 'white space'}, {meaning}.")
    return _grouped(sentences, 16)


def codes() -> list[str]:
    """Status codes of HTTP, media types of file names, language and country codes of Windows."""
    made = [f"HTTP status {s.value} is called {s.phrase}. {s.description}".strip() + "." for s in http.HTTPStatus]
    types = mimetypes.MimeTypes(filenames=())
    pairs = sorted(types.types_map[True].items())
    made += [f"A file whose name ends in {suffix} has the media type {kind}." for suffix, kind in pairs]
    made += [f"Windows gives the locale {name} the code {code:#06x}." for code, name in sorted(locale.windows_locale.items())]
    return _grouped(made, 16)


def years(first: int = 1583, last: int = 3103) -> list[str]:
    """The Gregorian calendar, eight years a document: leap days, weekdays, Easter."""
    sentences = []
    for year in range(first, last):
        month, day = _easter(year)
        kind = "a leap year" if calendar.isleap(year) else "a common year"
        begins, ends = (calendar.day_name[calendar.weekday(year, *date)] for date in ((1, 1), (12, 31)))
        unlucky = [calendar.month_name[m] for m in range(1, 13) if calendar.weekday(year, m, 13) == calendar.FRIDAY]
        sentences.append(
            f"{year} ({_roman(year)}) is {kind}, begins on a {begins} and ends on a {ends}; Easter is on {day} "
            f"{calendar.month_name[month]}, and the 13th is a Friday in {' and '.join(unlucky)}."
        )
    return _grouped(sentences, 8)


def _easter(year: int) -> tuple[int, int]:
    """Month and day of Easter Sunday (the anonymous Gregorian algorithm)."""
    a, (b, c) = year % 19, divmod(year, 100)
    d, e = divmod(b, 4)
    h = (19 * a + b - d - (b - (b + 8) // 25 + 1) // 3 + 15) % 30
    i, k = divmod(c, 4)
    w = (32 + 2 * e + 2 * i - h - k) % 7
    month, day = divmod(h + w - 7 * ((a + 11 * h + 22 * w) // 451) + 114, 31)
    return month, day + 1


def _roman(n: int) -> str:
    text = ""
    for value, letters in ROMAN.items():
        text += letters * (n // value)
        n %= value
    return text


def constants(path: Path) -> list[str]:
    """Physical constants, CODATA's newest recommended values, from scipy's table."""
    tables = {n: t for n, t in _literals(path).items() if re.fullmatch(r"txt\d{4}", n) and isinstance(t, str)}
    if not tables:
        return []
    name, sentences = max(tables), []
    for line in tables[name].splitlines():
        # Columns: quantity (60), value (25), uncertainty (25), unit.
        quantity, value, error, unit = (
            line[:60].strip(),
            line[60:85].replace(" ", ""),
            line[85:110].replace(" ", ""),
            line[110:].strip(),
        )
        if quantity and re.match(r"-?\d", value):
            exactness = "exactly, by definition" if "exact" in error else f"with a standard uncertainty of {error}"
            sentences.append(f"The {quantity} is {value} {unit}".rstrip() + f", {exactness} (CODATA {name[3:]}).")
    return _grouped(sentences, 8)


def colours(path: Path) -> list[str]:
    """Names of colours: CSS's, and those that people gave in the XKCD survey."""
    sentences = []
    for table, source in (("CSS4_COLORS", "in CSS"), ("XKCD_COLORS", "in the XKCD survey")):
        for name, value in _literals(path).get(table, {}).items():
            red, green, blue = (int(value[i : i + 2], 16) for i in (1, 3, 5))
            said = f"red {red}, green {green} and blue {blue}"
            sentences.append(f"The colour called {name.removeprefix('xkcd:')} {source} is {value.lower()}: {said} of 255.")
    return _grouped(sentences, 12)


def languages(path: Path) -> list[str]:
    """Programming languages and file formats, their names and file endings, from pygments' table."""
    sentences = []
    for _, name, aliases, patterns, kinds in _literals(path).get("LEXERS", {}).values():
        said = [f"{name} is a language or format that Pygments can highlight"]
        said += [f"also called {', '.join(aliases)}"] if aliases else []
        said += [f"written in files named {' or '.join(patterns)}"] if patterns else []
        said += [f"with the media type {kinds[0]}"] if kinds else []
        sentences.append("; ".join(said) + ".")
    return _grouped(sentences, 8)
