"""What experiments on claims of the report have in common: training runs on one corpus, and verdicts at the end."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit

from experiments import _record, _runner
from k2jax.config import DataConfig, RunConfig
from k2jax.data.corpora import Corpus, prepare
from k2jax.scaling import flops
from k2jax.train import metrics
from k2jax.train.folder import DiskFull, Result, write


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    preset: Literal["smoke", "default", "full"] = "default"  # how much to train
    out: Path | None = None  # folder of the results; runs/EXPERIMENT/PRESET if not given
    corpus: str = DataConfig.corpus  # builtin | pip | apt | a folder of text, JSONL, Parquet or ArrayRecord files | hf:NAME
    cache: Path = DataConfig.cache  # prepared corpora and tokenizers
    seeds: int | None = None  # seeds of each run, 0 to N - 1; the preset's number if not given

    def __post_init__(self):
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1; got {self.seeds}")


class Study(NamedTuple):
    """An experiment's folder and what was said on the command line."""

    name: str
    options: Options
    folder: Path
    console: Console


class Trained(NamedTuple):
    """A run that has ended: its result and the rows of its `metrics.jsonl`, one a step."""

    config: RunConfig
    result: Result
    rows: list[dict]


class Claim(NamedTuple):
    """A claim of the report, what was measured of it here, and whether that bears it out."""

    number: str  # as the experiment's docstring lists it
    text: str
    measured: str
    verdict: Literal["pass", "fail", "untested"]


class Gap(NamedTuple):
    """A paired difference of losses, against what seeds do to the loss; nats."""

    mean: float
    error: float  # standard error of the mean, from the scatter of the pairs
    low: float  # Student's interval of the mean, 95%
    high: float
    spread: float  # standard deviation over seeds of the loss that is compared with


def gap_of(gaps: Sequence[float], losses: Sequence[float]) -> Gap:
    """The mean of paired gaps, and the spread of the losses; from two on."""
    mean, error = float(np.mean(gaps)), float(np.std(gaps, ddof=1) / np.sqrt(len(gaps)))
    half = float(stdtrit(len(gaps) - 1, 0.975)) * error
    return Gap(mean, error, mean - half, mean + half, float(np.std(losses, ddof=1)))


def study(name: str, options: Options) -> Study:
    """Opens an experiment; its folder is `runs/NAME/PRESET` unless the user has named one."""
    return Study(name, options, options.out or Path("runs") / name / options.preset, Console())


def placed(study: Study, name: str, config: RunConfig) -> RunConfig:
    """The config as a run of the study: with its name, its folder, and the study's corpus."""
    data = replace(config.data, corpus=study.options.corpus, cache=study.options.cache)
    return replace(config, name=name, out=study.folder / "runs" / name, data=data)


def train(study: Study, runs: Sequence[RunConfig]) -> tuple[dict[str, Trained], Corpus, list[str]]:
    """Trains, over the cores of this machine, what is not trained yet; prints the plan before and a line a run.

    Returns the runs by name, the corpus, and the errors of runs that failed. Raises ValueError, before anything is trained,
    if the folder holds something else.
    """
    console, folder = study.console, study.folder
    _check(study, None)
    corpus = prepare(runs[0].data, console=console)
    _check(study, corpus.sha256)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "study.json", json.dumps(_mark(study, corpus.sha256), indent=1))
    rate = _runner.training_rate()
    jobs = [_runner.Job(config, _runner.estimate_seconds(config, rate)) for config in runs]
    slots = _runner.find_slots()
    _print_plan(study, jobs, len(slots), corpus)
    trained, errors, start = {}, [], time.monotonic()
    with contextlib.closing(_runner.run_all(jobs, folder, console=console, slots=slots)) as outcomes:
        for outcome in outcomes:
            if outcome.result is None:
                errors.append(outcome.error)
                console.print(f"[red]{outcome.error}", markup=True, highlight=False)
                continue
            config, r = outcome.config, outcome.result
            trained[config.name] = Trained(config, r, metrics.read(config.out / "metrics.jsonl"))
            loss = "diverged" if r.val_loss is None or not math.isfinite(r.val_loss) else f"{r.val_loss:.4f}"
            console.print(f"{config.name}: validation {loss}, {sum(r.seconds.values()):.0f} s", highlight=False)
    console.print(f"{len(trained)} of {len(runs)} runs, {(time.monotonic() - start) / 60:.1f} minutes", highlight=False)
    return trained, corpus, errors


