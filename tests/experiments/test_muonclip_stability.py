import json
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from configs import stress
from experiments import _heads, muonclip_stability
from experiments._heads import ByHand
from experiments._study import Options
from experiments.muonclip_stability import ARMS, FRACTIONS, Runs, claims, collateral, draw, findings, plan
from k2jax.config import differences
from k2jax.model import transformer

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
    arms = {
        "adamw": [trained(BASE, SLOWER, val_loss=4.0)],
        "muon": [trained(BASE, GROWING, val_loss=3.5)],
        "softcap": [trained(BASE, GROWING)],
        "naive": [trained(BASE, HELD, clipped=FIRED, ever=one_head)],
        "muonclip": [trained(BASE, HELD, **held)],
    }
    rates = {
        ("adamw", 1.0): arms["adamw"],
        ("adamw", 0.1): [trained(BASE, CALM, val_loss=3.0)],
        ("muon", 1.0): arms["muon"],
        ("muon", 0.1): [trained(BASE, SLOWER, val_loss=2.9)],
    }
    return Runs(arms, rates)


def verdicts(runs, by_hand=EXACT):
    return {c.number: c.verdict for c in claims(runs, by_hand)}


def with_arm(runs, **arms):
    return runs._replace(arms=runs.arms | arms)


def test_arms_see_the_same_batches_and_differ_in_the_rule_alone():
    runs = plan(Options(preset="default", seeds=2))
    assert len(runs) == 2 * (len(ARMS) + 2 * (len(FRACTIONS["default"]) - 1))
    for (arm, fraction, seed), config in runs.items():
        assert config.seed == config.data_seed == seed
        apart = {d.split(":")[0] for d in differences(runs["muonclip", 1.0, seed], config)}
        rate = {"optim.learning_rate"} if fraction != 1 else set()
        change = {
            "adamw": {"optim.rule"},
            "muon": {"optim.rule"},
            "softcap": {"optim.rule", "model.attention.soft_cap"},
            "naive": {"optim.qk_scope"},
            "muonclip": set(),
        }
        assert apart == change[arm] | rate
    assert runs["softcap", 1.0, 0].model.attention.soft_cap == runs["softcap", 1.0, 0].optim.qk_tau == 100
    assert runs["muonclip", 1.0, 0].optim.weight_decay == 0


def test_every_claim_can_pass(runs):
    found = verdicts(runs)
    assert list(found) == ["13a", "13b", "14", "15a", "15b", "16a", "16b", "17", "19", "34"]
    assert set(found.values()) == {"pass"}


def test_every_claim_can_fail(runs, trained):
    always = [1.0] * 60
    assert verdicts(with_arm(runs, adamw=[trained(BASE, [(200.0, 1, 1, 1)] * 60)]))["13a"] == "fail"
    at_best = runs.rates | {("adamw", 0.1): [trained(BASE, GROWING, val_loss=3.0)]}
    assert verdicts(runs._replace(rates=at_best))["13b"] == "fail"
    assert verdicts(with_arm(runs, muon=[trained(BASE, SLOWER)]))["14"] == "fail"
    assert verdicts(runs, EXACT._replace(error=2e-5))["15a"] == "fail"
    loose = [(1.25 * x[0], *x[1:]) for x in HELD]
    assert verdicts(with_arm(runs, muonclip=[trained(BASE, loose, clipped=FIRED, ever=always)]))["15b"] == "fail"
    assert verdicts(runs, EXACT._replace(untouched=27))["16a"] == "fail"
    clipped = with_arm(runs, muonclip=[trained(BASE, HELD, clipped=FIRED, ever=always)])
    assert (verdicts(clipped)["16b"], verdicts(clipped)["17"]) == ("fail", "fail")
    assert verdicts(with_arm(runs, muonclip=[trained(BASE, HELD, clipped=FIRED, spikes=[{"start": 9}])]))["19"] == "fail"
    assert verdicts(with_arm(runs, muonclip=[trained(BASE, HELD, clipped=FIRED, skipped=1)]))["19"] == "fail"
    settling = [(min(x[0], 300.0), *x[1:]) for x in GROWING]
    assert verdicts(with_arm(runs, softcap=[trained(BASE, settling)]))["34"] == "fail"


