import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from configs import llama
from experiments import _study, muon_vs_adamw
from experiments._study import Options
from experiments.muon_vs_adamw import (
    RATES,
    RULES,
    Point,
    analyse,
    claims,
    compile_share,
    config_of,
    newton_schulz_flops,
    next_rate,
    role,
    row,
    wanted,
)
from k2jax.config import differences
from k2jax.scaling.flops import training_flops

BEST = {"adamw": 5e-3, "muon": 1e-2}
ENTROPY = {f"rung0/seed0/dense/attention/q_DHR/{i}": (0.8, 0.9) for i in range(8)}


def planted(ratio=0.52, noise=0.0, best=BEST, preset="default", n_seeds=2):
    """Rows as a whole study would have them, of laws whose FLOPs at equal loss are `ratio` apart."""
    rng, rows = np.random.default_rng(0), []
    while new := [p for p in wanted(preset, n_seeds, rows) if p.name not in {r["name"] for r in rows}]:
        for point in new:
            config = llama.config(point.rung, preset, point.rule)
            flops = config.tokens * training_flops(config, config.seq_len).total
            better = ratio if point.rule == "muon" else 1.0
            loss = 3.4 * (flops / better / 2e11) ** -0.1 + 0.05 * np.log2(point.rate / best[point.rule]) ** 2
            loss += noise * rng.standard_normal()
            rows.append({"name": point.name, **point._asdict(), "flops": flops, "loss": float(loss)})
    return rows


def verdicts(rows, entropy=ENTROPY, preset="default"):
    return {c.number: c.verdict for c in claims(analyse(rows), entropy, preset)}


def test_a_grid_goes_on_beyond_an_edge_and_ends_there_or_at_its_limit():
    assert {(p.rung, p.rule, p.rate) for p in wanted("default", 3, [])} == {
        (rung, rule, rate) for rung in range(3) for rule in RULES for rate in RATES["default"]
    }
    rates = {key: sorted({r["rate"] for r in planted() if r["rule"] == key}) for key in RULES}
    assert rates == {"adamw": [2.5e-3, 5e-3, 1e-2, 2e-2], "muon": [5e-3, 1e-2, 2e-2]}
    far = planted(best={"adamw": 1e-4, "muon": 1e-2})
    assert min(r["rate"] for r in far) == pytest.approx(5e-3 / 2**3)
    assert analyse(far).at_edge == [f"size {i} adamw: 0.000625" for i in range(3)]
    assert analyse(planted()).at_edge == []
    assert next_rate(2e-2, [5e-3, 1e-2, 2e-2]) == 4e-2 and next_rate(1e-2, [5e-3, 1e-2, 2e-2]) is None


def test_only_a_best_rate_gets_more_seeds():
    more = {(r["rule"], r["rate"]) for r in planted(n_seeds=3) if r["seed"] == 2}
    assert more == set(BEST.items())
    diverged = [r | {"loss": np.inf if r["rate"] == 1e-2 and r["rule"] == "muon" else r["loss"]} for r in planted()]
    assert analyse(diverged).best[0, "muon"] == 5e-3


def test_runs_of_a_size_and_seed_differ_in_rule_and_learning_rate_alone(tmp_path):
    study = _study.study("muon_vs_adamw", Options(preset="default", out=tmp_path))
    adamw, muon = (config_of(study, Point(1, rule, rate, 2)) for rule, rate in BEST.items())
    apart = {d.split(":")[0] for d in differences(adamw, muon)}
    assert apart == {"name", "out", "optim.rule", "optim.learning_rate"}
    assert (muon.seed, muon.data_seed, muon.model.n_moe) == (2, 2, 0)
    assert newton_schulz_flops(muon) > 0 == newton_schulz_flops(adamw)


@pytest.mark.parametrize("ratio", [0.52, 0.8])
def test_a_planted_ratio_is_found(ratio):
    found = analyse(planted(ratio, noise=1e-4))
    assert found.ratio.value == pytest.approx(ratio, rel=0.02)
    assert found.fit.exponent("muon").value > 0
    assert [d.separated and d.value > 0 for d in found.gaps.values()] == [True] * 3
    without = analyse(planted(ratio, noise=1e-4), floor=0.0)
    assert without.fit.laws["adamw"].exponent == pytest.approx(0.1, rel=0.02)


