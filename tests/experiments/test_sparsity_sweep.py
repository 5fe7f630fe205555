import json
import os
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from configs import ladder
from experiments import _record, sparsity_sweep
from experiments._runner import Outcome, Slot
from experiments.sparsity_sweep import Options, analyse, check_folder, claim_folder, core_time, plan, row, summarize, train_all
from k2jax.config import differences
from k2jax.scaling.flops import training_flops
from k2jax.train.folder import Result

COST = {8: 1.69, 16: 1.39, 32: 1.15, 48: 1.0, 64: 0.94}
CORPUS = SimpleNamespace(tier="builtin", sha256="ab" * 32, tokens=10**7)


def result_of(config, val_loss: float) -> Result:
    return Result(
        steps=config.steps,
        tokens=config.tokens,
        train_loss=val_loss - 0.1,
        val_loss=val_loss,
        val_loss_by_domain={"code": val_loss},
        tokens_per_second=1000.0,
        seconds={"start": 1.0, "step": 8.0, "evaluate": 0.5},
        skipped_steps=0,
        spikes=[],
        warnings=[],
        heads={"total": 1, "clipped": 0, "last_step": None},
        corpus={},
        config={},
    )


def planted_rows(options: Options, noise=0.0) -> list[dict]:
    """Rows of a sweep whose law, in FLOPs without the router, is known."""
    rng = np.random.default_rng(0)
    rows = []
    for run in plan(options):
        flops = run.config.tokens * training_flops(run.config, run.config.seq_len).without_router
        loss = 4.0 * (flops / COST[run.sparsity] / 1e11) ** -0.1 + noise * rng.standard_normal()
        rows.append(row(run, Outcome(run.config, result_of(run.config, float(loss)), "", 10.0, 9.5)))
    return rows


def test_sparsities_of_a_seed_see_the_same_batches_from_the_same_seed():
    runs = plan(Options(preset="default", seeds=2))
    assert len(runs) == len({r.config.name for r in runs}) == len({r.config.out for r in runs}) == 3 * 5 * 2
    by_cell = {}
    for r in runs:
        by_cell.setdefault((r.rung, r.seed), []).append(r.config)
    for (_, seed), configs in by_cell.items():
        assert {c.data_seed for c in configs} == {c.seed for c in configs} == {seed}
        for other in configs[1:]:
            apart = {d.split(":")[0] for d in differences(configs[0], other)}
            assert apart == {"name", "out", "model.moe.n_experts"}


def test_options_reach_the_runs(tmp_path):
    options = Options(preset="smoke", out=tmp_path / "x", corpus="pip", cache=tmp_path / "c", math=0.0)
    for r in plan(options):
        assert r.config.data.mixture == {"web": 0.35, "code": 0.35, "math": 0.0, "knowledge": 0.15}
        assert r.config.out.parent == tmp_path / "x" / "runs"
        assert (r.config.data.corpus, r.config.data.cache) == ("pip", tmp_path / "c")
    assert len(plan(options)) == 3 * 2 * ladder.SEEDS["smoke"]
    with pytest.raises(ValueError, match="--seeds must be at least 1; got 0"):
        Options(seeds=0)


def test_a_folder_of_something_else_is_refused(tmp_path):
    options = Options(preset="smoke", out=tmp_path / "sweep")
    check_folder(options)
    assert not options.folder.exists()  # looking leaves nothing
    claim_folder(options, "sha")
    check_folder(options, "sha")
    with pytest.raises(ValueError, match="holds another sweep: preset 'smoke', not 'default'"):
        check_folder(replace(options, preset="default"))
    with pytest.raises(ValueError, match="holds another sweep: corpus 'builtin', not 'pip'"):
        check_folder(replace(options, corpus="pip"))
    with pytest.raises(ValueError, match="corpus_sha256 'sha', not 'other'"):
        claim_folder(options, "other")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("")
    with pytest.raises(ValueError, match="not empty and is no folder of this experiment"):
        check_folder(replace(options, out=tmp_path / "thesis"))
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_analysis_finds_the_planted_ratios():
    analysis = analyse(planted_rows(Options(preset="default", seeds=2), noise=1e-4), "flops_without_router")
    assert {s: r.value for s, r in analysis.ratios.items()} == pytest.approx(COST, rel=0.02)
    assert [d.separated for d in analysis.top] == [True] * 4
    assert analysis.note == ""


def test_router_flops_lower_the_advantage_of_many_experts():
    rows = planted_rows(Options(preset="default"))
    without, with_router = analyse(rows, "flops_without_router"), analyse(rows, "flops")
    assert with_router.ratios[8].value < without.ratios[8].value


def test_failed_runs_leave_an_analysis_of_the_others():
    rows = planted_rows(Options(preset="default"))
    some = [r for r in rows if not (r["sparsity"] == 8 and r["rung"] == 2)]
    analysis = analyse(some, "flops")
    assert np.isnan(analysis.loss[0, 2])
    assert (analysis.ratios, analysis.fit) == ({}, None)
    assert analysis.note == "a curve needs at least 3 budgets; sparsity 8 has 2"