def test_claims_of_which_nothing_was_seen_are_untested(runs, trained):
    nothing = verdicts(Runs({arm: [] for arm in ARMS}, {}), None)
    assert set(nothing.values()) == {"untested"}
    calm = {arm: [trained(BASE, CALM)] for arm in ARMS}
    found = verdicts(Runs(calm, {("adamw", 1.0): calm["adamw"], ("muon", 1.0): calm["muon"]}), EXACT._replace(above=0))
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
    two = with_arm(runs, muon=[*runs.arms["muon"], trained(BASE, SLOWER)])
    assert verdicts(two)["14"] == "fail"
    assert "27.7, 1.8 tau" in next(c.measured for c in claims(two, EXACT) if c.number == "14")


def test_collateral_counts_heads_at_or_below_tau_that_the_naive_clip_scales(trained):
    hot = [(5.0, 120.0, 5.0, 130.0), (5.0, 120.0, 5.0, 5.0), (1.0, 1.0, 1.0, 1.0)]
    run = trained(BASE, hot, clipped=[3, 2, 0])
    assert _heads.scaled(run.rows, 100.0, "layer").tolist() == [16, 8, 0]
    assert _heads.scaled(run.rows, 100.0, "head").tolist() == [3, 2, 0]
    assert collateral(run) == pytest.approx(1 - 5 / 24)
    assert collateral(trained(BASE, CALM)) is None


def test_a_logit_that_is_not_finite_is_no_pass(runs, trained):
    broken = [*HELD[:50], (None, 5.0, 5.0, 5.0), *HELD[51:]]
    assert np.isnan(_heads.largest(trained(BASE, broken).rows)[50])
    assert verdicts(with_arm(runs, muonclip=[trained(BASE, broken, clipped=FIRED)]))["15b"] == "fail"


def test_the_figure_draws_what_there_is(runs):
    for found in (runs, with_arm(runs, naive=[], adamw=[])):
        logits, heads, losses, rates = (len(ax.get_legend_handles_labels()[1]) for ax in draw(found, "a test").axes)
        arms = sum(map(bool, found.arms.values()))
        assert (logits, losses, rates) == (arms, arms, 2)
        assert heads == (3 if found.arms["naive"] else 2)
    json.dumps(findings(runs, EXACT))


@pytest.mark.slow
def test_a_run_is_trained_clipped_by_hand_drawn_and_read_again(tmp_path, texts, in_process, monkeypatch, capsys):
    size = stress.Size(16, 2, 2, 32, 4, steps=12, stress=0.1, tau=0.5, healthy=0.1, healthy_steps=12, low_tau=0.5)
    monkeypatch.setattr(stress, "SIZES", {"smoke": size})
    everything = plan

    def muon_alone(options):
        config = everything(options)["muon", 1.0, 0]
        return {("muon", 1.0, 0): replace(config, eval_batches=1, mesh=replace(config.mesh, data=1))}

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


def test_a_clip_that_misses_tau_is_seen(trained, monkeypatch):
    """`clip_by_hand` measures: with a clip that scales too little or touches other heads its numbers say so."""
    config = replace(stress.config("smoke"), model=replace(stress.config("smoke").model, init_std=0.5))
    batch = {name: np.ones((2, 9), np.int32) for name in ("tokens_BT", "segments_BT")}
    batch["tokens_BT"][:] = np.arange(18).reshape(2, 9)
    batch["positions_BT"] = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    params, router_bias = transformer.init(config.model, 0)
    logits = transformer.apply(config.model, params, router_bias, *map(jnp.asarray, batch.values())).aux.max_logit_LH["dense"]
    config = replace(config, optim=replace(config.optim, qk_tau=float(np.median(logits))))
    monkeypatch.setattr(_heads, "last_state", lambda _: SimpleNamespace(params=params, router_bias=router_bias))
    monkeypatch.setattr(_heads, "_first_batch", lambda _: batch)
    good = _heads.clip_by_hand(config)
    assert (good.heads, good.above, good.untouched) == (8, 4, 4)
    assert good.error < 1e-5
    honest = _heads._clip

    def lax(config, params, max_logit_LH):
        return honest(config, params, {stack: 0.9 * x for stack, x in max_logit_LH.items()})

    def greedy(config, params, max_logit_LH):
        return honest(config, params, {stack: 1.5 * jnp.maximum(x, 0.0) + 1.0 for stack, x in max_logit_LH.items()})

    monkeypatch.setattr(_heads, "_clip", lax)
    assert _heads.clip_by_hand(config).error > 0.05
    monkeypatch.setattr(_heads, "_clip", greedy)
    assert _heads.clip_by_hand(config).untouched < 4
