"""Sparser is better at equal compute: loss against training FLOPs for 8 active of 64 to 512 experts (report 2.3, figure 5).

The claim: with 8 experts active and one shared, adding experts that are not used lowers the loss at the same training FLOPs. At
the report's scale, about 1e21 FLOPs, sparsity 8, 16 and 32 need 1.69, 1.39 and 1.15 times the FLOPs of sparsity 48.

    python -m experiments.sparsity_sweep                  15 minutes on two cores
    python -m experiments.sparsity_sweep --preset smoke   2 minutes; shows that everything works, not the law
    python -m experiments.sparsity_sweep --preset full    a night, or an accelerator; give it a larger --corpus

It trains the models of `configs/ladder.py`, all sparsities of a budget on the same batches, and writes to the folder --out:
runs.jsonl (a line a run), summary.json (fitted curves and FLOPs ratios with intervals) and figure.png. A killed sweep goes on
where it was when the same command is given again.
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from configs import ladder
from experiments import _record, _runner
from k2jax.config import DataConfig, RunConfig
from k2jax.scaling import flops, laws, plots
from k2jax.train.folder import DiskFull, write

REPORT = {8: 1.69, 16: 1.39, 32: 1.15, 48: 1.0}  # FLOPs over sparsity 48's at a validation loss of 1.5
TO = 48  # the sparsity that K2 has and the ratios refer to


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    preset: Literal["smoke", "default", "full"] = "default"  # how much to train
    out: Path | None = None  # folder of the results; runs/sparsity_sweep/PRESET if not given
    corpus: str = DataConfig.corpus  # builtin | pip | apt | a folder of text, JSONL, Parquet or ArrayRecord files | hf:NAME
    web: float = DataConfig.web  # mixture weight of web text; 0 leaves the domain out, likewise below
    code: float = DataConfig.code  # mixture weight of source code
    math: float = DataConfig.math  # mixture weight of mathematics
    knowledge: float = DataConfig.knowledge  # mixture weight of encyclopedic text
    cache: Path = DataConfig.cache  # prepared corpora and tokenizers
    seeds: int | None = None  # seeds of each run, 0 to N - 1; the preset's number if not given

    def __post_init__(self):
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1; got {self.seeds}")

    @property
    def folder(self) -> Path:
        return self.out or Path("runs/sparsity_sweep") / self.preset

    @property
    def mixture(self) -> dict[str, float]:
        return {"web": self.web, "code": self.code, "math": self.math, "knowledge": self.knowledge}

    @property
    def n_seeds(self) -> int:
        return self.seeds or ladder.SEEDS[self.preset]


@dataclass(frozen=True)
class Run:
    """A point of the figure."""

    sparsity: int
    rung: int
    seed: int
    config: RunConfig


def plan(options: Options) -> list[Run]:
    """Every run of the sweep; seeds change weights and data order alike, sparsities neither's."""
    runs = []
    for rung in range(len(ladder.RUNGS[options.preset])):
        for sparsity in ladder.SPARSITIES[options.preset]:
            for seed in range(options.n_seeds):
                base = ladder.config(sparsity, options.preset, rung)
                name = f"rung{rung}_sparsity{sparsity}_seed{seed}"
                data = replace(base.data, corpus=options.corpus, cache=options.cache, **options.mixture)
                config = replace(base, name=name, out=options.folder / "runs" / name, seed=seed, data_seed=seed, data=data)
                runs.append(Run(sparsity, rung, seed, config))
    return runs


def row(run: Run, outcome: _runner.Outcome) -> dict:
    """The line of `runs.jsonl`. `seconds` is the training loop's; losses are in nats a token."""
    config, result = run.config, outcome.result
    per_token, count = flops.training_flops(config, config.seq_len), flops.count_params(config)
    return {
        "name": config.name,
        "sparsity": run.sparsity,
        "rung": run.rung,
        "seed": run.seed,
        "active_params": count.active,
        "total_params": count.total,
        "flops": config.tokens * per_token.total,
        "flops_without_router": config.tokens * per_token.without_router,
        "tokens": config.tokens,
        "train_loss": result.train_loss,
        "val_loss": result.val_loss,
        "val_loss_by_domain": result.val_loss_by_domain,
        "seconds": sum(result.seconds.values()),
        "seconds_by_part": result.seconds,
        "wall_seconds": outcome.wall_seconds,
        "cpu_seconds": outcome.cpu_seconds,
        "tokens_per_second": result.tokens_per_second,
        "spikes": len(result.spikes),
        "skipped_steps": result.skipped_steps,
    }