def test_summary_has_the_promised_keys_and_is_plain_json():
    options = Options(preset="default")
    rows = planted_rows(options, noise=0.01)
    without, with_router = analyse(rows, "flops_without_router"), analyse(rows, "flops")
    clock = core_time(rows, wall=80.0, prepare=5.0, n_slots=2)
    summary = json.loads(json.dumps(summarize(options, CORPUS, rows, without, with_router, clock), allow_nan=False))
    assert set(summary) >= {
        "preset",
        "corpus",
        "versions",
        "machine",
        "runs",
        "laws",
        "at_loss",
        "flops_ratio_to_48",
    }
    assert set(summary["corpus"]) == {"tier", "sha256", "tokens"}
    promised = {"sparsity", "active_params", "total_params", "flops", "tokens", "seed", "train_loss", "val_loss", "seconds"}
    assert all(promised | {"tokens_per_second"} <= set(r) for r in summary["runs"])
    assert set(summary["laws"]) == set(summary["flops_ratio_to_48"]) == {"8", "16", "32", "48", "64"}
    eight = summary["flops_ratio_to_48"]["8"]
    assert eight["low"] <= eight["ratio"] <= eight["high"] and eight["report"] == 1.69
    assert summary["flops_ratio_to_48"]["48"]["ratio"] == 1 and summary["flops_ratio_to_48"]["64"]["report"] is None
    assert summary["laws"]["8"]["exponent"]["low"] <= summary["laws"]["8"]["exponent"]["value"]
    assert summary["flops_axis"] == "without_router" and set(summary["with_router"]) >= {"laws", "flops_ratio_to_48"}


def test_core_time_adds_up():
    rows = planted_rows(Options(preset="default"))  # 15 runs of 9.5 s in the loop and 10 s of process
    clock = core_time(rows, wall=80.0, prepare=5.0, n_slots=2)
    parts = clock["core_seconds"]
    assert sum(parts.values()) == pytest.approx(2 * 85.0)
    assert (parts["step"], parts["process"], parts["idle"], parts["corpus"]) == (15 * 8.0, 15 * 0.5, 10.0, 10.0)
    assert clock["training_share"] == pytest.approx(15 * 8.0 / 170.0)


def test_rows_of_finished_runs_are_kept_and_a_torn_line_is_not(tmp_path, monkeypatch):
    options = Options(preset="smoke", out=tmp_path / "sweep")
    claim_folder(options, "sha")
    runs = plan(options)[:3]
    seconds = {r.config.name: 1.0 for r in runs}
    outcomes = [Outcome(r.config, result_of(r.config, 3.0), "", 10.0, 9.0) for r in runs[:2]]
    outcomes.append(Outcome(runs[2].config, None, "run 2 ended with exit code 3", 1.0, 1.0))
    monkeypatch.setattr(sparsity_sweep._runner, "run_all", lambda *_, **__: (o for o in outcomes))
    text = StringIO()
    rows, errors = train_all(options, runs, seconds, Console(file=text, width=200))
    assert [r["name"] for r in rows] == [r.config.name for r in runs[:2]]
    assert errors == ["run 2 ended with exit code 3"] and errors[0] in text.getvalue()

    path = options.folder / "runs.jsonl"
    path.write_text(path.read_text() + '{"name": "torn')
    again = [replaced._replace(wall_seconds=0.0) if replaced.result else replaced for replaced in outcomes]
    monkeypatch.setattr(sparsity_sweep._runner, "run_all", lambda *_, **__: (o for o in again))
    rows, _ = train_all(options, runs, seconds, Console(file=StringIO()))
    assert [r["wall_seconds"] for r in rows] == [10.0, 10.0]  # as first measured
    assert _record.read_lines(path) == rows
    assert path.read_text().count("\n") == 2


def micro(monkeypatch):
    """Models so small that a sweep of them takes seconds."""
    rungs = tuple(
        ladder.Rung(16, 2, n_dense=1, n_heads=1, d_expert=8, seq_len=32, batch=2, steps=n, vocab=300) for n in (2, 4, 8)
    )
    monkeypatch.setattr(ladder, "RUNGS", {"smoke": rungs})
    monkeypatch.setattr(ladder, "VALIDATION_TOKENS", 2048)


@pytest.fixture
def corpus(tmp_path):
    """A folder of text, so that no time goes into the builtin corpus."""
    folder = tmp_path / "text"
    rng = np.random.default_rng(0)
    words = np.array(["the", "model", "routes", "tokens", "to", "experts", "and", "learns", "from", "text"])
    for domain in ("web", "code"):
        (folder / domain).mkdir(parents=True)
        for i in range(60):
            (folder / domain / f"{i}.txt").write_text(" ".join(rng.choice(words, 150)))
    return folder


@pytest.mark.slow
def test_a_whole_sweep_trains_reads_what_is_there_and_draws(tmp_path, corpus, monkeypatch, capsys):
    micro(monkeypatch)
    # Compiling is most of such a sweep, so it is left rough.
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    slots = [Slot(core, environment) for core in sorted(os.sched_getaffinity(0))[:2]]
    monkeypatch.setattr(sparsity_sweep._runner, "find_slots", lambda: slots)
    data = {"corpus": str(corpus), "cache": tmp_path / "cache", "math": 0.0, "knowledge": 0.0}
    options = Options(preset="smoke", out=tmp_path / "sweep", **data)
    assert sparsity_sweep.main(options) == 0
    summary = json.loads((options.folder / "summary.json").read_text())
    assert len(summary["runs"]) == len(_record.read_lines(options.folder / "runs.jsonl")) == 6
    assert summary["corpus"]["tokens"] > 1000
    assert all(0 < r["val_loss"] < 7 and r["cpu_seconds"] > 0 for r in summary["runs"])
    assert (options.folder / "figure.png").stat().st_size > 10_000
    assert "sparsity" in capsys.readouterr().out

    (options.folder / "figure.png").unlink()
    assert sparsity_sweep.main(options) == 0  # reads
    again = json.loads((options.folder / "summary.json").read_text())
    assert again["runs"] == summary["runs"]
    assert (options.folder / "figure.png").exists()
