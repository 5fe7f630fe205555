"""Figures of loss against training FLOPs: one curve a sparsity (report, figure 5), or one an update rule (Moonlight report,
figure 1a)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from k2jax.scaling.laws import Curve, Difference, Fit, Interval, paired_band

MARKERS = "osD^v"


class Panel(NamedTuple):
    """One way of counting FLOPs. Arrays are [sparsity, cell], NaN for a missing run."""

    title: str
    axis: str  # the label of the FLOPs axis: says whether the router is in
    flops: np.ndarray
    loss: np.ndarray
    fit: Fit | None  # None where the data does not carry a fit: points alone
    at_loss: float | None  # the loss of the ratios
    ratios: dict[int, Interval]  # FLOPs at that loss over those of sparsity 48


def plot_sparsity(
    path: Path,
    title: str,
    sparsities: Sequence[int],
    panels: Sequence[Panel],
    differences: Sequence[Difference],
    report: dict[int, float],
) -> None:
    """Writes the figure as PNG.

    Args:
      sparsities: in rising order; colours follow it.
      panels: side by side, with one loss axis.
      differences: neighbouring sparsities at the largest budget; those not separated are named under the curves.
      report: sparsity -> the report's ratio to 48, printed beside ours.
    """
    figure = Figure(figsize=(5.4 * len(panels), 5.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(sparsities)))
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, sparsities, colours)
    axes[0].set_ylabel("validation loss (nats per token)")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles, labels, title="total / active experts", frameon=False, fontsize=9, title_fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(caption(panels, differences, report), fontsize=8.5, x=0.01, ha="left", linespacing=1.5)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG; one that stands is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", metadata={"Software": None})
    partial.replace(path)


def _draw(ax: Axes, panel: Panel, sparsities: Sequence[int], colours: np.ndarray) -> None:
    for i, s in enumerate(sparsities):
        label = f"{s}  ({8 * s} experts)"
        ax.plot(panel.flops[i], panel.loss[i], MARKERS[i % 5], color=colours[i], ms=5, mew=0, alpha=0.85, label=label)
        if panel.fit is not None and s in panel.fit.laws:
            _draw_law(ax, panel.fit, s, colours[i])
    if panel.at_loss is not None:
        ax.axhline(panel.at_loss, color="0.6", lw=0.8, ls=":", zorder=0)
    _flops_axis(ax)
    ax.set_xlabel(panel.axis)
    ax.set_title(panel.title, fontsize=10)
    _tidy(ax)


def _draw_law(ax: Axes, fit: Fit, curve: Curve, colour: str | np.ndarray) -> None:
    """A curve inside its data, and its band."""
    law = fit.laws[curve]
    grid = np.geomspace(law.low_flops, law.high_flops, 60)
    ax.plot(grid, [law.loss(c) for c in grid], color=colour, lw=1.0)
    low, high = paired_band(fit, grid)
    here = fit.sparsities.index(curve)
    ax.fill_between(grid, low[here], high[here], color=colour, alpha=0.3, lw=0)


def _flops_axis(ax: Axes, subs: Sequence[int | float] = (1, 1.5, 2, 3, 4, 6)) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=subs))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(_flops_label))
    ax.yaxis.set_major_locator(MaxNLocator(8))


def _tidy(ax: Axes) -> None:
    ax.grid(color="0.92", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _flops_label(value: float, _position: int | None) -> str:
    exponent = int(np.floor(np.log10(value) + 1e-9))
    lead = f"{value / 10**exponent:.3g}"
    return f"$10^{{{exponent}}}$" if lead == "1" else f"${lead}{{\\times}}10^{{{exponent}}}$"


def caption(panels: Sequence[Panel], differences: Sequence[Difference], report: dict[int, float]) -> str:
    """The FLOPs ratios with their intervals beside the report's, what the bands are, and what is separated."""
    lines = []
    for panel in panels:
        if panel.ratios:
            ours = "   ".join(f"{s}: {r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" for s, r in panel.ratios.items() if s != 48)
            lines.append(f"FLOPs for loss {panel.at_loss:.3f} over sparsity 48's, {panel.title}:   {ours}")
    if lines:
        printed = "   ".join(f"{s}: {r:.2f}" for s, r in sorted(report.items()))
        lines.append(f"The report, at its scale (about $10^{{21}}$ FLOPs):   {printed}")
        lines.append("Bands and brackets: central 90% of the bootstrap; bands leave out the noise that all sparsities share.")
    return "\n".join([*lines, separation(differences)])


