"""A command line that names a preset and changes its fields: `python -m k2jax.train PRESET [--FIELD VALUE ...]`.

PRESET is a module with a function `config()`, such as `configs.tiny`.
"""

import contextlib
import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import tyro

from k2jax.config import RunConfig

Command = TypeVar("Command")


class UsageError(Exception):
    """A wrong command line, in one sentence."""


def parse(kind: type[Command], program: str, description: str, arguments: Sequence[str]) -> Command:
    """What a command line asks for: a `kind`, a dataclass with a RunConfig `run`, which is the preset's until flags change it.

    Raises UsageError; `--help` prints every field with its meaning and exits.
    """
    arguments = list(arguments)
    usage = f"usage: {program} PRESET [--FIELD VALUE ...]; PRESET is a module with config(), such as configs.tiny"
    if not arguments:
        raise UsageError(usage)
    preset = RunConfig() if arguments[0] in ("-h", "--help") else _preset(arguments.pop(0), usage)
    shown = io.StringIO()
    try:
        # Errors are boxes for the eye: they are caught, and said in a sentence. Help goes to stdout as it is.
        with contextlib.redirect_stderr(shown):
            return tyro.cli(kind, prog=f"{program} PRESET", description=description, default=kind(run=preset), args=arguments)
    except SystemExit as end:
        if end.code:
            raise UsageError(_sentence(shown.getvalue())) from None
        raise


def _preset(name: str, usage: str) -> RunConfig:
    if name.startswith("-"):
        raise UsageError(f"the first argument must be a preset; got {name}. {usage}")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the preset is there, something that it needs is not
        raise UsageError(f"there is no preset {name!r}{_others(name)}") from None
    if not callable(getattr(module, "config", None)):
        raise UsageError(f"a preset must have a function config(); {name!r} has none{_others(name)}")
    return module.config()


def _others(name: str) -> str:
    folder = importlib.import_module("configs").__path__
    found = sorted(p.stem for root in folder for p in Path(root).glob("*.py") if p.stem != "__init__")
    return f"; there are {', '.join(f'configs.{p}' for p in found)}"


def _sentence(box: str) -> str:
    """The message in tyro's box, without title, frame and pointers; the names that it proposes at the end."""
    lines = [line.strip(" │╭╮╰╯") for line in box.splitlines()]
    lines = [line for line in lines if line][1:]  # the first is the title
    rules = [i for i, line in enumerate(lines) if not line.strip("─-")] + [len(lines)]
    sections = [lines[i + 1 : j] for i, j in zip([-1, *rules], rules, strict=False)]
    message, *more = [section for section in sections if section]
    names = [line.split(" ")[0] for section in more for line in section if line.startswith("--")]
    near = f"; near are {', '.join(dict.fromkeys(names))}" if names and more[0][0].startswith("Perhaps") else ""
    return " ".join(message).rstrip(".") + near
