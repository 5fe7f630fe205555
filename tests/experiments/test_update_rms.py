import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from configs import llama
from experiments import _study, _updates, update_rms
from experiments._study import Options
from experiments._updates import Update, random_updates, updates_of
from experiments.update_rms import (
    BASE,
    LONG,
    Budget,
    Course,
    Found,
    better,
    claims,
    losses,
    mean,
    no_better,
    runs_of,
    said,
    tie,
)
from k2jax.config import OptimConfig, differences
from k2jax.scaling.laws import Difference

LOSS = {
    "adamw": 3.5,
    "rms0.05": 3.45,
    "rms0.1": 3.40,
    "rms0.2": 3.36,
    "rms0.4": 3.361,
    "rms0.8": 3.42,
    "update_norm": 3.36,
    "baseline": 3.39,
    "steps10": 3.36,
}
UPDATES = [Update("q_DHR", 32, 32, 0.18), Update("gate_DF", 32, 128, 0.17)]
ALL = ("5", "6", "7a", "7b", "7c", "8a", "8b", "9a", "9b")


def planted(early=-0.02, late=0.02, noise=1e-3, n_seeds=3, trained=UPDATES, **changed):
    """What a study would find: losses with noise that a seed's runs share, and less of their own."""
    rng = np.random.default_rng(0)
    base = np.array([(LOSS | changed)[name] for name in BASE])[:, None]
    loss = base + 0.05 * rng.standard_normal((1, n_seeds)) + noise * rng.standard_normal((len(base), n_seeds))
    steps = np.arange(100, 2501, 100)
    with_decay = 3.8 * (steps / 100) ** -0.08
    gap = np.interp(steps, [100, 900, 2500], [0, early, late])
    curves = np.stack([with_decay, with_decay + gap])[:, None] + noise * rng.standard_normal((2, n_seeds, len(steps)))
    return Found(loss, Course(steps, curves), UPDATES, trained, {})


def verdicts(found, preset="default"):
    return {c.number: c.verdict for c in claims(found, preset)}


def test_the_runs_of_a_seed_differ_in_what_is_compared_alone(tmp_path):
    study = _study.study("update_rms", Options(preset="default", out=tmp_path, seeds=2))
    runs = {run.name: run for run in runs_of(study)}
    assert len(runs) == 2 * (len(BASE) + len(LONG))
    model = runs["rms0.2_seed0"].model
    assert (model.d_dense, model.n_moe) == (4 * model.d_model, 0)
    expected = {
        "adamw": {"optim.rule"},
        "rms0.8": {"optim.update_rms"},
        "update_norm": {"optim.scale"},
        "baseline": {"optim.scale"},
        "steps10": {"optim.ns_steps"},
    }
    for name, apart in expected.items():
        found = differences(runs["rms0.2_seed1"], runs[f"{name}_seed1"])
        assert {d.split(":")[0] for d in found} == {"name", "out"} | apart
    found = differences(runs["decay_seed0"], runs["no_decay_seed0"])
    assert {d.split(":")[0] for d in found} == {"name", "out", "optim.weight_decay"}
    assert {run.seed == run.data_seed for run in runs.values()} == {True}
    smoke = runs_of(_study.study("update_rms", Options(preset="smoke", out=tmp_path)))
    assert {run.name.removesuffix("_seed0") for run in smoke} == {*update_rms.SMOKE, *LONG}


def test_every_claim_can_pass_and_can_fail():
    assert verdicts(planted()) == dict.fromkeys(ALL, "pass")
    turned = planted(
        early=0.02,
        late=-0.02,
        trained=[Update("q_DHR", 32, 32, 0.4)],
        **{"rms0.4": 3.46, "adamw": 3.3, "update_norm": 3.42, "baseline": 3.3, "steps10": 3.3},
    )
    assert verdicts(turned) == dict.fromkeys(ALL, "fail")


def test_what_seeds_do_not_tell_is_untested():
    noisy = verdicts(planted(noise=0.2))
    assert [noisy[n] for n in ("7b", "7c", "8b", "9a", "9b")] == ["untested"] * 5
    one = verdicts(planted(n_seeds=1, trained=[]))
    assert one == dict.fromkeys(ALL, "untested")
    nothing = Found(np.full((len(BASE), 3), np.nan), None, UPDATES, [], {})
    assert verdicts(nothing) == dict.fromkeys(ALL, "untested")
    smoke = verdicts(planted(), "smoke")
    assert smoke == dict.fromkeys(ALL, "untested") | {"6": "pass"}


