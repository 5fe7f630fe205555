import numpy as np
import pytest

from k2jax.scaling.laws import (
    Law,
    common_loss,
    difference,
    fit_laws,
    flops_ratios,
    paired_band,
    paired_differences,
)

SPARSITIES = (8, 16, 32, 48, 64)
COST = {8: 1.69, 16: 1.39, 32: 1.15, 48: 1.0, 64: 0.93}  # planted FLOPs at equal loss, over sparsity 48's
FLOOR, SCALE, EXPONENT, MIDDLE = 1.4, 1.5, 0.2, 1e13


def planted(n_budgets, n_seeds, span, common, own, seed=0):
    """Budgets over `span` about MIDDLE; noise in nats that a cell shares and that each run has alone."""
    rng = np.random.default_rng(seed)
    budgets = np.repeat(MIDDLE * np.geomspace(span**-0.5, span**0.5, n_budgets), n_seeds)
    flops = np.tile(budgets, (len(SPARSITIES), 1))
    cost = np.array([[COST[s]] for s in SPARSITIES])
    loss = FLOOR + SCALE * (flops / cost / MIDDLE) ** -EXPONENT
    noise = common * rng.standard_normal(len(budgets)) + own * rng.standard_normal(loss.shape)
    return flops, loss + noise, budgets


def test_recovers_planted_parameters_to_two_percent():
    flops, loss, _ = planted(n_budgets=10, n_seeds=2, span=1000, common=0.0, own=0.001)
    fit = fit_laws(SPARSITIES, flops, loss)
    assert fit.floor_identified
    assert fit.floor.value == pytest.approx(FLOOR, rel=0.02)
    for s in SPARSITIES:
        assert fit.laws[s].exponent == pytest.approx(EXPONENT, rel=0.02)
        assert fit.laws[s].scale == pytest.approx(SCALE * COST[s] ** EXPONENT, rel=0.02)
    ratios = flops_ratios(fit, 48, common_loss(fit))
    assert {s: r.value for s, r in ratios.items()} == pytest.approx(COST, rel=0.02)
    assert fit.own_noise == pytest.approx(0.001, rel=0.25)


def test_without_noise_the_fit_is_exact():
    flops, loss, _ = planted(n_budgets=4, n_seeds=1, span=50, common=0.0, own=0.0)
    fit = fit_laws(SPARSITIES, flops, loss, floor=FLOOR)
    assert fit.laws[48].exponent == pytest.approx(EXPONENT, rel=1e-9)
    assert fit.laws[8].loss(MIDDLE) == pytest.approx(FLOOR + SCALE * 1.69**EXPONENT, rel=1e-9)
    assert fit.exponent(48).low == pytest.approx(fit.exponent(48).high)


def test_noise_that_sparsities_share_moves_a_ratio_less_than_noise_of_their_own():
    def widths(common, own):
        flops, loss, _ = planted(n_budgets=5, n_seeds=3, span=30, common=common, own=own)
        fit = fit_laws(SPARSITIES, flops, loss, floor=FLOOR)
        ratio = flops_ratios(fit, 48, common_loss(fit))[8]
        return ratio.high - ratio.low

    shared, alone = widths(0.02, 1e-5), widths(1e-5, 0.02)
    assert shared < 0.6 * alone


def test_intervals_of_a_small_sweep_hold_the_truth_nine_times_in_ten():
    """Three budgets, where no floor can be told: intervals must own up to that."""
    held = []
    for seed in range(40):
        flops, loss, _ = planted(n_budgets=3, n_seeds=1, span=4, common=0.02, own=0.007, seed=seed)
        fit = fit_laws(SPARSITIES, flops, loss, resamples=200)
        assert not fit.floor_identified
        ratio = flops_ratios(fit, 48, common_loss(fit))[8]
        held.append(ratio.low <= COST[8] <= ratio.high)
    assert np.mean(held) >= 0.85


def test_a_floor_is_not_claimed_where_a_pure_power_law_explains_the_data():
    flops, _, _ = planted(n_budgets=6, n_seeds=2, span=30, common=0.0, own=0.0)
    loss = 3.0 * (flops / MIDDLE) ** -0.1 + 0.004 * np.random.default_rng(0).standard_normal(flops.shape)
    fit = fit_laws(SPARSITIES, flops, loss)
    assert not fit.floor_identified
    assert fit.floor.low < 0.2 < 1.0 < fit.floor.high  # it owns up to not knowing
    assert fit.exponent(8).low < fit.exponent(8).value < fit.exponent(8).high
    assert fit.laws[8].loss(MIDDLE) == pytest.approx(3.0, abs=0.01)  # and inside the data it does not matter


def test_extrapolation_is_refused_unless_asked_for():
    law = Law(floor=1.0, scale=2.0, exponent=0.5, reference=100.0, low_flops=10.0, high_flops=1000.0)
    assert law.flops(law.loss(400.0)) == pytest.approx(400.0)
    with pytest.raises(ValueError, match="outside the data, which spans 10 to 1e"):
        law.loss(4000.0)
    assert law.loss(4000.0, extrapolate=True) == pytest.approx(1 + 2 * 40**-0.5)
    with pytest.raises(ValueError, match=r"a loss of 1\.1000"):
        law.flops(1.1)
    assert law.flops(1.1, extrapolate=True) == pytest.approx(40_000.0)
    with pytest.raises(ValueError, match=r"floor is 1\.0000"):
        law.flops(0.9, extrapolate=True)


