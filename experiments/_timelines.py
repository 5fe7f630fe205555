"""The figures of `experiments.pipeline_schedules`: timelines, and what chunks and microbatches cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments._schedules import EMPTY, Unit
from experiments._simulator import Ran, Timeline, exposed_exchanges

# Forward, input gradients, weight gradients: colour maps of which a chunk takes a shade.
MAPS = {"forward": "Blues", "backward": "Greens", "weights": "Oranges"}
EXCHANGE, EMPTY_COLOUR = "#c0392b", "0.85"
WORDS = {"forward": "forward", "backward": "input gradients", "weights": "weight gradients"}
LANES = {"compute": "compute", "exchange": "exchange", "send": "transfer", "store": "to host", "fetch": "from host"}


def plot_timelines(path: Path, title: str, timelines: Sequence[Timeline], captions: Sequence[str], focus: Timeline) -> None:
    """Writes one panel a schedule, all on one time axis, and below them one tick of a stage of `focus` lane by lane."""
    rows = len(timelines[0].lanes)
    figure = Figure(figsize=(15, 1.1 + len(timelines) * (0.55 + 0.27 * rows) + 2.4), dpi=130, layout="constrained")
    panels = figure.subplots(len(timelines) + 1, 1, height_ratios=[*[0.3 + 0.27 * rows] * len(timelines), 1.7])
    end = max(timeline.makespan for timeline in timelines)
    for ax, timeline, caption in zip(panels, timelines, captions, strict=False):
        _draw(ax, timeline, end)
        ax.set_title(caption, fontsize=10, loc="left")
    panels[-2].set_xlabel("ms; the number is the microbatch, the shade the chunk (DualPipe: the direction)", fontsize=9)
    _draw_lanes(panels[-1], focus)
    patches = [Patch(color=_colour(kind, 1, 2), label=WORDS[kind]) for kind in MAPS]
    patches += [
        Patch(color=EXCHANGE, label="exchange that is not hidden"),
        Patch(color=EMPTY_COLOUR, label="empty unit computed"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


def _draw(ax: Axes, timeline: Timeline, end: float) -> None:
    """A row a stage. In a pair the forward unit is the upper half, the backward unit the lower."""
    for device, lanes in enumerate(timeline.lanes):
        for item in timeline.schedule.items[device]:
            paired = item.forward is not None and item.backward is not None
            for kind, unit in zip(("forward", "backward", "weights"), item, strict=True):
                if unit is None or unit == EMPTY:
                    continue
                start, stop = _span(lanes, kind, unit)
                half = paired and kind != "weights"
                bottom, height = device + (0.36 if half and kind == "backward" else 0.0), 0.34 if half else 0.7
                _bar(ax, timeline, kind, unit, start, stop, bottom, height)
                if stop - start > end / 130:
                    ax.text((start + stop) / 2, bottom + height / 2, unit[1] + 1, ha="center", va="center", fontsize=6)
        empty = [(r.start, r.end) for r in lanes["compute"] if r.task.unit == EMPTY]
        exposed = [(start, stop - start) for start, stop in exposed_exchanges(lanes)]
        ax.broken_barh([(start, stop - start) for start, stop in empty], (device + 0.78, 0.1), color=EMPTY_COLOUR, lw=0)
        ax.broken_barh(exposed, (device + 0.78, 0.1), color=EXCHANGE, lw=0)
    ax.set_xlim(0, end)
    ax.set_ylim(len(timeline.lanes), 0)
    ax.set_yticks(
        [d + 0.35 for d in range(len(timeline.lanes))], [f"stage {d}" for d in range(len(timeline.lanes))], fontsize=7
    )
    _clean(ax)


def _span(lanes: dict[str, list[Ran]], kind: str, unit: Unit) -> tuple[float, float]:
    """From the first to the last moment of a unit, its exchanges included."""
    ran = [r for lane in ("compute", "exchange") for r in lanes.get(lane, ()) if (r.task.kind, r.task.unit) == (kind, unit)]
    return min(r.start for r in ran), max(r.end for r in ran)


def _bar(ax: Axes, timeline: Timeline, kind: str, unit: tuple, start: float, end: float, bottom: float, height: float) -> None:
    chunks = len(timeline.schedule.device_of) // len(timeline.lanes)
    colour = EMPTY_COLOUR if unit == EMPTY else _colour(kind, unit[0] // len(timeline.lanes), chunks)
    ax.broken_barh([(start, end - start)], (bottom, height), facecolor=colour, edgecolor="white", lw=0.4)


def _colour(kind: str, chunk: int, chunks: int):
    return matplotlib.colormaps[MAPS[kind]](0.3 + 0.35 * chunk / max(chunks - 1, 1))


def _draw_lanes(ax: Axes, timeline: Timeline) -> None:
    """Two ticks in the middle of the steady phase of the first stage, a row a lane (report, figure 7)."""
    lanes, items = timeline.lanes[0], timeline.schedule.items[0]
    paired = [i for i, item in enumerate(items) if item.forward not in (None, EMPTY) and item.backward not in (None, EMPTY)]
    if not paired:
        ax.set_axis_off()
        return
    middle = items[paired[len(paired) // 2]]
    start = min(r.start for r in lanes["compute"] if r.task.unit == middle.forward and r.task.kind == "forward")
    width = 2 * (max(r.end for r in lanes["compute"] if r.task.unit == middle.weights) - start)
    for row, lane in enumerate(LANES):
        for task, begin, end in lanes.get(lane, ()):
            if end <= start or begin >= start + width or end == begin:
                continue
            # A copy has the colour of the unit that it keeps or brings back.
            kind = {"store": "forward", "fetch": "backward"}.get(task.kind, task.kind)
            _bar(ax, timeline, kind, task.unit, begin, end, row + 0.1, 0.8)
            middle_of = (max(begin, start) + min(end, start + width)) / 2
            if min(end, start + width) - max(begin, start) > width / 60 and task.unit != EMPTY:
                ax.text(middle_of, row + 0.5, task.unit[1] + 1, ha="center", va="center", fontsize=7)
    ax.set_xlim(start, start + width)
    ax.set_ylim(len(LANES), 0)
    ax.set_yticks([r + 0.5 for r in range(len(LANES))], LANES.values(), fontsize=8)
    ax.set_title(
        f"{timeline.schedule.name}, two ticks of the steady phase on stage 0: what runs beside what", fontsize=10, loc="left"
    )
    ax.set_xlabel("ms", fontsize=9)
    _clean(ax)


class Curve(NamedTuple):
    """One line of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """Curves over one axis of powers of two or small integers."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    flat: Sequence[tuple[str, float]] = ()  # label and height of dotted lines


def plot_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Writes panels side by side."""
    figure = Figure(figsize=(4.9 * len(panels), 4.3), dpi=140, layout="constrained")
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve in panel.curves:
            ax.plot(curve.x, curve.y, "o-", label=curve.label, ms=5)
        ticks = sorted({x for curve in panel.curves for x in curve.x})
        for i, (label, value) in enumerate(_grouped(panel.flat)):
            ax.axhline(value, color="0.55", lw=0.9, ls=":")
            right = i % 2 == 0  # labels of neighbouring lines on different sides
            ax.annotate(label, (0.99 if right else 0.01, value), xycoords=("axes fraction", "data"), fontsize=7.5, color="0.35",
                        ha="right" if right else "left", va="bottom")  # fmt: skip
        ax.set_ylim(0, None)
        ax.yaxis.set_major_locator(MaxNLocator(7))
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        ax.set_xlabel(panel.x_label)
        ax.set_ylabel(panel.y_label)
        ax.set_title(panel.title, fontsize=10)
        ax.legend(frameon=False, fontsize=8.5)
        ax.grid(color="0.92", lw=0.6)
        _clean(ax)
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


def _grouped(flat: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Lines in rising order; those within 2% of each other are one."""
    found: list[tuple[str, float]] = []
    for label, value in sorted(flat, key=lambda line: line[1]):
        if found and value < 1.02 * found[-1][1]:
            found[-1] = f"{found[-1][0]}, {label}", found[-1][1]
        else:
            found.append((label, value))
    return found


def _clean(ax: Axes) -> None:
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")  # a figure that stands is whole
    figure.savefig(partial, format="png", metadata={"Software": None})
    partial.replace(path)