def check_folder(options: Options, corpus_sha256: str | None = None) -> None:
    """ValueError if the folder is another experiment's, or holds runs of another preset or corpus."""
    folder, mark = options.folder, options.folder / "sweep.json"
    if not mark.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not empty and is no folder of this experiment; choose another --out")
        return
    theirs, mine = json.loads(mark.read_text()), _mark(options, corpus_sha256)
    apart = [f"{k} {theirs.get(k)!r}, not {v!r}" for k, v in mine.items() if v is not None and theirs.get(k) != v]
    if apart:
        raise ValueError(f"{folder} holds another sweep: {'; '.join(apart)}; choose another --out")


def claim_folder(options: Options, corpus_sha256: str) -> None:
    """Makes the folder this sweep's, once `check_folder` lets it."""
    check_folder(options, corpus_sha256)
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder / "sweep.json", json.dumps(_mark(options, corpus_sha256), indent=1))


def _mark(options: Options, corpus_sha256: str | None) -> dict:
    mark = {"experiment": "sparsity_sweep", "preset": options.preset, "corpus": options.corpus, "mixture": options.mixture}
    return mark | {"corpus_sha256": corpus_sha256}


def train_all(
    options: Options, runs: Sequence[Run], seconds: dict[str, float], console: Console
) -> tuple[list[dict], list[str]]:
    """Trains what is not trained yet, given the expected seconds of each run by its name.

    Returns the rows of `runs.jsonl` and the errors of failed runs.
    """
    path = options.folder / "runs.jsonl"
    rows = {r["name"]: r for r in _record.read_lines(path)}
    write(path, "".join(json.dumps(r) + "\n" for r in rows.values()))  # without a line that was cut off
    by_name = {run.config.name: run for run in runs}
    jobs = [_runner.Job(run.config, seconds[run.config.name]) for run in runs]
    errors = []
    with contextlib.closing(_runner.run_all(jobs, options.folder, console=console)) as outcomes:
        for outcome in outcomes:
            name = outcome.config.name
            if outcome.result is None:
                errors.append(outcome.error)
                console.print(f"[red]{outcome.error}", markup=True, highlight=False)
                continue
            if name not in rows:
                rows[name] = row(by_name[name], outcome)
                _record.append_line(path, rows[name])
            console.print(_line(rows[name]), highlight=False)
    return [rows[name] for name in by_name if name in rows], errors


class Analysis(NamedTuple):
    """One way of counting FLOPs, analysed. Arrays are [sparsity, cell], a cell being a rung and a seed; NaN is a failed run."""

    sparsities: list[int]
    cells: list[tuple[int, int]]
    flops: np.ndarray
    loss: np.ndarray
    fit: laws.Fit | None
    at_loss: float | None
    ratios: dict[int, laws.Interval]
    differences: dict[int, list[laws.Difference]]  # by rung
    note: str  # what is missing, and why

    @property
    def top(self) -> list[laws.Difference]:
        """The differences at the largest budget."""
        return self.differences[max(self.differences)]


def analyse(rows: Sequence[dict], axis: str) -> Analysis:
    """Fit, common loss and ratios on one FLOPs axis, `flops` or `flops_without_router`."""
    sparsities = sorted({r["sparsity"] for r in rows})
    cells = sorted({(r["rung"], r["seed"]) for r in rows})
    found, loss = np.full((2, len(sparsities), len(cells)), np.nan)
    for r in rows:
        at = sparsities.index(r["sparsity"]), cells.index((r["rung"], r["seed"]))
        found[at], loss[at] = r[axis], r["val_loss"]
    fit, at_loss, ratios, note = None, None, {}, ""
    try:
        fit = laws.fit_laws(sparsities, found, loss)
        at_loss = laws.common_loss(fit)
        ratios = laws.flops_ratios(fit, TO, at_loss)
    except ValueError as error:
        note = str(error)
    rungs = np.array([rung for rung, _ in cells])
    differences = {r: laws.paired_differences(sparsities, loss, rungs, r, fit=fit) for r in sorted(set(rungs.tolist()))}
    return Analysis(sparsities, cells, found, loss, fit, at_loss, ratios, differences, note)


