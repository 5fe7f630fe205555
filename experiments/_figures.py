"""How the figures of training experiments look, and how they are written."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels(rows: int, columns: int, title: str) -> tuple[Figure, np.ndarray]:
    """A figure with a title and [rows, columns] axes."""
    figure = Figure(figsize=(5.8 * columns, 3.7 * rows + 0.5), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12)
    return figure, figure.subplots(rows, columns, squeeze=False)


def dress(ax: Axes, title: str, x: str, y: str) -> None:
    """Titles and labels, with units in them, a light grid, and no frame."""
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(color="0.92", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(ax: Axes, place: str) -> None:
    """The legend of what is there, if anything is."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8, loc=place)


def mark(ax: Axes, level: float, name: str) -> None:
    """A dashed line at a level of the y axis, with its name at the left end."""
    ax.axhline(level, color="0.3", lw=0.8, ls="--")
    ax.annotate(name, (0.005, level), xycoords=ax.get_yaxis_transform(), va="bottom", fontsize=8, color="0.3")


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the `width` values up to each, of fewer at the start and where some are not finite."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.stack([np.where(finite, values, 0.0), finite]), axis=1)
    before = np.concatenate([np.zeros((2, width)), sums], axis=1)[:, : len(values)]
    total, count = sums - before
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG; a figure that stands is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", metadata={"Software": None})
    partial.replace(path)