def test_early_and_late_are_read_at_the_reports_share_of_the_run():
    found = planted(noise=1e-6)
    step, gap = found.long_gap(update_rms.EARLY)
    assert step == 900 and gap.value == pytest.approx(0.02, abs=1e-4)
    assert found.long_gap(1.0)[0] == 2500


def test_verdicts_on_a_gap():
    clear, unclear, back = (Difference("a", "b", value, 0.01, 8) for value in (0.05, 0.01, -0.05))
    alone = Difference("a", "b", 0.05, np.nan, 0)
    small = Difference("a", "b", 0.01, 0.001, 8)
    assert [better(d) for d in (clear, unclear, back, alone)] == ["pass", "untested", "fail", "untested"]
    assert better(clear, unclear) == "untested" and better(clear, back) == "fail"
    assert [tie(d) for d in (clear, unclear, back, alone, small)] == ["fail", "pass", "fail", "untested", "pass"]
    assert [no_better(d) for d in (clear, unclear, back, alone)] == ["fail", "pass", "pass", "untested"]
    assert said(unclear, alone) == "a less b: +0.0100 ± 0.0231; a less b: +0.0500"
    assert said(Difference("a", "b", np.nan, np.nan, 0)) == "no pair of runs"


def test_updates_have_the_size_that_is_asked_for_whatever_their_shape(monkeypatch):
    monkeypatch.setattr(_updates, "SHAPES", ((8, 64),))
    config = OptimConfig(ns_dtype="float32")
    (random,) = random_updates(config)
    assert (random.n, random.m) == (8, 64) and 0.14 < random.rms < 0.23
    assert random_updates(replace(config, update_rms=0.4))[0].rms == pytest.approx(2 * random.rms, rel=1e-5)
    stacked = {"dense": {"gate_DF": jax.random.normal(jax.random.key(0), (3, 8, 64))}}
    found = updates_of(replace(config, scale="update_norm"), 8, stacked)
    assert [(u.name, u.n, u.m) for u in found] == [("gate_DF", 8, 64)] * 3
    assert [u.rms for u in found] == pytest.approx([0.2] * 3, rel=1e-5)


def test_losses_of_runs_that_are_not_there_are_missing(trained):
    base = llama.config(0, "smoke")
    runs = {f"a_seed{s}": trained(base, [(1.0,)], val_loss=3.0 + s) for s in range(2)}
    found = losses(runs, ("a", "b"), 3)
    np.testing.assert_array_equal(found, [[3, 4, np.nan], [np.nan] * 3])
    np.testing.assert_array_equal(mean(found, axis=1), [3.5, np.nan])


@pytest.mark.slow
def test_a_whole_study_trains_measures_and_draws(tmp_path, texts, in_process, monkeypatch, capsys):
    monkeypatch.setattr(update_rms, "BUDGETS", {"smoke": Budget(16, 1, 6, 8, 4, 2e-2, 2e-2)})
    monkeypatch.setattr(update_rms, "SMOKE", ("rms0.2",))
    monkeypatch.setattr(update_rms, "POINTS", 4)
    monkeypatch.setattr(_updates, "SHAPES", ((8, 64),))
    whole = llama.config

    def small(*args):
        config = whole(*args)
        return replace(config, batch=4, seq_len=32, eval_batches=1, mesh=replace(config.mesh, data=1))

    monkeypatch.setattr(llama, "config", small)
    options = Options(preset="smoke", out=tmp_path / "out", corpus=str(texts), cache=tmp_path / "cache")
    assert update_rms.main(options) == 0
    summary = json.loads((options.out / "summary.json").read_text())
    assert 0 < summary["loss"]["rms0.2"][0] < 7 and summary["loss"]["baseline"] == [None]
    assert [c["verdict"] for c in summary["claims"] if c["number"] == "6"] == ["pass"]
    assert len(summary["update_rms"]["trained"]) == 7  # matrices of a dense layer
    assert summary["long_steps"] == [2, 4, 6, 8] == [step for step, _ in summary["weight_rms"]["decay"]]
    last = {name: summary["weight_rms"][name][-1][1] for name in LONG}
    assert last["no_decay"] > last["decay"] > 0.02
    assert (options.out / "figure.png").stat().st_size > 10_000
    assert "7a" in capsys.readouterr().out
