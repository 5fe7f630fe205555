"""Muon against AdamW at equal data and compute, both tuned (Moonlight report 3.2, table 3, figure 1a; K2 report 2.1).

Claims:
  10a  Muon's loss is lower than AdamW's on the same batches, at every size.
  10b  Muon needs about 52% of AdamW's training FLOPs for the same loss.
  12a  The SVD entropy of most matrices is higher under Muon (the report: of more than 90%; here: of more than 70%).
  12b  The gap is largest in the router.

    python -m experiments.muon_vs_adamw                  9 minutes on two cores
    python -m experiments.muon_vs_adamw --preset smoke   2 minutes; shows that everything works, no claim
    python -m experiments.muon_vs_adamw --preset full    about 10 hours on two cores

It trains the models of `configs/llama.py`. For each size and rule a grid of learning rates is tried with seed 0; a best one at
the grid's edge has the grid go on, and the best is then repeated with the other seeds. Batches, schedule, decay, clipping and
seeds are the same for both rules. `summary.json` has every run and both fitted laws, with and without the FLOPs of
Newton-Schulz. A killed run goes on where it was when the same command is given again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from configs import llama
from experiments import _study
from experiments._study import Claim, Options, Study, Trained
from k2jax.config import RunConfig
from k2jax.model import transformer
from k2jax.optim import probes
from k2jax.optim.muon import by_path
from k2jax.optim.muonclip import table
from k2jax.scaling import flops, laws, plots
from k2jax.train.checkpoint import Checkpoints

RULES = ("adamw", "muon")
RATES = {"smoke": (5e-3, 1e-2), "default": (5e-3, 1e-2, 2e-2), "full": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)}
EXTENSIONS = {"smoke": 0, "default": 3, "full": 3}  # times a grid goes on beyond its edge
SEEDS = {"smoke": 1, "default": 2, "full": 3}
REPORT = 0.52  # Muon's FLOPs over AdamW's
MOST = 0.7  # share of matrices


class Point(NamedTuple):
    """A run of the study."""

    rung: int
    rule: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"rung{self.rung}_{self.rule}_rate{self.rate:g}_seed{self.seed}"


def config_of(study: Study, point: Point) -> RunConfig:
    base = llama.config(point.rung, study.options.preset, point.rule)
    optim = replace(base.optim, learning_rate=point.rate)
    return _study.placed(study, point.name, replace(base, seed=point.seed, data_seed=point.seed, optim=optim))


def wanted(preset: str, n_seeds: int, rows: Sequence[dict]) -> list[Point]:
    """The runs to have, given those that are there: every grid, the next rate where the best lies at an edge, and all seeds of
    a best that does not."""
    points = []
    for rung in range(len(llama.RUNGS[preset])):
        for rule in RULES:
            tried = tuning(rows, rung, rule)
            rates = sorted({*RATES[preset], *tried})
            points += [Point(rung, rule, rate, 0) for rate in rates]
            if not tried:
                continue
            best = min(tried, key=tried.get)
            if (beyond := next_rate(best, rates)) and len(rates) < len(RATES[preset]) + EXTENSIONS[preset]:
                points.append(Point(rung, rule, beyond, 0))
            else:
                points += [Point(rung, rule, best, seed) for seed in range(1, n_seeds)]
    return points


def tuning(rows: Sequence[dict], rung: int, rule: str) -> dict[float, float]:
    """Learning rate -> loss with seed 0; a run that diverged has an infinite loss."""
    return {r["rate"]: r["loss"] for r in rows if (r["rung"], r["rule"], r["seed"]) == (rung, rule, 0)}


def next_rate(best: float, rates: Sequence[float]) -> float | None:
    """The rate beyond the edge that `best` lies at, None if it lies inside."""
    if best == min(rates):
        return best / 2
    return best * 2 if best == max(rates) else None


def train(study: Study) -> tuple[list[dict], dict[str, Trained], object, list[str]]:
    """Trains until nothing more is wanted. Returns the rows, the runs by name, the corpus, and errors of failed runs."""
    preset = study.options.preset
    n_seeds = study.options.seeds or SEEDS[preset]
    rows, asked = [], set()
    while asked != (points := set(wanted(preset, n_seeds, rows))) | asked:
        asked |= points
        configs = {p: config_of(study, p) for p in sorted(asked)}
        trained, corpus, errors = _study.train(study, list(configs.values()))
        rows = [row(p, trained[p.name]) for p in configs if p.name in trained]
    return rows, trained, corpus, errors


def row(point: Point, run: Trained) -> dict:
    """A run of `summary.json`; losses are nats a token."""
    config, result = run.config, run.result
    training = config.tokens * flops.training_flops(config, config.seq_len).total
    loss = result.val_loss if result.val_loss is not None and math.isfinite(result.val_loss) else math.inf
    return {
        "name": point.name,
        **point._asdict(),
        "flops": training,
        "flops_with_newton_schulz": training + config.steps * newton_schulz_flops(config),
        "tokens": config.tokens,
        "params": flops.count_params(config).total,
        "loss": loss,
        "train_loss": result.train_loss,
        "seconds": result.seconds,
    }


def newton_schulz_flops(config: RunConfig) -> int:
    """FLOPs of one step's orthogonalizations."""
    return sum(r.flops for r in table(config.optim, config.model, transformer.abstract(config.model)[0]))


