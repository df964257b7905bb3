"""The charts of benchmarks. The same figures give the same file: nothing in it depends on the day or the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

INK, GREY, PALE = "#1f2328", "#59636e", "#d1d9e0"
COLOURS = ("#0a58a5", "#1a7f37", "#9a4a00", "#8a2a6a", "#006b75", "#8250df", "#1f2328")  # each 5:1 or more on white
MARKERS = "osD^vPX"
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "charts", "font.family": "DejaVu Sans", "font.size": 9}


class Point(NamedTuple):
    """A strategy in the chart of accuracy. Those of one group have a colour. sent: MB; accuracy: in per cent."""

    label: str
    group: str
    sent: float
    accuracy: float


def draw_accuracy(points: Sequence[Point], path: Path, *, least: float | None) -> None:
    """Write an SVG of accuracy against what is sent; `least` is the accuracy that all should have."""
    groups = list(dict.fromkeys(point.group for point in points))
    with _figure(path, (8.0, 4.6)) as figure:
        axes = figure.add_subplot()
        for point in points:
            number = groups.index(point.group)
            same = [other for other in points if other.group == point.group].index(point)
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[same % len(MARKERS)]}
            axes.plot([point.sent], [point.accuracy], linestyle="", markersize=6, label=point.label, **look)
        if least is not None:
            axes.axhline(least, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), label="3 % below AllReduce")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("MB sent by each node in training (log scale)", color=GREY)
        axes.set_ylabel("digits recognised, %", color=GREY)
        figure.legend(loc="outside right upper", frameon=False)
        _dress(axes)


def draw_steps(shapes: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Write an SVG: for each shape a panel, in it a bar for each way, of the seconds of a clip in each part."""
    with _figure(path, (8.0, 3.6)) as figure:
        panels = figure.subplots(len(shapes), squeeze=False)[:, 0]
        for axes, (shape, ways) in zip(panels, shapes.items(), strict=True):
            for row, parts in enumerate(ways.values()):
                left = 0.0
                for (part, seconds), colour in zip(parts.items(), COLOURS, strict=False):
                    axes.barh(row, 1000 * seconds, left=left, color=colour, label=None if row else part, height=0.7)
                    left += 1000 * seconds
                axes.annotate(f" {left:.0f}", (left, row), va="center", color=INK, fontsize=8)
            axes.set_yticks(range(len(ways)), ways, color=GREY)
            axes.invert_yaxis()
            axes.margins(x=0.08)
            axes.set_title(shape, loc="left", color=INK, fontsize=9)
            _dress(axes)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        panels[-1].set_xlabel("ms a clip of 2.5 s", color=GREY)


def draw_memory(series: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Write an SVG with a line for each process: its MB against rounds."""
    with _figure(path, (8.0, 3.2)) as figure:
        axes = figure.add_subplot()
        for colour, (name, points) in zip(COLOURS, sorted(series.items()), strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1, label=name)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rounds", color=GREY)
        axes.set_ylabel("MB", color=GREY)
        axes.legend(frameon=False)
        _dress(axes)


@contextlib.contextmanager
def _figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """Open a figure that is written to `path` when it is closed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, dpi=72, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _dress(axes: Axes) -> None:
    axes.tick_params(which="both", colors=GREY)
    axes.grid(color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(PALE)