def separation(differences: Sequence[Difference]) -> str:
    """Which neighbouring sparsities the paired differences tell apart, in words."""
    unknown = [f"{d.sparsity} and {d.sparser}" for d in differences if not np.isfinite(d.error)]
    close = [f"{d.sparsity} and {d.sparser}" for d in differences if np.isfinite(d.error) and not d.separated]
    apart = [f"{d.sparsity} {'>' if d.value > 0 else '<'} {d.sparser}" for d in differences if d.separated]
    parts = []
    if apart:
        parts.append(f"Validation loss at the largest budget, paired runs, separated at 5%: {', '.join(apart)}.")
    if close:
        parts.append(f"Not separated: {', '.join(close)}.")
    if unknown:
        parts.append(f"Nothing measures the error between {', '.join(unknown)}.")
    return "  ".join(parts)


class Rule(NamedTuple):
    """An update rule on a ladder of sizes."""

    name: str  # of its curve in the fit
    label: str
    colour: str
    flops: np.ndarray  # [cell] of the tuned runs
    loss: np.ndarray  # [cell], nats a token
    grids: dict[float, dict[float, float]]  # a size's FLOPs -> learning rate -> loss


def plot_rules(
    path: Path,
    title: str,
    rules: Sequence[Rule],
    fit: Fit | None,
    at_loss: float | None,
    entropy: Sequence[tuple[float, float]],
    note: str,
) -> None:
    """Writes the figure of tuned update rules as PNG: loss against FLOPs, loss against learning rate, entropy of the weights.

    Args:
      rules: two, in the order of `entropy`.
      fit, at_loss: the curves, and the loss at which their FLOPs are compared; None where the data does not carry a fit.
      entropy: of each matrix under the first rule and under the second.
      note: printed under the panels.
    """
    figure = Figure(figsize=(13.2, 4.9), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 1))
    for rule in rules:
        for budget, losses in rule.grids.items():
            left.plot([budget] * len(losses), list(losses.values()), "_", color=rule.colour, ms=9, alpha=0.35)
        left.plot(rule.flops, rule.loss, "o", color=rule.colour, ms=5, mew=0, alpha=0.85, label=rule.label)
        if fit is not None:
            _draw_law(left, fit, rule.name, rule.colour)
    if at_loss is not None:
        left.axhline(at_loss, color="0.6", lw=0.8, ls=":", zorder=0)
    _flops_axis(left, subs=(1, 2, 4, 7))
    left.set(xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    left.set_title("dots: tuned, every seed; dashes: the other learning rates", fontsize=9.5)
    left.legend(frameon=False, fontsize=9)
    _draw_tuning(middle, rules)
    names = [rule.label for rule in rules]
    if entropy:
        first, second = np.array(entropy).T
        right.plot(first, second, ".", color="0.25", ms=5, alpha=0.6)
        ends = [min(first.min(), second.min()) - 0.01, max(first.max(), second.max()) + 0.01]
        right.plot(ends, ends, color="0.6", lw=0.8, ls=":")
    right.set(xlabel=f"SVD entropy under {names[0]}", ylabel=f"SVD entropy under {names[1]}")
    right.set_title("every matrix at the end; 1 is a flat spectrum", fontsize=9.5)
    for ax in (left, middle, right):
        _tidy(ax)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(note, fontsize=8.5, x=0.01, ha="left", linespacing=1.5)
    save(figure, path)


def _draw_tuning(ax: Axes, rules: Sequence[Rule]) -> None:
    for rule in rules:
        for i, (_, losses) in enumerate(sorted(rule.grids.items())):
            rates = sorted(losses)
            values = [losses[r] for r in rates]
            ax.plot(rates, values, MARKERS[i % 5] + "-", color=rule.colour, ms=4, lw=0.9, alpha=0.8)
            best = min(rates, key=losses.get)
            ax.plot(best, losses[best], "o", mfc="none", color=rule.colour, ms=10, mew=0.9)
    for i, budget in enumerate(sorted(rules[0].grids)):
        ax.plot([], [], MARKERS[i % 5], color="0.4", ms=4, label=f"{_flops_label(budget, None)} FLOPs")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
    ax.set_xticks(sorted({r for rule in rules for losses in rule.grids.values() for r in losses}))
    ax.set(xlabel="peak learning rate", ylabel="validation loss, seed 0 (nats per token)")
    ax.set_title("tuning; the ring is the best of a size", fontsize=9.5)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))  # room for the legend
    ax.legend(frameon=False, fontsize=8.5, ncols=3, loc="upper center", columnspacing=1.0, handletextpad=0.2)