def summarize(options: Options, corpus, rows: Sequence[dict], without: Analysis, with_router: Analysis, clock: dict) -> dict:
    """`summary.json`: laws and ratios count FLOPs without the router, as `flops_axis` says; `with_router` has the others."""
    return {
        "preset": options.preset,
        "corpus": {"tier": corpus.tier, "sha256": corpus.sha256, "tokens": corpus.tokens},
        "versions": _record.versions(("k2jax", "jax", "flax", "optax", "numpy")),
        "machine": _record.machine(),
        "runs": list(rows),
        "flops_axis": "without_router",
        **_analysis_as_json(without),
        "with_router": _analysis_as_json(with_router),
        "differences": {rung: [_difference_as_json(d) for d in found] for rung, found in without.differences.items()},
        "separation": plots.separation(without.top),
        "time": clock,
    }


def core_time(rows: Sequence[dict], wall: float, prepare: float, n_slots: int) -> dict:
    """Where the core time went, in core-seconds: the parts of every run, what its process cost besides, and idle cores.

    Idle time is known only for runs of this call; `training_share` is steps over everything.
    """
    parts: dict[str, float] = {}
    for r in rows:
        for name, seconds in r["seconds_by_part"].items():
            parts[name] = parts.get(name, 0.0) + seconds
    inside = sum(r["wall_seconds"] for r in rows)
    parts["process"] = max(0.0, inside - sum(r["seconds"] for r in rows))
    parts["idle"] = max(0.0, n_slots * wall - inside)
    parts["corpus"] = n_slots * prepare
    return {
        "wall_seconds": wall + prepare,
        "cpu_seconds": sum(r["cpu_seconds"] for r in rows),
        "core_seconds": parts,
        "training_share": parts.get("step", 0.0) / max(sum(parts.values()), 1e-9),
    }


def main(options: Options) -> int:
    """Runs the sweep; returns the exit status."""
    from k2jax.data.corpora import prepare  # late, so that --help is quick

    console = Console()
    runs = plan(options)
    check_folder(options)
    start = time.monotonic()
    corpus = prepare(runs[0].config.data, console=console)
    prepared = time.monotonic()
    claim_folder(options, corpus.sha256)
    slots = _runner.find_slots()
    rate = _runner.training_rate()
    seconds = {run.config.name: _runner.estimate_seconds(run.config, rate) for run in runs}
    _print_plan(options, runs, seconds, corpus, slots, console)
    rows, errors = train_all(options, runs, seconds, console)
    wall = time.monotonic() - prepared
    if not rows:
        console.print("[red]every run failed")
        return 1
    without, with_router = analyse(rows, "flops_without_router"), analyse(rows, "flops")
    clock = core_time(rows, wall, prepared - start, len(slots))
    summary = summarize(options, corpus, rows, without, with_router, clock)
    write(options.folder / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
    _draw(options, len(rows), without, with_router)
    _print_results(options, rows, without, with_router, clock, console)
    if errors:
        console.print(f"[red]{len(errors)} of {len(runs)} runs failed; the same command tries them again")
    return bool(errors)


def _print_plan(options: Options, runs, seconds, corpus, slots, console: Console) -> None:
    table = Table(title=f"sparsity sweep, {options.preset}: {len(runs)} runs on {len(slots)} slots into {options.folder}")
    for column in ("rung", "sparsity", "parameters", "active", "tokens", "FLOPs", "router's share", "estimate"):
        table.add_column(column, justify="right")
    for run in runs:
        if run.seed == 0:
            count, per_token = flops.count_params(run.config), flops.training_flops(run.config, run.config.seq_len)
            table.add_row(
                str(run.rung),
                str(run.sparsity),
                f"{count.total / 1e6:.2f}M",
                f"{count.active / 1e6:.2f}M",
                f"{run.config.tokens / 1e6:.2f}M",
                f"{run.config.tokens * per_token.total:.2e}",
                f"{per_token.router / per_token.total:.0%}",
                f"{seconds[run.config.name]:.0f} s",
                end_section=run.sparsity == ladder.SPARSITIES[options.preset][-1],
            )
    console.print(table)
    minutes = sum(seconds.values()) / len(slots) / 60
    seeds = f"{options.n_seeds} seed{'s' * (options.n_seeds > 1)}"
    console.print(f"corpus {corpus.tier}: {corpus.tokens / 1e6:.1f}M tokens, sha256 {corpus.sha256[:12]}; {seeds} of each run")
    console.print(f"about {minutes:.0f} minutes from nothing; finished runs are read")


def _line(r: dict) -> str:
    return (
        f"sparsity {r['sparsity']:2d}  {r['flops']:.2e} FLOPs  seed {r['seed']}:  validation {r['val_loss']:.4f}  "
        f"training {r['train_loss']:.4f}  {r['tokens_per_second']:,.0f} tokens/s  {r['seconds']:.0f} s"
    )


def _print_results(options: Options, rows, without: Analysis, with_router: Analysis, clock: dict, console: Console) -> None:
    table = Table(title="validation loss (nats a token), mean over seeds, and FLOPs over sparsity 48's at equal loss")
    budget = {r["rung"]: r["flops_without_router"] for r in rows}
    rungs = sorted(budget)
    for column in ("sparsity", *[f"{budget[r]:.2e}" for r in rungs], "router left out", "router included", "report"):
        table.add_column(column, justify="right")
    for i, s in enumerate(without.sparsities):
        at = [without.loss[i, [k for k, (r, _) in enumerate(without.cells) if r == rung]] for rung in rungs]
        means = [f"{np.nanmean(x):.4f}" if np.isfinite(x).any() else "failed" for x in at]
        ratios = [_ratio_text(a.ratios.get(s)) for a in (without, with_router)]
        table.add_row(str(s), *means, *ratios, f"{REPORT[s]:.2f}" if s in REPORT else "")
    console.print(table)
    console.print(plots.separation(without.top), highlight=False)
    for name, analysis in (("without", without), ("with", with_router)):
        if analysis.note:
            console.print(f"{name} the router: no ratio, since {analysis.note}", highlight=False)
    parts = sorted(clock["core_seconds"].items(), key=lambda item: -item[1])
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts)
    share = f"core time {clock['training_share']:.0%} training steps: {spent}"
    console.print(f"{clock['wall_seconds'] / 60:.1f} minutes; {share}", highlight=False)
    console.print(f"wrote runs.jsonl, summary.json and figure.png to {options.folder}")


