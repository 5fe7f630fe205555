"""Loss against training FLOPs, one power law a sparsity, and the FLOPs each needs for the same loss (report 2.3, figure 5).

    L(C) = floor + scale * (C / reference)^-exponent

The reference, the middle of the data, makes `scale` the reducible loss there, so that a fit's numbers do not carry the huge
lever arm of C = 1. All sparsities share one floor: it is the entropy of the text. A short sweep cannot tell a floor from a
smaller exponent. Then `floor_identified` is False: every resample takes a floor of its own from 0 to half the lowest loss, so
that the intervals hold for any, and the curve has the middle one. Inside the data all floors say nearly the same, which is why
every question that leaves the data is refused unless asked for.

Runs come in cells: a cell is one budget and one seed, the same batches for every sparsity. Noise has a part common to a cell
(hard batches) and a part of its own; only the second moves a ratio of two sparsities, so the bootstrap draws them apart.
Arrays are [sparsity, cell]; NaN stands for a run that failed. Where update rules are compared, their names stand in for the
sparsities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import stdtrit

INTERVAL = 0.90  # share of bootstrap fits between `low` and `high`
RESAMPLES = 1000
UNKNOWN_FLOOR = 0.5  # a floor that the data cannot tell lies between 0 and this share of the lowest loss

Curve = int | str  # a sparsity, or the name of an update rule


@dataclass(frozen=True)
class Law:
    """One sparsity's curve and the range of FLOPs it was fitted on."""

    floor: float  # nats a token that no compute removes
    scale: float  # nats above the floor at `reference`
    exponent: float
    reference: float  # FLOPs
    low_flops: float
    high_flops: float

    def loss(self, flops: float, *, extrapolate: bool = False) -> float:
        """Loss after `flops`; ValueError outside the fitted range unless `extrapolate`."""
        self._check(flops, f"{flops:.3g} FLOPs", extrapolate)
        return self.floor + self.scale * (flops / self.reference) ** -self.exponent

    def flops(self, loss: float, *, extrapolate: bool = False) -> float:
        """FLOPs to reach `loss`; ValueError outside the fitted range unless `extrapolate`, and always at or below the floor."""
        if loss <= self.floor:
            raise ValueError(f"no amount of compute reaches a loss of {loss:.4f}: the curve's floor is {self.floor:.4f}")
        flops = self.reference * ((loss - self.floor) / self.scale) ** (-1 / self.exponent)
        self._check(flops, f"a loss of {loss:.4f} ({flops:.3g} FLOPs)", extrapolate)
        return flops

    def _check(self, flops: float, what: str, extrapolate: bool) -> None:
        inside = self.low_flops * (1 - 1e-9) <= flops <= self.high_flops * (1 + 1e-9)
        if not inside and not extrapolate:
            raise ValueError(
                f"{what} lies outside the data, which spans {self.low_flops:.3g} to {self.high_flops:.3g} FLOPs; "
                "pass extrapolate=True to answer from the curve alone"
            )


class Interval(NamedTuple):
    """A value and the central 90% of its bootstrap fits."""

    value: float
    low: float
    high: float


class Fit(NamedTuple):
    """Curves of one sweep; the bootstrap's curves, [resample, sparsity], give every interval."""

    sparsities: tuple[Curve, ...]
    laws: dict[Curve, Law]
    floor: Interval
    floor_identified: bool
    floors: np.ndarray  # [resample]
    scales: np.ndarray  # [resample, sparsity]
    exponents: np.ndarray  # [resample, sparsity]
    common_noise: float  # nats, what a cell's runs share
    own_noise: float  # nats, each run's own
    own_freedom: int  # degrees of freedom behind `own_noise`

    def scale(self, sparsity: Curve) -> Interval:
        return _interval(self.laws[sparsity].scale, self.scales[:, self.sparsities.index(sparsity)])

    def exponent(self, sparsity: Curve) -> Interval:
        return _interval(self.laws[sparsity].exponent, self.exponents[:, self.sparsities.index(sparsity)])


