"""The toy against its differential equation, and against the clip written on logits alone."""

import json
import math

import numpy as np
import pytest

from experiments.clip_dynamics import COLD, HEADS, SCHEMES, STEP, Options, claims, draw, growth, hot_heads, main, simulate

OPTIONS = Options()


@pytest.fixture(scope="module")
def traces():
    return {scheme: simulate(OPTIONS, scheme) for scheme in SCHEMES}


def test_without_a_clip_logits_follow_the_equation(traces):
    trace = traces["none"]
    r_LH, t = growth(OPTIONS), trace.time_t.astype(np.float64)[:, None, None]
    T, decay = OPTIONS.decay, OPTIONS.weight_decay
    expected_tLH = 2 * (r_LH * T * (1 - np.exp(-t / T)) - decay * t)
    # The toy sums where the equation integrates: half a step of the first growth is the most that this makes.
    np.testing.assert_allclose(np.log(trace.logit_tLH), expected_tLH, atol=1.01 * STEP * OPTIONS.drive)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_clip_on_weights_is_the_clip_on_logits(scheme, traces):
    logit_LH, lost_LH, r_LH = np.ones_like(growth(OPTIONS)), 0.0, growth(OPTIONS)
    found = traces[scheme]
    for i, t in enumerate(found.time_t.astype(np.float64)):
        if i % 100 == 0:
            np.testing.assert_allclose(found.logit_tLH[i], logit_LH, rtol=2e-3)  # 2200 float32 steps
        worst_LH = logit_LH.max(1, keepdims=True) if scheme == "layer" else logit_LH
        gamma_LH = np.ones_like(logit_LH) if scheme == "none" else np.minimum(1, OPTIONS.tau / worst_LH)
        lost_LH = lost_LH - np.where(logit_LH <= OPTIONS.tau, np.log(gamma_LH), 0.0)
        logit_LH = logit_LH * gamma_LH * np.exp(2 * STEP * (r_LH * np.exp(-t / OPTIONS.decay) - OPTIONS.weight_decay))
    np.testing.assert_allclose(found.lost_tLH[-1], lost_LH * np.ones_like(logit_LH), atol=5e-3)
    assert (found.layers["k_rope_DR"] == 1).all()


def test_by_head_only_hot_heads_change_and_by_layer_their_neighbours_too(traces):
    hot_LH = hot_heads(OPTIONS)
    beside_LH = hot_LH.any(1, keepdims=True) & ~hot_LH
    none, head, layer = (traces[scheme] for scheme in SCHEMES)
    np.testing.assert_array_equal(head.fired_tLH.any(0), hot_LH)
    assert (head.lost_tLH == 0).all() and (none.lost_tLH == 0).all()
    np.testing.assert_allclose(head.logit_tLH[:, ~hot_LH], none.logit_tLH[:, ~hot_LH], rtol=1e-5)
    assert (layer.lost_tLH[-1][~hot_LH & ~beside_LH] == 0).all()
    # While the clip fires the hottest head stands still, so all it takes is what that head would have grown above tau.
    peak_LH = np.log(none.logit_tLH.max(0).max(1, keepdims=True) / OPTIONS.tau) * beside_LH
    assert peak_LH.max() > 7
    np.testing.assert_allclose(layer.lost_tLH[-1][beside_LH], peak_LH[beside_LH], atol=1e-2)


@pytest.mark.parametrize("change", [{}, {"tau": 30.0}, {"decay": 10.0}, {"hot": 3, "drive": 0.6}])
def test_the_clip_ends_where_decay_overtakes_growth(change):
    options = Options(**change)
    trace = simulate(options, "head")
    predicted = options.decay * math.log(options.drive / options.weight_decay)
    assert abs(trace.last_fired - predicted) <= 2 * STEP
    after_t = trace.time_t > predicted + 2 * STEP
    assert (np.diff(trace.logit_tLH[after_t].max((1, 2))) < 0).all()