def _ratio_text(ratio: laws.Interval | None) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]".replace("[", "\\[") if ratio else "-"


def _draw(options: Options, n_runs: int, without: Analysis, with_router: Analysis) -> None:
    panels = [
        plots.Panel(title, axis, a.flops, a.loss, a.fit, a.at_loss, a.ratios)
        for title, axis, a in (
            ("router left out", "training FLOPs without the router", without),
            ("router included", "training FLOPs with the router", with_router),
        )
    ]
    title = f"Loss against compute, 8 experts active: {options.preset} sweep, {options.corpus} corpus, {n_runs} runs"
    report = {s: r for s, r in REPORT.items() if s != TO}
    plots.plot_sparsity(options.folder / "figure.png", title, without.sparsities, panels, without.top, report)


def _analysis_as_json(analysis: Analysis) -> dict:
    fit, ratios = analysis.fit, analysis.ratios
    return {
        "laws": {} if fit is None else {s: _law_as_json(fit, s) for s in fit.sparsities},
        "at_loss": analysis.at_loss,
        "flops_ratio_to_48": {
            s: {"ratio": r.value, "low": r.low, "high": r.high, "report": REPORT.get(s)} for s, r in ratios.items()
        },
        "note": analysis.note,
    }


def _law_as_json(fit: laws.Fit, sparsity: int) -> dict:
    law = fit.laws[sparsity]
    return {
        "formula": "floor + scale * (flops / reference) ** -exponent",
        "floor": {"value": law.floor} | ({"low": fit.floor.low, "high": fit.floor.high} if fit.floor_identified else {}),
        "floor_identified": fit.floor_identified,
        "scale": fit.scale(sparsity)._asdict(),
        "exponent": fit.exponent(sparsity)._asdict(),
        "reference": law.reference,
        "low_flops": law.low_flops,
        "high_flops": law.high_flops,
    }


def _difference_as_json(d: laws.Difference) -> dict:
    return d._asdict() | {"error": d.error if np.isfinite(d.error) else None, "separated": d.separated}


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, prog="python -m experiments.sparsity_sweep", description=__doc__)))
    except (ValueError, ImportError, DiskFull) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