class Difference(NamedTuple):
    """Loss of one sparsity less that of a larger one on the same batches, nats: positive if sparser is better."""

    sparsity: Curve
    sparser: Curve
    value: float
    error: float  # standard error of `value`; NaN where nothing measures it
    freedom: int  # degrees of freedom behind the error

    @property
    def margin(self) -> float:
        """Half the width of Student's interval of 95%, nats."""
        return float(stdtrit(max(self.freedom, 1), 0.975) * self.error)

    @property
    def separated(self) -> bool:
        """Whether Student's test calls them different, at 5%."""
        return bool(abs(self.value) > self.margin)


def fit_laws(
    sparsities: Sequence[Curve],
    flops: Float[np.ndarray, "sparsity cell"],
    loss: Float[np.ndarray, "sparsity cell"],
    *,
    floor: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Fit:
    """Fits every sparsity's curve at once and bootstraps the fit.

    Args:
      sparsities: S of them.
      flops, loss: the cells in the same order for every sparsity; NaN for a missing run.
      floor: fixes the shared floor; None estimates it if the data can tell it from zero.
      seed: of the bootstrap.

    Raises ValueError where a sparsity has fewer than three budgets, since two points fit any curve.
    """
    _check_points(sparsities, flops, loss)
    rng = np.random.default_rng(seed)
    reference = float(np.exp(np.nanmean(np.log(flops))))
    log_ratio = np.log(flops / reference)
    identified = True
    if floor is not None:
        draws = _resampled(rng, log_ratio, loss, floor, resamples, free_floor=False)
        floors = np.full(resamples, floor)
    else:
        floor = float(_best_floor(log_ratio, loss[None])[0])
        draws = _resampled(rng, log_ratio, loss, floor, resamples, free_floor=True)
        floors = _best_floor(log_ratio, draws.loss)
        identified = _floor_is_identified(flops, _interval(floor, floors))
    if not identified:
        floors = rng.uniform(0, highest := UNKNOWN_FLOOR * float(np.nanmin(loss)), resamples)
        floor = highest / 2
        draws = _resampled(rng, log_ratio, loss, floor, resamples, free_floor=False)
    scale, exponent = _fit_given_floor(log_ratio, loss, np.array(floor))
    for s, b in zip(sparsities, exponent, strict=True):
        if b <= 0:
            raise ValueError(f"the loss does not fall with compute at {_name(s)}: its fitted exponent is {b:.3g}")
    scales, exponents = _fit_given_floor(log_ratio, draws.loss, floors)
    laws = {
        s: Law(floor, float(a), float(b), reference, float(np.nanmin(c)), float(np.nanmax(c)))
        for s, a, b, c in zip(sparsities, scale, exponent, flops, strict=True)
    }
    return Fit(tuple(sparsities), laws, _interval(floor, floors), identified, floors, scales, exponents, *draws[1:])


def common_loss(fit: Fit) -> float:
    """The lowest loss that every curve reaches inside its own data: there the curves are furthest apart.

    Raises ValueError if no loss is inside the data of all.
    """
    lowest = max(law.loss(law.high_flops) for law in fit.laws.values())
    highest = min(law.loss(law.low_flops) for law in fit.laws.values())
    if lowest > highest:
        raise ValueError(
            f"no loss lies inside the data of every sparsity: one ends at {lowest:.4f}, one starts at {highest:.4f}"
        )
    return lowest


def flops_ratios(fit: Fit, to: Curve, loss: float, *, extrapolate: bool = False) -> dict[Curve, Interval]:
    """FLOPs of every sparsity over those of sparsity `to` at the same loss; above 1 is dearer."""
    here = fit.sparsities.index(to)
    base = fit.laws[to].flops(loss, extrapolate=extrapolate)
    reducible = np.maximum(loss - fit.floors, 1e-12)[:, None]
    log_flops = -np.log(reducible / fit.scales) / np.maximum(fit.exponents, 1e-3)
    log_ratios = log_flops - log_flops[:, here : here + 1]
    values = {s: fit.laws[s].flops(loss, extrapolate=extrapolate) / base for s in fit.sparsities}
    return {s: _interval(values[s], np.exp(np.clip(log_ratios[:, i], -20, 20))) for i, s in enumerate(fit.sparsities)}


def paired_band(
    fit: Fit, flops: Float[np.ndarray, " point"]
) -> tuple[Float[np.ndarray, "sparsity point"], Float[np.ndarray, "sparsity point"]]:
    """Central 90% of every curve's bootstrap, with what all curves of a resample share taken out.

    Noise that the sparsities have in common moves the curves together, so it says nothing about their order.
    """
    log_ratio = np.log(flops / fit.laws[fit.sparsities[0]].reference)
    draws = _predict(log_ratio, fit.floors, fit.scales, fit.exponents)
    curve = np.stack([law.floor + law.scale * np.exp(-law.exponent * log_ratio) for law in fit.laws.values()])
    off = draws - curve
    own = off - off.mean(1, keepdims=True)
    low, high = np.quantile(own, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    return curve + low, curve + high


def paired_differences(
    sparsities: Sequence[Curve],
    loss: Float[np.ndarray, "sparsity cell"],
    budgets: Shaped[np.ndarray, " cell"],
    budget: int | float,
    *,
    fit: Fit | None = None,
) -> list[Difference]:
    """Neighbouring sparsities at one budget, run by run on the same batches, averaged over seeds.

    The error is pooled over every budget and sparsity. Seeds measure it where there are two or more; with one seed the
    scatter about the curves of `fit` stands in for it.

    Args:
      budgets: the budget of each cell.
      budget: which one to compare at.
    """
    own, freedom = _noise_over_seeds(loss, budgets)
    if not freedom and fit is not None:
        own, freedom = fit.own_noise, fit.own_freedom
    at = loss[:, budgets == budget]
    found = []
    for i, (less, more) in enumerate(pairwise(sparsities)):
        gaps = (at[i] - at[i + 1])[np.isfinite(at[i] - at[i + 1])]
        if len(gaps):
            found.append(Difference(less, more, float(gaps.mean()), float(own * np.sqrt(2 / len(gaps))), freedom))
    return found


def difference(names: Sequence[str], loss: Float[np.ndarray, "run seed"], first: str, second: str) -> Difference:
    """Two of several kinds of run, seed by seed on the same batches: the loss of the first less the second's.

    The error is pooled over all kinds, what the runs of a seed share taken out; NaN with fewer than two seeds.
    """
    own, freedom = _noise_over_seeds(loss, np.zeros(loss.shape[1]))
    gaps = loss[list(names).index(first)] - loss[list(names).index(second)]
    gaps = gaps[np.isfinite(gaps)]
    value, error = (float(gaps.mean()), float(own * np.sqrt(2 / len(gaps)))) if len(gaps) else (np.nan, np.nan)
    return Difference(first, second, value, error, freedom)


def _check_points(sparsities: Sequence[Curve], flops: np.ndarray, loss: np.ndarray) -> None:
    if flops.shape != loss.shape or len(flops) != len(sparsities):
        raise ValueError(f"flops and loss need a row for each of {len(sparsities)} sparsities; got {flops.shape}, {loss.shape}")
    if (np.isfinite(flops) != np.isfinite(loss)).any() or (flops <= 0).any() or (loss <= 0).any():
        raise ValueError("flops and loss must be positive, and missing together as NaN")
    for s, c in zip(sparsities, flops, strict=True):
        if (n := len(np.unique(np.round(np.log(c[np.isfinite(c)]), 6)))) < 3:
            raise ValueError(f"a curve needs at least 3 budgets; {_name(s)} has {n}")


def _name(curve: Curve) -> str:
    return curve if isinstance(curve, str) else f"sparsity {curve}"


def _fit_given_floor(log_ratio: np.ndarray, loss: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and exponent by a line through log(loss - floor), weighted so that errors count in nats.

    `loss` is [.., S, cells] and `floor` [..]; returns two arrays [.., S].
    """
    present = np.isfinite(loss)
    reducible = np.where(present, np.maximum(loss - floor[..., None, None], 1e-6), 1.0)
    weight = np.where(present, reducible**2, 0.0)
    x, y = np.where(np.isfinite(log_ratio), log_ratio, 0.0), np.log(reducible)
    total = weight.sum(-1)
    x_mean, y_mean = (weight * x).sum(-1) / total, (weight * y).sum(-1) / total
    x_off = x - x_mean[..., None]
    slope = (weight * x_off * y).sum(-1) / (weight * x_off**2).sum(-1)
    return np.exp(y_mean - slope * x_mean), -slope


def _predict(log_ratio: np.ndarray, floor: np.ndarray, scale: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    return floor[..., None, None] + scale[..., None] * np.exp(-exponent[..., None] * log_ratio)


def _best_floor(log_ratio: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """The shared floor of least squared error, for each of [draws, S, cells]: a grid from 0 to the lowest loss, zoomed."""
    top = np.nanmin(loss, axis=(-2, -1))
    low, high = np.zeros_like(top), top * 0.999
    for _ in range(6):
        grid = np.linspace(low, high, 17)  # [17, draws]
        error = np.stack([_squared_error(log_ratio, loss, f) for f in grid])
        best = error.argmin(0)
        step = (high - low) / 16
        centre = low + best * step
        low, high = np.maximum(centre - step, 0), np.minimum(centre + step, top * 0.999)
    return centre


def _squared_error(log_ratio: np.ndarray, loss: np.ndarray, floor: np.ndarray) -> np.ndarray:
    scale, exponent = _fit_given_floor(log_ratio, loss, floor)
    return np.nansum((loss - _predict(log_ratio, floor, scale, exponent)) ** 2, axis=(-2, -1))


class _Draws(NamedTuple):
    loss: np.ndarray  # [resample, S, cells]
    common_noise: float
    own_noise: float
    own_freedom: int


def _resampled(rng, log_ratio, loss, floor: float, resamples: int, *, free_floor: bool) -> _Draws:
    """Curve plus fresh noise: one draw a cell for all sparsities alike, one of its own for each run.

    The residuals give the size of both kinds, and the degrees of freedom that the fit left say how well: each resample first
    draws the size itself (scaled inverse chi-square), without which three budgets of one seed would look far too certain.
    """
    scale, exponent = _fit_given_floor(log_ratio, loss, np.array(floor))
    curve = _predict(log_ratio, np.array(floor), scale, exponent)
    residual = loss - curve
    n_curves, n_cells = loss.shape
    common = np.nanmean(residual, axis=0)
    own = (residual - common)[np.isfinite(residual)]
    common_freedom = max(n_cells - 2 - free_floor, 1)
    own_freedom = max(len(own) - n_cells - 2 * (n_curves - 1), 1)
    common_noise = float(np.sqrt((common**2).sum() / common_freedom))
    own_noise = float(np.sqrt((own**2).sum() / own_freedom))
    shared = _noise(rng, common_noise, common_freedom, (resamples, 1, n_cells))
    each = _noise(rng, own_noise, own_freedom, (resamples, n_curves, n_cells))
    return _Draws(np.where(np.isfinite(loss), curve + shared + each, np.nan), common_noise, own_noise, own_freedom)


def _noise(rng, size: float, freedom: int, shape: tuple[int, int, int]) -> np.ndarray:
    sizes = size * np.sqrt(freedom / rng.chisquare(freedom, (shape[0], 1, 1)))
    return sizes * rng.standard_normal(shape)


def _floor_is_identified(flops: np.ndarray, floor: Interval) -> bool:
    """Three budgets fix scale and exponent and leave nothing for a floor; nor does an interval that reaches zero fix it."""
    budgets = min(len(np.unique(np.round(np.log(c[np.isfinite(c)]), 6))) for c in flops)
    return budgets >= 4 and floor.low > 1e-3 * floor.value and floor.value > 0


def _noise_over_seeds(loss: np.ndarray, budgets: np.ndarray) -> tuple[float, int]:
    """A run's own noise over seeds of one budget, what its cell shares taken out, and its degrees of freedom: (NaN, 0) without
    two seeds anywhere."""
    square, freedom = 0.0, 0
    for budget in np.unique(budgets):
        at = loss[:, budgets == budget]
        at = at[:, np.isfinite(at).all(0)]
        if at.shape[1] < 2:
            continue
        own = at - at.mean(0) - at.mean(1, keepdims=True) + at.mean()
        square, freedom = square + float((own**2).sum()), freedom + (at.shape[0] - 1) * (at.shape[1] - 1)
    return (float(np.sqrt(square / freedom)) if freedom else np.nan), freedom


def _interval(value: float, draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return Interval(float(value), float(low), float(high))
