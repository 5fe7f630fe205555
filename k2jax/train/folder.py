"""The folder of a run: which run it belongs to, and the result a finished one leaves there."""

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k2jax.config import RunConfig, differences, from_dict, to_dict

try:
    import fcntl
except ImportError:  # not on Windows, where a folder is not guarded
    fcntl = None

# Fields that change neither the weights nor the result: a run may go on, and its result be read, with others. How the work is
# divided changes them by rounding.
FREE = (
    *("name", "out", "eval_every", "checkpoint_every", "probe_every"),
    *("data.cache", "data.workers", "data.prefetch", "microbatches", "mesh"),
)


class Refused(ValueError):
    """What was asked for cannot be run, in a sentence that names the value and the rule; nothing was changed."""


class DiskFull(OSError):
    """A disk, a quota or a file-size limit is exhausted, in a sentence that says what is still whole."""

    def __init__(self, sentence: str):
        super().__init__(errno.ENOSPC, sentence)

    def __str__(self) -> str:
        return self.strerror


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room to write; some libraries say so in the text alone."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return any(sign in str(error) for sign in ("No space left on device", "Disk quota exceeded", "File too large"))


@dataclass(frozen=True)
class Result:
    """What a run came to; `result.json` holds the same fields."""

    steps: int
    tokens: int  # positions trained on
    train_loss: float  # next-token loss, mean of the last 20 steps, nats
    val_loss: float  # mean over the domains, weighted by the mixture
    val_loss_by_domain: dict[str, float]
    tokens_per_second: float  # while training, all else left out
    seconds: dict[str, float]  # start, data, compile, step, evaluate (and probe), checkpoint; over all sessions of the run
    skipped_steps: int  # gradients that were not finite
    spikes: list[dict]  # see k2jax.train.diagnostics
    warnings: list[str]  # what the diagnostics found, one sentence each
    heads: dict[str, int | None]  # total, clipped (ever), last_step (of a clip; None if there was none)
    corpus: dict  # tier, sha256, tokens
    config: dict  # of the run, in full


def differing(held: RunConfig, given: RunConfig) -> list[str]:
    """The fields in which two configs describe different runs: `["model.d_model: 64 != 128"]`."""
    return [line for line in differences(held, given) if not _is_free(line.split(":")[0])]


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def read_result(config: RunConfig) -> Result | None:
    """The result in the run's folder, or None while there is none."""
    path = config.out / "result.json"
    if not path.exists():
        return None
    return Result(**json.loads(path.read_text()))


def write(path: Path, text: str) -> None:
    """Replaces a file at once: a reader, or a kill, finds the old text or the new."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextlib.contextmanager
def claim(config: RunConfig) -> Iterator[Path]:
    """Makes `config.out` the folder of this run alone while the context lasts, and records the config in it.

    Raises Refused, with nothing written, if the folder holds something else, a run of another config, or a run that
    another process is at.
    """
    folder = config.out
    check(config)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(f"one process at a time trains in a folder; another one is at work in {folder}") from None
        write(folder / "config.json", json.dumps(to_dict(config), indent=1) + "\n")
        yield folder


def check(config: RunConfig) -> None:
    """Raises Refused if `config.out` is not free for this run: not a folder, foreign files, another config."""
    folder, recorded = config.out, config.out / "config.json"
    if folder.exists() and not folder.is_dir():
        raise Refused(f"out must be a folder; {folder} is a file")
    if recorded.exists():
        try:
            held = from_dict(RunConfig, json.loads(recorded.read_text()))
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"{recorded} is not the config of a run of this version ({error}); choose another out") from None
        if apart := differing(held, config):
            raise Refused(f"{folder} holds a run of another config ({'; '.join(apart)}); choose another out")
    elif folder.exists():
        foreign = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.name != "lock")
        if foreign:
            shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise Refused(f"out must be a new or empty folder or one of the same run; {folder} holds {shown}")


def finish(config: RunConfig, result: Result) -> None:
    """Writes `result.json`, the mark of a finished run."""
    write(config.out / "result.json", json.dumps(dataclasses.asdict(result), indent=1, allow_nan=False) + "\n")