def test_a_ratio_outside_the_data_is_refused_unless_asked_for():
    flops, loss, _ = planted(n_budgets=4, n_seeds=1, span=20, common=0.0, own=0.0)
    fit = fit_laws(SPARSITIES, flops, loss, floor=FLOOR)
    lowest = min(law.loss(law.high_flops) for law in fit.laws.values())
    with pytest.raises(ValueError, match="outside the data"):
        flops_ratios(fit, 48, lowest)  # only the best curve gets there
    asked = flops_ratios(fit, 48, lowest, extrapolate=True)
    assert asked[8].value == pytest.approx(1.69, rel=1e-6)


def test_a_missing_run_leaves_the_fit_of_the_others_alone():
    flops, loss, _ = planted(n_budgets=5, n_seeds=1, span=50, common=0.0, own=0.0)
    flops[1, 2] = loss[1, 2] = np.nan
    fit = fit_laws(SPARSITIES, flops, loss, floor=FLOOR)
    assert fit.laws[16].exponent == pytest.approx(EXPONENT, rel=1e-9)
    assert np.isfinite(fit.scales).all()


def test_bad_points_are_refused():
    flops, loss, _ = planted(n_budgets=2, n_seeds=3, span=50, common=0.0, own=0.001)
    with pytest.raises(ValueError, match="at least 3 budgets; sparsity 8 has 2"):
        fit_laws(SPARSITIES, flops, loss)
    flops, loss, _ = planted(n_budgets=3, n_seeds=1, span=50, common=0.0, own=0.001)
    with pytest.raises(ValueError, match="row for each of 4"):
        fit_laws(SPARSITIES[:4], flops, loss)
    with pytest.raises(ValueError, match="does not fall with compute at sparsity 8"):
        fit_laws(SPARSITIES, flops, 5 - loss)
    with pytest.raises(ValueError, match="missing together"):
        fit_laws(SPARSITIES, flops, np.where(loss == loss[0, 0], np.nan, loss))
    apart = loss - 2 * np.arange(5)[:, None] * (loss.max() - loss.min()) + 12
    with pytest.raises(ValueError, match="no loss lies inside the data of every sparsity"):
        common_loss(fit_laws(SPARSITIES, flops, apart))


def test_paired_differences_leave_out_what_the_seeds_share():
    _, loss, budgets = planted(n_budgets=3, n_seeds=4, span=4, common=0.05, own=0.001)
    top = budgets.max()
    found = paired_differences(SPARSITIES, loss, budgets, top)
    assert [(d.sparsity, d.sparser) for d in found] == [(8, 16), (16, 32), (32, 48), (48, 64)]
    truth = [SCALE * (2 / COST[a]) ** -EXPONENT - SCALE * (2 / COST[b]) ** -EXPONENT for a, b in ((8, 16), (16, 32))]
    assert [d.value for d in found[:2]] == pytest.approx(truth, abs=0.003)
    assert found[0].error == pytest.approx(0.001 * np.sqrt(2 / 4), rel=0.5)  # far below the 0.05 they share
    assert found[0].freedom == 3 * (4 - 1) * (5 - 1)
    assert all(d.separated for d in found)


def test_differences_within_their_error_are_not_separated():
    flops, loss, budgets = planted(n_budgets=3, n_seeds=1, span=4, common=0.02, own=0.02)
    unmeasured = paired_differences(SPARSITIES, loss, budgets, budgets.max())
    assert all(np.isnan(d.error) and not d.separated for d in unmeasured)  # one seed measures no error
    measured = paired_differences(SPARSITIES, loss, budgets, budgets.max(), fit=fit_laws(SPARSITIES, flops, loss))
    assert all(np.isfinite(d.error) and d.freedom == 4 for d in measured)
    assert not measured[-1].separated


def test_band_leaves_out_shared_noise():
    def width(common, own):
        flops, loss, _ = planted(n_budgets=4, n_seeds=3, span=20, common=common, own=own)
        low, high = paired_band(fit_laws(SPARSITIES, flops, loss, floor=FLOOR), np.array([MIDDLE]))
        return float((high - low).mean())

    assert width(0.05, 1e-3) < 0.3 * width(1e-3, 0.05)


def test_two_of_several_kinds_of_run_are_compared_seed_by_seed():
    rng = np.random.default_rng(0)
    means, seeds = np.array([3.0, 3.05, 3.2])[:, None], 0.3 * rng.standard_normal((1, 40))
    loss = means + seeds + 0.02 * rng.standard_normal((3, 40))
    gap = difference(("a", "b", "c"), loss, "c", "a")
    assert gap.value == pytest.approx((loss[2] - loss[0]).mean())
    assert gap.error == pytest.approx(0.02 * np.sqrt(2 / 40), rel=0.2)  # what the seed does to all is no error
    assert gap.freedom == 2 * 39 and gap.separated and gap.margin == pytest.approx(1.99 * gap.error, rel=0.01)
    assert difference(("a", "b", "c"), loss, "a", "c").value == -gap.value
    loss[2, 1:] = np.nan
    alone = difference(("a", "b", "c"), loss, "c", "a")
    assert alone.value == pytest.approx(loss[2, 0] - loss[0, 0]) and not alone.separated and np.isnan(alone.error)
    assert np.isnan(difference(("a", "b", "c"), np.full((3, 2), np.nan), "b", "a").value)


def test_curves_may_be_named_instead_of_numbered():
    flops, loss, _ = planted(n_budgets=4, n_seeds=1, span=20, common=0.0, own=0.0)
    rules = ("adamw", "muon")
    fit = fit_laws(rules, flops[[0, 3]], loss[[0, 3]], floor=FLOOR)
    ratio = flops_ratios(fit, "adamw", common_loss(fit))["muon"]
    assert ratio.value == pytest.approx(1 / COST[8], rel=1e-6)
    assert fit.exponent("muon").value == pytest.approx(EXPONENT, rel=1e-6)
    with pytest.raises(ValueError, match="at least 3 budgets; adamw has 2"):
        fit_laws(rules, flops[:2, :2], loss[:2, :2])
