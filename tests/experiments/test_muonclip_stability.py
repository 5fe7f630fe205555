import json
from dataclasses import replace

import pytest

from configs import stress
from experiments import muonclip_stability
from experiments._heads import ByHand
from experiments._study import Options
from experiments.muonclip_stability import ARMS, claims, collateral, draw, findings, plan
from k2jax.config import differences

BASE = stress.config("default")  # 4 layers of 8 heads, tau = 100
GROWING = [(10 * 1.1**i, 5.0, 5.0, 5.0) for i in range(60)]  # past tau in step 26, to 2767
SLOWER = [(10 * 1.05**i, 5.0, 5.0, 5.0) for i in range(60)]  # past tau in step 49
CALM = [(9.0, 5.0, 5.0, 5.0)] * 60
HELD = [(min(10 * 1.1**i, 110.0), 5.0, 5.0, 5.0) for i in range(60)]  # at 1.1 tau from step 27 on
FIRED = [1 if x[0] > 100 else 0 for x in HELD]
EXACT = ByHand(heads=32, above=4, largest=2000.0, error=1e-6, together=101.0, untouched=28)


@pytest.fixture
def runs(trained):
    """Runs that bear every claim out."""
    one_head = [1 / 32 if any(FIRED[: i + 1]) else 0.0 for i in range(60)]
    ending = FIRED[:30] + [0] * 30
    held = {"clipped": ending, "ever": one_head}
    return {
        "adamw": [trained(BASE, SLOWER, val_loss=4.0)],
        "muon": [trained(BASE, GROWING, val_loss=3.5)],
        "softcap": [trained(BASE, GROWING)],
        "naive": [trained(BASE, HELD, clipped=FIRED, ever=one_head)],
        "muonclip": [trained(BASE, HELD, **held)],
        "adamw_low": [trained(BASE, CALM)],
        "muon_low": [trained(BASE, SLOWER)],
    }


def verdicts(runs, by_hand=EXACT):
    return {c.number: c.verdict for c in claims(runs, by_hand)}


def test_arms_see_the_same_batches_and_differ_in_the_rule_alone():
    runs = plan(Options(preset="default", seeds=2))
    change = {
        "adamw": {"optim.rule"},
        "muon": {"optim.rule"},
        "softcap": {"optim.rule", "model.attention.soft_cap"},
        "naive": {"optim.qk_scope"},
        "muonclip": set(),
        "adamw_low": {"optim.rule", "optim.learning_rate"},
        "muon_low": {"optim.rule", "optim.learning_rate"},
    }
    assert set(runs) == {(arm, seed) for arm in change for seed in (0, 1)}
    for (arm, seed), config in runs.items():
        assert config.seed == config.data_seed == seed
        assert {d.split(":")[0] for d in differences(runs["muonclip", seed], config)} == change[arm]
    assert runs["softcap", 0].model.attention.soft_cap == runs["softcap", 0].optim.qk_tau == 100
    assert runs["muon_low", 0].optim.learning_rate == runs["adamw_low", 0].optim.learning_rate < BASE.optim.learning_rate
    assert runs["muonclip", 0].optim.weight_decay == 0


def test_every_claim_can_pass(runs):
    found = verdicts(runs)
    assert list(found) == ["13a", "13b", "14", "15a", "15b", "16a", "16b", "17", "19", "34"]
    assert set(found.values()) == {"pass"}


def test_every_claim_can_fail(runs, trained):
    always = [1.0] * 60
    assert verdicts(runs | {"adamw": [trained(BASE, [(200.0, 1, 1, 1)] * 60)]})["13a"] == "fail"
    assert verdicts(runs | {"adamw_low": [trained(BASE, GROWING)]})["13b"] == "fail"
    assert verdicts(runs | {"muon": [trained(BASE, SLOWER)]})["14"] == "fail"
    assert verdicts(runs, EXACT._replace(error=2e-5))["15a"] == "fail"
    loose = [(1.25 * x[0], *x[1:]) for x in HELD]
    assert verdicts(runs | {"muonclip": [trained(BASE, loose, clipped=FIRED, ever=always)]})["15b"] == "fail"
    assert verdicts(runs, EXACT._replace(untouched=27))["16a"] == "fail"
    clipped = verdicts(runs | {"muonclip": [trained(BASE, HELD, clipped=FIRED, ever=always)]})
    assert (clipped["16b"], clipped["17"]) == ("fail", "fail")
    assert verdicts(runs | {"muonclip": [trained(BASE, HELD, clipped=FIRED, spikes=[{"start": 9}])]})["19"] == "fail"
    assert verdicts(runs | {"muonclip": [trained(BASE, HELD, clipped=FIRED, skipped=1)]})["19"] == "fail"
    settling = [(min(x[0], 300.0), *x[1:]) for x in GROWING]
    assert verdicts(runs | {"softcap": [trained(BASE, settling)]})["34"] == "fail"


