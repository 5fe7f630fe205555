import json
from dataclasses import replace

import numpy as np
import pytest

from configs import stress
from experiments import clip_harmless
from experiments._study import Options
from experiments.clip_harmless import Pair, claims, draw, findings, measure, plan
from k2jax.config import differences

BASE = stress.healthy("default")
LOGITS = [(20.0, 5.0, 5.0, 5.0)] * 20


@pytest.fixture
def pairs(trained):
    """Pairs of given losses, the clip firing in the first 5 of 20 steps."""

    def make(muon, gaps, ever=0.5, last=5):
        clipped = {"clipped": [3 if i < last else 0 for i in range(20)], "ever": [ever] * 20}
        return [
            Pair(trained(BASE, LOGITS, loss), trained(BASE, LOGITS, loss + gap, **clipped))
            for loss, gap in zip(muon, gaps, strict=True)
        ]

    return make


def verdicts(pairs):
    return {c.number: c.verdict for c in claims(pairs)}


def test_the_runs_of_a_seed_differ_in_the_rule_alone():
    runs = plan(Options(preset="default", seeds=3))
    assert len(runs) == 6
    for seed in range(3):
        muon, clipped = runs["muon", seed], runs["muonclip", seed]
        assert [d.split(":")[0] for d in differences(muon, clipped)] == ["optim.rule"]
        assert muon.seed == muon.data_seed == clipped.seed == clipped.data_seed == seed
    assert runs["muon", 0].optim.weight_decay == 0.1  # a healthy run, not one under stress


def test_the_gap_is_paired_and_the_spread_is_that_of_the_seeds(pairs):
    gap = measure(pairs([3.0, 3.2, 3.1], [0.01, 0.03, 0.02]))
    assert gap.mean == pytest.approx(0.02)
    assert gap.error == pytest.approx(0.01 / np.sqrt(3))
    assert (gap.low, gap.high) == pytest.approx((0.02 - 4.3027 * gap.error, 0.02 + 4.3027 * gap.error), rel=1e-4)  # 2 degrees
    assert gap.spread == pytest.approx(0.1)


def test_each_verdict_is_reached(pairs):
    assert verdicts(pairs([3.0, 3.2, 3.1], [0.01, -0.03, 0.02])) == {"18": "pass", "17": "pass"}
    assert verdicts(pairs([3.0, 3.2, 3.1], [0.2, 0.1, 0.3])) == {"18": "fail", "17": "pass"}
    assert verdicts(pairs([3.0, 3.2, 3.1], [-0.2, -0.1, -0.3]))["18"] == "fail"  # a gain is a difference too
    assert verdicts(pairs([3.0, 3.2, 3.1], [0.01, 0.03, 0.02], last=20))["17"] == "fail"
    assert verdicts(pairs([3.0, 3.2], [0.0, 0.0], ever=0.0, last=0)) == {"18": "untested", "17": "untested"}
    assert verdicts(pairs([3.0], [0.0])) == {"18": "untested", "17": "pass"}
    assert verdicts([]) == {"18": "untested", "17": "untested"}


def test_a_clip_that_fired_in_some_seeds_alone_tests_nothing(pairs):
    some = pairs([3.0, 3.2], [0.0, 0.0])[:1] + pairs([3.0, 3.2], [0.0, 0.0], ever=0.0, last=0)[1:]
    assert verdicts(some) == {"18": "untested", "17": "untested"}


def test_the_figure_draws_one_pair_and_many(pairs):
    fired = np.arange(32).reshape(4, 8)
    lines = [len(draw(pairs([3.0, 3.2, 3.1][:n], [0.01] * n), fired, "a test").axes[0].lines) for n in (1, 3)]
    assert lines == [2, 6]  # a curve a run
    assert json.loads(json.dumps(findings([])))["gap"] is None


@pytest.mark.slow
def test_pairs_are_trained_measured_and_drawn(tmp_path, texts, in_process, monkeypatch, capsys):
    size = stress.Size(16, 2, 2, 32, 4, steps=12, stress=0.1, tau=0.5, healthy=0.1, healthy_steps=12, low_tau=0.05)
    monkeypatch.setattr(stress, "SIZES", {"smoke": size})
    everything = plan

    def small(options):
        one = {key: replace(config, eval_batches=1) for key, config in everything(options).items()}
        return {key: replace(config, mesh=replace(config.mesh, data=1)) for key, config in one.items()}

    monkeypatch.setattr(clip_harmless, "plan", small)
    options = Options(preset="smoke", out=tmp_path / "out", corpus=str(texts), cache=tmp_path / "cache", seeds=2)
    assert clip_harmless.main(options) == 0
    summary = json.loads((options.out / "summary.json").read_text())
    assert summary["claims"][0]["verdict"] in ("pass", "fail")
    assert summary["gap"]["mean"] == pytest.approx(np.mean([p["gap"] for p in summary["pairs"]]))
    for pair in summary["pairs"]:
        assert pair["gap"] == pytest.approx(pair["val_loss"]["muonclip"] - pair["val_loss"]["muon"])
        assert pair["heads_ever_clipped"] > 0 and pair["gap"] != 0  # it fired and changed something
    assert (options.out / "figure.png").stat().st_size > 10_000
    assert "mean gap" in capsys.readouterr().out
    (options.out / "figure.png").unlink()
    assert clip_harmless.main(options) == 0  # reads
    assert json.loads((options.out / "summary.json").read_text())["pairs"] == summary["pairs"]
