"""`python -m k2jax.train PRESET [--FIELD VALUE ...]`: trains the run that a preset describes, with fields changed.

PRESET is a module with a function `config()`, such as `configs.tiny`. The same command goes on with what it finds in --out.
Many processes train together when SLURM or Open MPI starts them, or with --hosts.* (docs/multihost.md).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from k2jax import command
from k2jax.allocator import fault_in_huge_pages, keep_freed_memory
from k2jax.command import UsageError
from k2jax.config import HostsConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run, and this process's place among those that share it, which is no part of what the run is."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]  # its fields have no prefix
    hosts: HostsConfig = field(default_factory=HostsConfig)


def parse(arguments: Sequence[str]) -> Command:
    """What a command line asks for. Raises UsageError; `--help` prints every field with its meaning and exits."""
    return command.parse(Command, "python -m k2jax.train", __doc__, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 for a run that failed, 2 for a wrong command or config."""
    try:
        asked = parse(sys.argv[1:] if arguments is None else arguments)
    except (UsageError, ValueError) as error:
        return _say(2, error)

    keep_freed_memory()  # before jax allocates
    from k2jax.train import hosts
    from k2jax.train.folder import Refused
    from k2jax.train.loop import Diverged, train

    try:
        with hosts.joined(asked.hosts) as others:
            try:
                train(asked.run)
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
    fault_in_huge_pages()
    sys.exit(main())