@dataclass(frozen=True)
class Analysis:
    """The tuned runs and their laws. Arrays are [rule, cell], a cell being a size and a seed; NaN is a missing run."""

    cells: list[tuple[int, int]]
    flops: np.ndarray
    loss: np.ndarray
    best: dict[tuple[int, str], float]  # the tuned rate by size and rule
    at_edge: list[str]  # sizes and rules whose best rate is the last that was tried
    gaps: dict[int, laws.Difference]  # AdamW's loss less Muon's, by size
    fit: laws.Fit | None
    at_loss: float | None
    ratio: laws.Interval | None  # Muon's FLOPs over AdamW's
    note: str  # why there is no ratio


def analyse(rows: Sequence[dict], axis: str = "flops", *, floor: float | None = None) -> Analysis:
    """Laws and their ratio over FLOPs counted as `axis`, a field of the rows, says; `floor` as in `laws.fit_laws`."""
    grids = {key: tuning(rows, *key) for key in sorted({(r["rung"], r["rule"]) for r in rows})}
    best = {key: min(tried, key=tried.get) for key, tried in grids.items() if tried}
    edge = [f"size {rung} {rule}: {r:g}" for (rung, rule), r in best.items() if next_rate(r, list(grids[rung, rule]))]
    chosen = [r for r in rows if r["rate"] == best.get((r["rung"], r["rule"])) and math.isfinite(r["loss"])]
    cells = sorted({(r["rung"], r["seed"]) for r in chosen})
    found, loss = np.full((2, len(RULES), len(cells)), np.nan)
    for r in chosen:
        at = RULES.index(r["rule"]), cells.index((r["rung"], r["seed"]))
        found[at], loss[at] = r[axis], r["loss"]
    fit, at_loss, ratio, note = None, None, None, ""
    try:
        fit = laws.fit_laws(RULES, found, loss, floor=floor)
        at_loss = laws.common_loss(fit)
        ratio = laws.flops_ratios(fit, "adamw", at_loss)["muon"]
    except ValueError as error:
        note = str(error)
    rungs = np.array([rung for rung, _ in cells])
    gaps = {r: d[0] for r in np.unique(rungs).tolist() if (d := laws.paired_differences(RULES, loss, rungs, r, fit=fit))}
    return Analysis(cells, found, loss, best, edge, gaps, fit, at_loss, ratio, note)


def claims(analysis: Analysis, entropy: Mapping[str, tuple[float, float]], preset: str) -> list[Claim]:
    """The verdicts; `entropy` is a matrix's, under AdamW and under Muon. A smoke run bears out nothing."""
    found = [_lower(analysis), _cheaper(analysis), _entropy(entropy), _router(entropy)]
    if preset == "smoke":
        return [c._replace(verdict="untested", measured=f"{c.measured} (a smoke run)") for c in found]
    return found