def test_claims_of_which_nothing_was_seen_are_untested(runs, trained):
    nothing = verdicts({arm: [] for arm in runs}, None)
    assert set(nothing.values()) == {"untested"}
    found = verdicts({arm: [trained(BASE, CALM)] for arm in ARMS} | {"adamw_low": [], "muon_low": []}, EXACT._replace(above=0))
    assert {n for n, verdict in found.items() if verdict == "untested"} == {
        "13a",
        "13b",
        "15a",
        "15b",
        "16a",
        "16b",
        "17",
        "34",
    }
    assert (found["14"], found["19"]) == ("fail", "pass")


def test_the_worst_seed_decides(runs, trained):
    two = runs | {"muon": [*runs["muon"], trained(BASE, SLOWER)]}
    assert verdicts(two)["14"] == "fail"
    assert "27.7, 1.8 tau" in next(c.measured for c in claims(two, EXACT) if c.number == "14")


def test_collateral_counts_heads_at_or_below_tau_that_the_naive_clip_scales(trained):
    hot = [(5.0, 120.0, 5.0, 130.0), (5.0, 120.0, 5.0, 5.0), (1.0, 1.0, 1.0, 1.0)]
    run = trained(BASE, hot, clipped=[3, 2, 0])
    assert collateral(run) == pytest.approx(1 - 5 / 24)
    assert collateral(trained(BASE, CALM)) is None


def test_a_logit_that_is_not_finite_is_no_pass(runs, trained):
    broken = [*HELD[:50], (None, 5.0, 5.0, 5.0), *HELD[51:]]
    assert verdicts(runs | {"muonclip": [trained(BASE, broken, clipped=FIRED)]})["15b"] == "fail"


def test_the_figure_draws_what_there_is(runs):
    for found in (runs, runs | {"naive": [], "adamw": [], "adamw_low": []}):
        counts = [len(ax.get_legend_handles_labels()[1]) for ax in draw(found, "a test").axes]
        arms = sum(bool(found[arm]) for arm in ARMS)
        assert counts == [arms, 3 if found["naive"] else 2, arms, 2 if found["adamw_low"] else 1]
    json.dumps(findings(runs, EXACT))


@pytest.mark.slow
def test_a_run_is_trained_clipped_by_hand_drawn_and_read_again(tmp_path, texts, in_process, monkeypatch, capsys):
    size = stress.Size(16, 2, 2, 32, 4, steps=12, stress=0.1, tau=0.5, healthy=0.1, healthy_steps=12, low_tau=0.5)
    monkeypatch.setattr(stress, "SIZES", {"smoke": size})
    everything = plan

    def muon_alone(options):
        config = everything(options)["muon", 0]
        return {("muon", 0): replace(config, eval_batches=1, mesh=replace(config.mesh, data=1))}

    monkeypatch.setattr(muonclip_stability, "plan", muon_alone)
    options = Options(preset="smoke", out=tmp_path / "out", corpus=str(texts), cache=tmp_path / "cache")
    assert muonclip_stability.main(options) == 0
    summary = json.loads((options.out / "summary.json").read_text())
    found = {c["number"]: c["verdict"] for c in summary["claims"]}
    assert (found["15a"], found["13a"], found["15b"]) == ("pass", "untested", "untested")
    hand, (muon,) = summary["clip_by_hand"], summary["runs"]
    assert 0 < hand["above"] < hand["heads"] == 4  # both kinds of heads
    assert hand["untouched"] == hand["heads"] - hand["above"]
    assert muon["largest_logit"] > size.tau and hand["together"] < hand["largest"]
    assert (options.out / "figure.png").stat().st_size > 10_000
    assert "min(S, tau)" in capsys.readouterr().out
    assert muonclip_stability.main(options) == 0  # reads
    assert json.loads((options.out / "summary.json").read_text())["runs"] == summary["runs"]
