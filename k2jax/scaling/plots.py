"""The figure of the sparsity sweep: loss against training FLOPs, one curve a sparsity (report, figure 5)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from k2jax.scaling.laws import Difference, Fit, Interval, paired_band

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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")  # a figure that stands is whole
    figure.savefig(partial, format="png", metadata={"Software": None})
    partial.replace(path)


def _draw(ax: Axes, panel: Panel, sparsities: Sequence[int], colours: np.ndarray) -> None:
    for i, s in enumerate(sparsities):
        label = f"{s}  ({8 * s} experts)"
        ax.plot(panel.flops[i], panel.loss[i], MARKERS[i % 5], color=colours[i], ms=5, mew=0, alpha=0.85, label=label)
        if panel.fit is None or s not in panel.fit.laws:
            continue
        law = panel.fit.laws[s]
        grid = np.geomspace(law.low_flops, law.high_flops, 60)
        ax.plot(grid, [law.loss(c) for c in grid], color=colours[i], lw=1.0)
        low, high = paired_band(panel.fit, grid)
        here = panel.fit.sparsities.index(s)
        ax.fill_between(grid, low[here], high[here], color=colours[i], alpha=0.3, lw=0)
    if panel.at_loss is not None:
        ax.axhline(panel.at_loss, color="0.6", lw=0.8, ls=":", zorder=0)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(_flops_label))
    ax.yaxis.set_major_locator(MaxNLocator(8))
    ax.set_xlabel(panel.axis)
    ax.set_title(panel.title, fontsize=10)
    ax.grid(color="0.92", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _flops_label(value: float, _position: int) -> str:
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