def _lower(analysis: Analysis) -> Claim:
    text = "at equal data and compute, both tuned, Muon's loss is below AdamW's at every size"
    gaps = list(analysis.gaps.values())
    if not gaps:
        return Claim("10a", text, "no pair of runs", "untested")
    measured = "AdamW's less Muon's, smallest size first, "
    measured += ", ".join(f"{d.value:.3f} ± {d.margin:.3f}" if np.isfinite(d.error) else f"{d.value:.3f}" for d in gaps)
    if any(d.separated and d.value < 0 for d in gaps):
        return Claim("10a", text, measured, "fail")
    return Claim("10a", text, measured, "pass" if all(d.separated for d in gaps) else "untested")


def _cheaper(analysis: Analysis) -> Claim:
    text, ratio = "for the same loss Muon needs about 52% of AdamW's training FLOPs", analysis.ratio
    if ratio is None:
        return Claim("10b", text, f"no ratio: {analysis.note}", "untested")
    measured = f"{ratio.value:.0%} [{ratio.low:.0%}, {ratio.high:.0%}] at a loss of {analysis.at_loss:.3f}"
    if not ratio.low <= REPORT <= ratio.high:
        return Claim("10b", text, measured, "fail")
    return Claim("10b", text, measured, "pass" if ratio.high < 1 else "untested")


def _entropy(entropy: Mapping[str, tuple[float, float]]) -> Claim:
    text = "SVD entropy is higher under Muon for most matrices, here for more than 70%"
    if not entropy:
        return Claim("12a", text, "no pair of checkpoints", "untested")
    gaps = [muon - adamw for adamw, muon in entropy.values()]
    share = np.mean([gap > 0 for gap in gaps])
    measured = f"for {share:.0%} of {len(gaps)} matrices; mean gap {np.mean(gaps):.3f}"
    return Claim("12a", text, measured, "pass" if share > MOST else "fail")


def _router(entropy: Mapping[str, tuple[float, float]]) -> Claim:
    text = "the gap of the entropy is largest in the router"
    gaps: dict[str, list[float]] = {}
    for name, (adamw, muon) in entropy.items():
        gaps.setdefault(role(name), []).append(muon - adamw)
    if "router_DE" not in gaps:
        return Claim("12b", text, "these models have no router", "untested")
    means = {name: np.mean(found) for name, found in gaps.items()}
    first = max(means, key=means.get)
    measured = f"largest in {first}: {means[first]:.3f}; router: {means['router_DE']:.3f}"
    return Claim("12b", text, measured, "pass" if first == "router_DE" else "fail")


def role(name: str) -> str:
    """The leaf's name in a matrix's: `rung0/seed0/dense/attention/q_DHR/1` -> `q_DHR`."""
    return next(part for part in reversed(name.split("/")) if not part.isdigit())


def entropies(study: Study, analysis: Analysis, trained: Mapping[str, Trained]) -> dict[str, tuple[float, float]]:
    """SVD entropy of every matrix of the tuned runs at their end, under AdamW and under Muon."""
    found = {}
    for rung, seed in analysis.cells:
        names = [Point(rung, rule, analysis.best.get((rung, rule), 0.0), seed).name for rule in RULES]
        if all(name in trained for name in names):
            pair = [matrix_entropy(trained[name].config) for name in names]
            found |= {f"rung{rung}/seed{seed}/{name}": (pair[0][name], pair[1][name]) for name in pair[0]}
    return found


def matrix_entropy(config: RunConfig) -> dict[str, float]:
    """SVD entropy of every matrix, by path and number of the matrix in its leaf, from a run's last checkpoint."""
    with Checkpoints(config.out / "checkpoints") as saved:
        params = saved.restore(config).state.params
    leaves, found = by_path(params), {}
    for path, (n, m) in probes.matrices(params).items():
        entropy = np.asarray(probes.svd_entropy(leaves[path].reshape(-1, n, m)))
        found |= {f"{'/'.join(path)}/{i}": float(x) for i, x in enumerate(entropy)}
    return found