def test_growth_is_dealt_out():
    options = Options(hot=20)
    r_LH, hot_LH = growth(options), hot_heads(options)
    assert hot_LH.sum(1).tolist() == [7, 7, 6, 0, 0, 0, 0, 0]
    assert sorted(r_LH[hot_LH]) == pytest.approx(np.linspace(0.21, 0.42, 20))
    assert COLD[0] <= r_LH[~hot_LH].min() and r_LH[~hot_LH].max() <= COLD[1]
    assert np.unique(r_LH).size == r_LH.size


def test_claims(traces):
    told = claims(traces)
    assert [claim.verdict for claim in told] == ["pass"] * 4
    assert "112 heads that never reach tau 32 shrink, by up to 2,00" in told[1].measured
    assert "12.5% of the heads ever fired, the last at 69.9 of 220" in told[2].measured
    confused = claims(traces | {"head": traces["layer"], "layer": traces["head"]})
    assert [claim.verdict for claim in confused][:2] == ["fail", "fail"]
    cut = traces["head"]
    cut = cut._replace(logit_tLH=cut.logit_tLH[:300], time_t=cut.time_t[:300], options=Options(length=30.0))
    assert claims(traces | {"head": cut})[2].verdict == "fail"
    loose = traces["head"]._replace(logit_tLH=2 * traces["head"].logit_tLH)
    assert claims(traces | {"head": loose})[3].verdict == "fail"


def test_nothing_is_claimed_of_a_clip_that_never_fires(traces):
    traces = {scheme: trace._replace(options=Options(tau=1e9)) for scheme, trace in traces.items()}
    assert [claim.verdict for claim in claims(traces)] == ["untested"] * 4


@pytest.mark.parametrize("change", [{"tau": 30.0, "hot": 0}, {"hot": 3 * HEADS, "decay": 40.0}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_figure_stands_at_the_ends_of_the_sliders(scheme, change):
    trace = simulate(Options(**change), scheme)
    assert np.isfinite(trace.logit_tLH).all() and np.isfinite(trace.lost_tLH).all()
    panels = draw(trace).axes
    assert len(panels) == 2


def test_main_writes_a_figure_and_a_summary(tmp_path, capsys):
    assert main(Options(out=tmp_path / "out")) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [claim["verdict"] for claim in summary["claims"]] == ["pass"] * 4
    assert summary["collateral_factor"]["head"] == 1 and summary["collateral_factor"]["layer"] > 1000
    assert summary["share_ever_fired"] == 0.125 and summary["options"]["tau"] == 100
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "pass: the clip ends by itself" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--out must be a folder; .*summary\.json is a file"):
        main(Options(out=tmp_path / "out" / "summary.json"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tau": 0.0}, "--tau must be above 1, where every logit starts; got 0.0"),
        ({"tau": -100.0}, "--tau must be above 1, where every logit starts; got -100.0"),
        ({"tau": math.nan}, "--tau must be above 1, where every logit starts; got nan"),
        ({"hot": 49}, r"--hot must lie in 0..48, the heads of 3 layers; got 49"),
        ({"hot": -1}, r"--hot must lie in 0..48, the heads of 3 layers; got -1"),
        ({"weight_decay": 0.0}, "--weight-decay must be a positive number; got 0.0"),
        ({"decay": math.inf}, "--decay must be a positive number; got inf"),
        ({"drive": 2.0}, "--drive times --decay must be at most 20, or float32 does not hold the logits; got 30.8"),
        (
            {"weight_decay": 0.1},
            "--weight-decay times --length must be at most 20, or float32 does not hold the logits; got 22",
        ),
        ({"length": 0.01}, r"--length must lie in 0.1..10000 thousand steps; got 0.01"),
    ],
)
def test_options_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Options(**change)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="scheme must be none, head, layer; got 'global'"):
        simulate(OPTIONS, "global")