def conclude(study: Study, corpus: Corpus, claims: Sequence[Claim], findings: dict, errors: Sequence[str]) -> int:
    """Writes `summary.json`, prints the claims and their verdicts; returns the exit status.

    `findings` is what the experiment found, as plain JSON; numbers that are not finite become null. A claim that is not borne
    out is a result and not an error.
    """
    options = study.options
    summary = {
        "experiment": study.name,
        "preset": options.preset,
        "command": command(study),
        "corpus": {"tier": corpus.tier, "sha256": corpus.sha256, "tokens": corpus.tokens},
        "versions": _record.versions(("k2jax", "jax", "flax", "optax", "numpy")),
        "machine": _record.machine(),
        "claims": [claim._asdict() for claim in claims],
        **findings,
    }
    write(study.folder / "summary.json", json.dumps(_plain(summary), indent=1, allow_nan=False))
    table = Table(title=f"{study.name}, {options.preset}: claims of the report")
    for column in ("claim", "", "measured", "verdict"):
        table.add_column(column, overflow="fold")
    colour = {"pass": "green", "fail": "red", "untested": "yellow"}
    for c in claims:
        table.add_row(c.number, c.text, c.measured, f"[{colour[c.verdict]}]{c.verdict}")
    study.console.print(table)
    study.console.print(f"wrote summary.json and figure.png to {study.folder}", highlight=False)
    if errors:
        study.console.print(f"[red]{len(errors)} runs failed; the same command tries them again")
    return bool(errors)


def command(study: Study) -> str:
    """The command that does the study again: the preset, and what else was said."""
    said = {"preset": study.options.preset}
    for field in fields(study.options):
        if field.name not in ("out", "cache") and getattr(study.options, field.name) != field.default:
            said[field.name] = getattr(study.options, field.name)
    words = [f"--{name.replace('_', '-')} {value}" for name, value in said.items()]
    return " ".join([f"python -m experiments.{study.name}", *words])


def command_line(main: Callable[[Options], int], name: str, description: str, options: type[Options] = Options) -> None:
    """Runs an experiment from the command line; what the user can mend ends in one sentence."""
    try:
        sys.exit(main(tyro.cli(options, prog=f"python -m experiments.{name}", description=description)))
    except (ValueError, ImportError, DiskFull) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


def _check(study: Study, corpus_sha256: str | None) -> None:
    folder, mark = study.folder, study.folder / "study.json"
    if not mark.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not empty and is no folder of this experiment; choose another --out")
        return
    theirs, mine = json.loads(mark.read_text()), _mark(study, corpus_sha256)
    apart = [f"{k} {theirs.get(k)!r}, not {v!r}" for k, v in mine.items() if v is not None and theirs.get(k) != v]
    if apart:
        raise ValueError(f"{folder} holds another study: {'; '.join(apart)}; choose another --out")


def _mark(study: Study, corpus_sha256: str | None) -> dict:
    options = study.options
    mark = {"experiment": study.name, "preset": options.preset, "corpus": options.corpus}
    return mark | {"corpus_sha256": corpus_sha256}


def _print_plan(study: Study, jobs: Sequence[_runner.Job], n_slots: int, corpus: Corpus) -> None:
    table = Table(title=f"{study.name}, {study.options.preset}: {len(jobs)} runs on {n_slots} slots into {study.folder}")
    for column in ("run", "parameters", "tokens", "FLOPs", "estimate"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for config, seconds in jobs:
        total = config.tokens * flops.training_flops(config, config.seq_len).total
        parameters = f"{flops.count_params(config).total / 1e6:.2f}M"
        table.add_row(config.name, parameters, f"{config.tokens / 1e6:.2f}M", f"{total:.1e}", f"{seconds:.0f} s")
    study.console.print(table)
    minutes = sum(job.cost for job in jobs) / n_slots / 60
    study.console.print(
        f"corpus {corpus.tier}: {corpus.tokens / 1e6:.1f}M tokens, sha256 {corpus.sha256[:12]}", highlight=False
    )
    study.console.print(f"about {minutes:.0f} minutes from nothing; finished runs are read", highlight=False)


def _plain(value):
    """JSON's types: arrays become lists, what is not finite null, paths strings."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.floating, float)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return str(value) if isinstance(value, Path) else value
