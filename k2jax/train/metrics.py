"""What a run reports: one line a step in `metrics.jsonl`, never averaged, and the same numbers as TensorBoard events.

With `probe_every`, `probes.jsonl` has a line for every leaf and layer of each step that is probed (`k2jax.optim.probes`).
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorboardX

from k2jax.config import RunConfig
from k2jax.optim.probes import Probe
from k2jax.scaling.flops import training_flops
from k2jax.train.folder import write


def row(config: RunConfig, step: int, metrics: dict, seconds: float, data_wait: float) -> dict:
    """A step's line: plain numbers and lists, None where a number is not finite.

    Lists go by layer within a stack ("dense", "moe", "mtp").

    Args:
      metrics: what the step returned, fetched to the host.
      seconds: wall time of the step, `data_wait` included.
      data_wait: seconds of it spent waiting for the batch.
    """
    tokens_per_second = config.batch * config.seq_len / max(seconds, 1e-9)
    fired, last = _all_heads(metrics["fired_LH"]), _all_heads(metrics["last_fired_LH"])
    return {
        "step": step,
        "tokens": step * config.batch * config.seq_len,
        "loss": _number(metrics["loss"]),  # next token, nats: what the validation loss compares with
        "mtp_loss": _number(metrics["mtp_loss"]) if config.model.n_mtp else None,
        "balance_loss": _number(metrics["balance_loss"]),
        "total_loss": _number(metrics["total_loss"]),  # what is differentiated
        "learning_rate": _number(metrics["learning_rate"]),
        "grad_norm": _number(metrics["grad_norm"]),  # before it is clipped
        "update_rms": _number(metrics["update_rms"]),  # of the change of the weights, all of them together
        "skipped": int(metrics["skips"]) > 0,
        "skips_total": int(metrics["skips_total"]),
        "max_logit": {stack: [_number(x) for x in s.max(-1)] for stack, s in metrics["max_logit_LH"].items()},
        "heads": int(last.size),
        "heads_clipped": int(fired.sum()),
        "heads_clipped_share": float(fired.mean()),
        "heads_ever_clipped": int((last > 0).sum()),
        "heads_ever_clipped_share": float((last > 0).mean()),
        "last_clip_step": int(last.max()) or None,
        "load_imbalance": {stack: load_imbalance(load) for stack, load in metrics["load_LE"].items()},
        "idle_experts": {stack: (load == 0).sum(-1).tolist() for stack, load in metrics["load_LE"].items()},
        "exchange_rounds": int(metrics["exchange_rounds"]),  # most that any exchange of experts' rows took
        "seconds": seconds,
        "data_wait": data_wait,
        "tokens_per_second": tokens_per_second,
        "flops_per_second": tokens_per_second * training_flops(config.model, config.seq_len).total,
    }


def probe_rows(step: int, probes: dict[str, Probe]) -> list[dict]:
    """The lines of a probed step: step, leaf, layer, and what `Probe` has of them, None where it is not finite.

    Args:
      probes: {leaf: Probe}.
    """
    return [
        {"step": step, "leaf": leaf, "layer": layer} | {name: _number(x[layer]) for name, x in probe._asdict().items()}
        for leaf, probe in probes.items()
        for layer in range(len(probe.entropy))
    ]


def load_imbalance(load_LE: np.ndarray) -> list[float]:
    """Largest over mean load of the experts, by layer; 1 is perfect balance."""
    load = np.asarray(load_LE, np.float64)
    return (load.max(-1) / np.maximum(load.mean(-1), 1e-9)).tolist()


def _all_heads(by_stack: dict) -> np.ndarray:
    return np.concatenate([np.asarray(x).reshape(-1) for x in by_stack.values()])


def _number(x) -> float | None:
    return float(x) if math.isfinite(x) else None


class Log:
    """Writes the rows. Opened for a run that goes on from `step`, it first drops what was logged beyond."""

    def __init__(self, folder: Path, step: int):
        truncate(folder / "metrics.jsonl", step)
        truncate(folder / "probes.jsonl", step)
        self._file = (folder / "metrics.jsonl").open("a")
        self._probes = None  # opened when there is something to write
        self._folder = folder
        # Events of steps from here on that a killed session may have left are hidden by TensorBoard.
        self._events = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, max_queue=100)

    def write(self, row: dict, max_logit_LH: dict[str, np.ndarray] | None = None) -> None:
        """Appends a row; the largest logits, if given, become one histogram over heads a stack."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in scalars(row):
            self._events.add_scalar(name, value, row["step"])
        for stack, values in (max_logit_LH or {}).items():
            self._events.add_histogram(f"max_logit_of_heads/{stack}", np.asarray(values).reshape(-1), row["step"])

    def probe(self, rows: list[dict]) -> None:
        """Appends the rows of a probed step."""
        self._probes = self._probes or (self._folder / "probes.jsonl").open("a")
        self._probes.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        for row in rows:
            for name in Probe._fields:
                if row[name] is not None:
                    self._events.add_scalar(f"{name}/{row['leaf']}/{row['layer']}", row[name], row["step"])

    def sync(self) -> None:
        """Puts what was written on the disk, so that no checkpoint is ahead of its log."""
        for file in filter(None, (self._file, self._probes)):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Ends the files."""
        for file in filter(None, (self._file, self._probes, self._events)):
            file.close()


class NoLog:
    """What a process that writes no log has in its place."""

    def write(self, row: dict, max_logit_LH: dict[str, np.ndarray] | None = None) -> None:
        """Nothing."""

    def probe(self, rows: list[dict]) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def scalars(value, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a nest of dicts and lists, under names like `max_logit/moe/0`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from scalars(inner, f"{name}/{key}" if name else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from scalars(inner, f"{name}/{i}")
    elif value is not None:
        yield name, float(value)


def read(path: Path) -> list[dict]:
    """The rows of a `metrics.jsonl`, without a last line that a kill cut off."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def truncate(path: Path, step: int) -> None:
    """Keeps the rows up to `step` alone."""
    if not path.exists():
        return
    write(path, "".join(json.dumps(r) + "\n" for r in read(path) if r["step"] <= step))