def main(options: Options) -> int:
    """Runs the study; returns the exit status."""
    study = _study.study("muon_vs_adamw", options)
    rows, trained, corpus, errors = train(study)
    analysis, entropy = analyse(rows), {}
    if rows:
        entropy = entropies(study, analysis, trained)
        draw(study, rows, analysis, entropy)
    findings = {
        "runs": rows,
        **as_json(analysis),
        "with_newton_schulz": as_json(analyse(rows, "flops_with_newton_schulz")),
        "without_floor": as_json(analyse(rows, floor=0.0)),
        "svd_entropy": {name: dict(zip(RULES, pair, strict=True)) for name, pair in entropy.items()},
        "compile_share": compile_share(rows),
    }
    return _study.conclude(study, corpus, claims(analysis, entropy, options.preset), findings, errors)


def compile_share(rows: Sequence[dict]) -> float:
    """Of the runs' time, what went into compilation."""
    spent = sum(sum(r["seconds"].values()) for r in rows)
    return sum(r["seconds"]["compile"] for r in rows) / max(spent, 1e-9)


def as_json(analysis: Analysis) -> dict:
    """An analysis for `summary.json`."""
    fit = analysis.fit
    curves = {} if fit is None else {rule: fit.laws[rule] for rule in RULES}
    return {
        "laws": {
            rule: {
                "formula": "floor + scale * (flops / reference) ** -exponent",
                "floor": law.floor,
                "floor_identified": fit.floor_identified,
                "scale": fit.scale(rule)._asdict(),
                "exponent": fit.exponent(rule)._asdict(),
                "reference": law.reference,
            }
            for rule, law in curves.items()
        },
        "at_loss": analysis.at_loss,
        "flops_of_muon_over_adamw": None if analysis.ratio is None else analysis.ratio._asdict() | {"report": REPORT},
        "best_learning_rate": {f"rung{rung}_{rule}": rate for (rung, rule), rate in analysis.best.items()},
        "best_at_edge": analysis.at_edge,
        "gap": {rung: d._asdict() | {"margin": d.margin} for rung, d in analysis.gaps.items()},
        "note": analysis.note,
    }


def draw(study: Study, rows: Sequence[dict], analysis: Analysis, entropy: Mapping[str, tuple[float, float]]) -> None:
    """Writes `figure.png`."""
    budgets = {r["rung"]: float(r["flops"]) for r in rows}
    rules = [
        plots.Rule(
            rule,
            {"adamw": "AdamW", "muon": "Muon"}[rule],
            {"adamw": "C0", "muon": "C3"}[rule],
            analysis.flops[i],
            analysis.loss[i],
            {budgets[rung]: tuning(rows, rung, rule) for rung in budgets},
        )
        for i, rule in enumerate(RULES)
    ]
    title = f"Muon against AdamW, dense models: {study.options.preset}, {study.options.corpus} corpus, {len(rows)} runs"
    values = list(entropy.values())
    plots.plot_rules(study.folder / "figure.png", title, rules, analysis.fit, analysis.at_loss, values, note(analysis, entropy))


def note(analysis: Analysis, entropy: Mapping[str, tuple[float, float]]) -> str:
    """What stands under the figure."""
    lines = [f"{c.number}: {c.text}: {c.measured}." for c in (_lower(analysis), _cheaper(analysis), _entropy(entropy))]
    if analysis.at_edge:
        lines.append(f"The best learning rate is the last of its grid: {', '.join(analysis.at_edge)}.")
    lines.append("Bands and brackets: central 90% of the bootstrap; ±: Student's 95%.")
    return "\n".join(lines)


if __name__ == "__main__":
    _study.command_line(main, "muon_vs_adamw", __doc__)