def test_each_verdict_is_reached():
    all_pass = {"10a": "pass", "10b": "pass", "12a": "pass", "12b": "untested"}
    assert verdicts(planted(0.52, noise=1e-3)) == all_pass
    assert verdicts(planted(0.9, noise=1e-4))["10b"] == "fail"
    assert verdicts(planted(1.2, noise=1e-4))["10a"] == "fail"
    noisy = verdicts(planted(0.8, noise=0.3))
    assert (noisy["10a"], noisy["10b"]) == ("untested", "untested")
    few = [r for r in planted() if r["rung"] < 2]
    assert verdicts(few)["10b"] == "untested"  # two budgets fit any curve
    assert verdicts([], {}) == dict.fromkeys(("10a", "10b", "12a", "12b"), "untested")
    assert verdicts(planted(noise=1e-3), preset="smoke") == dict.fromkeys(("10a", "10b", "12a", "12b"), "untested")


def test_the_entropy_of_most_matrices_and_of_the_router_decides():
    lower = {name.replace("q_", "k_"): (0.9, 0.8) for name in list(ENTROPY)[:4]}
    assert verdicts(planted(), ENTROPY | lower)["12a"] == "fail"  # 8 of 12
    name = "rung0/seed0/moe/ffn/router_DE/0"
    assert role(name) == "router_DE"
    assert verdicts(planted(), ENTROPY | {name: (0.5, 0.9)})["12b"] == "pass"
    assert verdicts(planted(), ENTROPY | {name: (0.9, 0.91)})["12b"] == "fail"


def test_a_row_counts_newton_schulz_apart_and_has_an_infinite_loss_if_the_run_diverged():
    config = llama.config(0, "default", "muon")
    result = SimpleNamespace(val_loss=float("nan"), train_loss=3.0, seconds={"compile": 3.0, "step": 1.0})
    found = row(Point(0, "muon", 1e-2, 0), _study.Trained(config, result, []))
    assert found["flops_with_newton_schulz"] - found["flops"] == config.steps * newton_schulz_flops(config)
    assert 0.02 < found["flops_with_newton_schulz"] / found["flops"] - 1 < 0.3
    assert found["loss"] == np.inf
    assert compile_share([found]) == 0.75


@pytest.mark.slow
def test_a_whole_study_trains_tunes_and_draws(tmp_path, texts, in_process, monkeypatch, capsys):
    rungs = tuple(llama.Rung(16, 1, steps) for steps in (4, 8, 16))
    monkeypatch.setattr(llama, "RUNGS", {"smoke": rungs})
    monkeypatch.setattr(muon_vs_adamw, "RATES", {"smoke": (2e-2,)})
    whole = llama.config

    def small(*args):
        config = whole(*args)
        return replace(config, batch=4, seq_len=32, eval_batches=1, mesh=replace(config.mesh, data=1))

    monkeypatch.setattr(llama, "config", small)
    options = Options(preset="smoke", out=tmp_path / "out", corpus=str(texts), cache=tmp_path / "cache")
    assert muon_vs_adamw.main(options) == 0
    summary = json.loads((options.out / "summary.json").read_text())
    assert {(r["rung"], r["rule"]) for r in summary["runs"]} == {(i, rule) for i in range(3) for rule in RULES}
    assert all(0 < r["loss"] < 7 for r in summary["runs"])
    assert {c["number"]: c["verdict"] for c in summary["claims"]} == dict.fromkeys(("10a", "10b", "12a", "12b"), "untested")
    assert len(summary["svd_entropy"]) == 3 * 7  # sizes, and matrices of a dense layer
    assert all(0 < pair[rule] <= 1 for pair in summary["svd_entropy"].values() for rule in RULES)
    assert (options.out / "figure.png").stat().st_size > 10_000
    assert "10b" in capsys.readouterr().out
