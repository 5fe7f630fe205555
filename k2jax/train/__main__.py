"""`python -m k2jax.train PRESET [--FIELD VALUE ...]`: trains the run that a preset describes, with fields changed.

PRESET is a module with a function `config()`, such as `configs.tiny`. The same command goes on with what it finds in --out.
Many processes train together when SLURM or Open MPI starts them, or with --hosts.* (docs/multihost.md).
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from k2jax.config import HostsConfig, RunConfig

USAGE = "usage: python -m k2jax.train PRESET [--FIELD VALUE ...]; PRESET is a module with config(), such as configs.tiny"


class UsageError(Exception):
    """A wrong command line, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run, and this process's place among those that share it, which is no part of what the run is."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]  # its fields have no prefix
    hosts: HostsConfig = field(default_factory=HostsConfig)


def parse(arguments: Sequence[str]) -> Command:
    """What a command line asks for. Raises UsageError; `--help` prints every field with its meaning and exits."""
    arguments = list(arguments)
    if not arguments:
        raise UsageError(USAGE)
    preset = RunConfig() if arguments[0] in ("-h", "--help") else _preset(arguments.pop(0))
    shown = io.StringIO()
    try:
        # Errors are boxes for the eye: they are caught, and said in a sentence. Help goes to stdout as it is.
        with contextlib.redirect_stderr(shown):
            program, default = "python -m k2jax.train PRESET", Command(run=preset)
            return tyro.cli(Command, prog=program, description=__doc__, default=default, args=arguments)
    except SystemExit as end:
        if end.code:
            raise UsageError(_sentence(shown.getvalue())) from None
        raise


def _preset(name: str) -> RunConfig:
    if name.startswith("-"):
        raise UsageError(f"the first argument must be a preset; got {name}. {USAGE}")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 for a run that failed, 2 for a wrong command or config."""
    try:
        command = parse(sys.argv[1:] if arguments is None else arguments)
    except (UsageError, ValueError) as error:
        return _say(2, error)

    from k2jax.allocator import keep_freed_memory

    keep_freed_memory()  # before jax allocates
    from k2jax.train import hosts
    from k2jax.train.folder import Refused
    from k2jax.train.loop import Diverged, train

    try:
        with hosts.joined(command.hosts) as others:
            try:
                train(command.run)
            except Refused as error:
                return others.fail(2, error)
            except (OSError, Diverged) as error:
                return others.fail(1, error)
    except Refused as error:
        return _say(2, error)
    return 0


def _say(code: int, error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
