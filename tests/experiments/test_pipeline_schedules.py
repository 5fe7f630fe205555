"""Schedules against their published formulas, and the simulator against times worked out by hand."""

import json
import math
import sys

import numpy as np
import pytest
import tyro

from experiments import _costs, _schedules, _simulator, pipeline_schedules
from experiments._schedules import EMPTY, Item, Schedule, Sizes
from experiments._simulator import CAUSES, EQUAL, Costs, idle, peak_residuals, run, simulate
from experiments.pipeline_schedules import Options, claims, costs_of, main
from k2jax.plan import Machine

UNEQUAL = EQUAL._replace(attention=0.3, experts=0.7, attention_back=0.6, experts_back=0.8, attention_weights=0.2)
SIZES = [Sizes(2, 1, 4, 1), Sizes(4, 2, 8, 4), Sizes(4, 4, 16, 4), Sizes(8, 2, 16, 2), Sizes(6, 3, 12, 3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_bubbles_and_residuals_are_the_published_ones(sizes):
    found = _schedules.all_of(sizes)
    assert [s.name for s in found] == ["GPipe", "1F1B", "ZB-H1", "DualPipe", "interleaved", "ours"]
    for costs in (EQUAL, UNEQUAL):
        for plan in found:
            row = run(plan, costs)
            assert row.residuals == plan.residuals, plan.name
            assert row.bubble_error < 1e-12, plan.name
            if costs is EQUAL or not plan.equal_costs:
                assert row.bubble == pytest.approx(row.bubble_formula, abs=1e-9), plan.name
            else:  # a unit that is longer than the gap it fills makes others wait
                assert row.bubble == pytest.approx(row.bubble_formula, abs=0.03 * row.step), plan.name


def test_formulas_at_k2s_sizes():
    """DeepSeek-V3 report, table 2, and Megatron-LM's counts, with F = 1, B = 1, W = 1 for a layer."""
    by_name = {s.name: s for s in _schedules.all_of(Sizes(16, 4, 64, 4))}
    bubbles = {name: s.bubble(4.0, 4.0, 4.0) for name, s in by_name.items()}
    assert bubbles == {"GPipe": 180, "1F1B": 180, "ZB-H1": 60, "DualPipe": 56, "interleaved": 45, "ours": 45}
    kept = {name: s.residuals for name, s in by_name.items()}
    assert kept == {"GPipe": 256, "1F1B": 64, "ZB-H1": 64, "DualPipe": 68, "interleaved": 79, "ours": 80}
    assert [s.copies for s in by_name.values()] == [1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_unit_runs_once_each_way_and_warm_ups_are_megatrons(sizes):
    P, v, M, _ = sizes
    for plan in _schedules.all_of(sizes):
        ways = len(plan.device_of) // plan.depth  # paths that microbatches are split over
        for device, program in enumerate(plan.items):
            chunks = [chunk for chunk, of in enumerate(plan.device_of) if of == device]
            every = {(chunk, m) for chunk in chunks for m in range(M // ways)}
            for kind in Item._fields:
                units = [u for item in program if (u := getattr(item, kind)) not in (None, EMPTY)]
                assert len(units) == len(every) and set(units) == every
            before = next(i for i, item in enumerate(program) if item.backward not in (None, EMPTY))
            warm_up = sum(item.forward not in (None, EMPTY) for item in program[:before])
            if (
                plan.name == "interleaved"
            ):  # the unit before the first backward is not warm-up, but the first of the steady phase
                assert warm_up - 1 == min(2 * (P - device - 1) + (v - 1) * P, M * v - 1)
            elif plan.name == "ours":
                assert warm_up == 2 * (P - device - 1) + (v - 1) * P + 1


def test_residuals_by_stage():
    P, M = 4, 12
    peaks = {s.name: peak_residuals(simulate(s, EQUAL)) for s in _schedules.all_of(Sizes(P, 1, M, 1))}
    assert peaks["1F1B"] == [4, 3, 2, 1]
    assert peaks["ZB-H1"] == [4] * P
    assert peaks["DualPipe"] == [5] * P
    assert peaks["ours"] == [2 * (P - p) for p in range(P)]  # the unit that ends and the one that starts in a tick included


def test_two_stages_by_hand():
    """1F1B on two stages of a layer, two microbatches: F = 2, B = 2, W = 1, exchanges 1, transfers 1."""
    costs = Costs(1, 1, 1, 1, 0.5, 0.5, exchange=1, transfer=1, copy=0, recompute=False)
    timeline = simulate(_schedules.one_f_one_b(2, 2, 1), costs)
    # Stage 0: F1 0-4; F2 4-8, and F1 arrives at 5. Stage 1: F1 5-9, B1 9-13, W1 -14; F2 14-18, B2 18-22, W2 -23. Gradients
    # leave after the weights: B1 arrives at 15, stage 0: B1 15-19, W1 -20; B2 arrives at 24: B2 24-28, W2 -29.
    assert timeline.makespan == 29
    first = [(r.task.kind, r.start, r.end) for r in timeline.lanes[0]["compute"]]
    forwards = [("forward", 0, 1), ("forward", 2, 3), ("forward", 4, 5), ("forward", 6, 7)]
    backwards = [("backward", 16, 17), ("backward", 18, 19), ("weights", 19, 20), ("backward", 25, 26), ("backward", 27, 28)]
    assert first == [*forwards, *backwards, ("weights", 28, 29)]
    found = idle(timeline)
    assert {cause: found.total(cause) for cause in CAUSES} == {"exchange": 8, "transfer": 1.5, "copy": 0, "bubble": 9.5}
    assert found.hidden == 0


@pytest.mark.parametrize("exchange", [0.0, 0.25, 0.45, 0.9])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_tick_of_ours_takes_the_longer_of_each_two_that_run_side_by_side(exchange, recompute):
    (P, v, M, layers), c = (4, 2, 12, 4), UNEQUAL._replace(exchange=exchange, recompute=recompute)
    timeline = simulate(_schedules.lock_step(P, v, M, layers), c)
    n, again = layers // v, (c.attention, 2 * c.experts / 3) if recompute else (0.0, 0.0)
    first = exchange * (2 if recompute else 1)
    between = max(exchange, c.attention_back + again[0])  # a layer's last step and the next one's repeated attention
    steps = [max(first, c.attention), max(exchange, c.experts_back + again[1]), max(exchange, c.experts), between]
    both = again[0] + n * sum(steps) - between + max(exchange, c.attention_back) + n * c.weights
    forward = n * (c.forward + 2 * exchange)
    backward = n * (c.backward + c.weights + first + exchange)
    edge = v * P
    assert timeline.makespan == pytest.approx(edge * forward + (M * v - edge + P - 1) * both + edge * backward)
    hidden = idle(timeline).hidden
    assert (hidden == 1) == (exchange <= c.cover)


def test_a_faster_device_computes_faster_and_exchanges_no_faster():
    fast = UNEQUAL._replace(exchange=0.4, transfer=0.1, copy=0.2, recompute=True).faster(2.0)
    assert (fast.forward, fast.weights, fast.cover) == pytest.approx((0.5, 0.35, 0.075))
    assert (fast.exchange, fast.transfer, fast.copy, fast.recompute) == (0.4, 0.1, 0.2, True)


def test_why_devices_wait_adds_up_to_the_step():
    costs = UNEQUAL._replace(exchange=0.35, transfer=0.2, copy=0.8)
    for plan in _schedules.all_of(Sizes(4, 2, 8, 4)):
        timeline = simulate(plan, costs)
        found = idle(timeline)
        assert timeline.work + sum(found.total(cause) for cause in CAUSES) == pytest.approx(timeline.makespan)
        silent = simulate(plan, costs.silent())
        assert all(idle(silent).total(cause) == 0 for cause in CAUSES[:3])
        assert timeline.makespan > silent.makespan


def test_weight_gradients_hide_the_transfers_of_a_lock_step_tick():
    plan, costs = _schedules.lock_step(4, 2, 16, 2), EQUAL._replace(transfer=0.5)
    assert idle(simulate(plan, costs)).by_phase["steady"]["transfer"] == 0  # two of them beside a layer's weight gradients
    longer = idle(simulate(plan, costs._replace(transfer=0.6))).by_phase["steady"]
    assert longer["transfer"] + longer["bubble"] > 0


def test_copies_are_hidden_until_they_take_longer_than_a_tick():
    plan = _schedules.lock_step(4, 2, 16, 2)
    tick = EQUAL.forward + EQUAL.backward + EQUAL.weights
    assert idle(simulate(plan, EQUAL._replace(copy=0.99 * EQUAL.forward))).by_phase["steady"]["copy"] == 0
    assert idle(simulate(plan, EQUAL._replace(copy=1.5 * tick))).by_phase["steady"]["copy"] > 0


def test_items_that_wait_for_each_other_are_an_error():
    items = [[Item(forward=(0, 0)), Item(backward=(0, 0), weights=(0, 0))], [Item(backward=(1, 0), weights=(1, 0))]]
    broken = Schedule("broken", items, [0, 1], 2, 1, lambda F, B, W: 0.0, 1)
    broken.items[1].insert(0, Item(forward=(1, 1)))
    with pytest.raises(RuntimeError, match="broken: items wait for each other in a circle"):
        simulate(broken, EQUAL)


def test_spans():
    a, b = [(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 5.5)]
    assert _simulator._common(a, b) == [(1.0, 2.0), (3.0, 4.0), (5.0, 5.5)]
    assert _simulator._without(a, b) == [(0.0, 1.0), (4.0, 5.0), (5.5, 6.0)]
    assert _simulator._without(a, []) == a and _simulator._without([], b) == []
    assert _simulator._without(a, [(-3.0, 9.0)]) == []
    assert _simulator._merged([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (3.5, 3.6)]) == [(0.0, 2.0), (3.0, 4.0)]


def test_costs_of_a_k2_layer():
    machine = Machine(tflops=100.0, network=10.0, nvlink=40.0, host=20.0)
    costs = _costs.layer(machine, 16, recompute=False)
    # By hand: 4096 tokens; attention's 101.1M weights, a router, the shared expert; (T + 1) / 2 keys a query; eight experts.
    core = 4096 * 2 * 64 * (128 + 64 + 128) * 4097 / 2 / 1e11
    dense = 4096 * 2 * (101_122_048 + 7168 * 384 + 3 * 7168 * 2048) / 1e11
    np.testing.assert_allclose(costs.attention, dense + core, rtol=1e-6)
    np.testing.assert_allclose(costs.attention_back, dense + 2 * core, rtol=1e-6)
    np.testing.assert_allclose(costs.experts, 4096 * 2 * 8 * 3 * 7168 * 2048 / 1e11, rtol=1e-6)
    np.testing.assert_allclose(costs.transfer, 4096 * 7168 * 2 / 1e7, rtol=1e-6)
    assert math.isclose(_costs.states_gb(16, 16), 28.18, rel_tol=1e-3)  # 6 bytes of 3.964B + 0.733B weights


def test_a_larger_expert_axis_exchanges_longer_and_is_less_even():
    study = _costs.expert_sizes(Machine(), 16, recompute=False)
    for name in ("exchange", "uneven", "reached"):
        assert (np.diff([getattr(choice, name) for choice in study]) > 0).all(), name
    assert (np.diff([choice.cover / choice.exchange for choice in study]) < 0).all()
    assert (np.diff([choice.states_gb for choice in study]) < 0).all()


def test_given_costs_replace_k2s_and_keep_its_split():
    k2, given = costs_of(Options()), costs_of(Options(forward=10.0, exchange=1.5, copy=0.0))
    assert given.forward == pytest.approx(10.0)
    assert given.attention / given.experts == pytest.approx(k2.attention / k2.experts)
    assert (given.exchange, given.copy, given.transfer, given.weights) == (1.5, 0.0, k2.transfer, k2.weights)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"microbatches": 20}, "multiple of the 16 pipeline stages; got 20, nearest are 16 or 32"),
        ({"chunks": 3}, "chunks must divide the layers of a stage; got 3 chunks and 4 layers"),
        ({"picture": (4, 2, 6)}, "multiple of the 4 pipeline stages; got 6"),
        ({"forward": 0.0}, "--forward is a time in ms and must be positive; got 0.0"),
        ({"exchange": -1.0}, "--exchange is a time in ms and must be positive; got -1.0"),
        ({"weights": math.nan}, "--weights is a time in ms and must be positive; got nan"),
        ({"expert": 5}, "--expert must divide K2's 384 experts; got 5, it can be 1, 2, 3, 4, 6"),
    ],
)
def test_options_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Options(**change)
    with pytest.raises(ValueError, match=r"--machine\.network must be positive; got 0"):
        Machine(network=0.0)


def test_the_claim_of_hiding_tells_how_near_its_limit_is():
    at_limit = run(_schedules.lock_step(4, 2, 32, 2), EQUAL._replace(exchange=EQUAL.cover))
    claim = pipeline_schedules._hides("hides", at_limit, "so")
    assert claim.verdict == "pass"
    # Every exchange of 0.5 ms then runs beside 0.5 / 1.3 ms of computation: 76.9%, but for the last combine, which ends later.
    assert claim.measured.startswith("100.0% (77.0% on a device 1.3 times as fast), so; ")


def test_memory_claim():
    memory = {"ours": {"4": 80, "8": 100, "16": 101, "32": 101}, "gpipe": {"4": 1, "8": 2, "16": 4, "32": 8}, "pipeline": 4}
    assert pipeline_schedules._measured(memory).verdict == "pass"  # below 2P microbatches there are fewer residuals
    assert pipeline_schedules._measured(memory | {"ours": {"4": 80, "8": 100, "32": 103}}).verdict == "fail"
    assert pipeline_schedules._measured(None).verdict == pipeline_schedules._measured({"error": "no"}).verdict == "untested"


def test_a_measurement_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert pipeline_schedules.measure() == {"error": "the programs did not compile: exit code 1"}


def test_from_the_command_line_to_files(tmp_path, capsys):
    flags = ["--stages", "4", "--chunks", "2", "--microbatches", "8", "--layers", "2", "--picture", "2", "1", "4"]
    options = tyro.cli(Options, args=[*flags, "--exchange", "1", "--no-measure", "--out", str(tmp_path / "out")])
    assert main(options) == 0
    for name in ("timelines.png", "figure.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    verdicts = [claim["verdict"] for claim in summary["claims"]]
    assert verdicts == ["pass"] * 5 + [verdicts[5]] + ["untested"]
    printed = capsys.readouterr().out
    assert printed.count("pass:") == verdicts.count("pass")
    assert set(summary["schedules"]) == {"GPipe", "1F1B", "ZB-H1", "DualPipe", "interleaved", "ours"}
    waiting = sum(share for causes in summary["schedules"]["ours"]["not_computing"].values() for share in causes.values())
    assert summary["schedules"]["ours"]["work"] / summary["schedules"]["ours"]["step"] == pytest.approx(1 - waiting)


def test_sizes_that_dualpipe_does_not_take_leave_its_claim_untested():
    sizes = Sizes(3, 1, 6, 1)
    rows = {plan.name: run(plan, EQUAL) for plan in _schedules.all_of(sizes)}
    assert "DualPipe" not in rows
    found = pipeline_schedules.Results(EQUAL, rows, rows["ours"], {1: rows["ours"]}, [], None)
    verdict = {
        c.claim: c.verdict for c in claims(Options(stages=3, chunks=1, microbatches=6, layers=1, picture=(2, 1, 4)), found)
    }
    assert verdict["as fast as DualPipe, without its second copy of parameters and gradients"] == "untested"
