"""The chart of benchmarks/strategies.py: accuracy against bytes sent, a point for each strategy, its name beside it.

The same figures give the same file: text is drawn as shapes, and nothing in it depends on the day or the machine. It
has a background of its own, so that it can be read on a dark page too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

SIZE = 8.0, 4.6  # inches
INK, GREY, PALE = "#1f2328", "#59636e", "#d1d9e0"
COLOURS = ("#1f2328", "#0a58a5", "#006b75", "#1a7f37", "#9a4a00", "#8a2a6a", "#8250df")  # each 5:1 or more on white
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "strategies", "font.family": "DejaVu Sans", "font.size": 9}
BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # no grid behind a label
MARGIN = 2.0  # pixels between labels
# Where a label may stand, best first: how far from its point, in pixels, and at which of its sides.
PLACES = [(distance, dx, dy) for distance, (dx, dy) in product(
    (7, 14, 22, 32, 44, 58, 74, 92), ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
)]  # fmt: skip


class Point(NamedTuple):
    """Points of one group have a colour. sent: MB; accuracy: in per cent."""

    label: str
    group: str
    sent: float
    accuracy: float


def draw_chart(points: Sequence[Point], path: Path, *, least: float | None) -> list[Bbox]:
    """Write an SVG; `least` is the accuracy that all should have. Returns where points and texts are, in pixels."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, dpi=72, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _dress(axes, points, least)
        colour_of = dict(zip(dict.fromkeys(point.group for point in points), COLOURS, strict=False))
        for point in points:
            axes.plot([point.sent], [point.accuracy], "o", color=colour_of[point.group], markersize=5)
        figure.canvas.draw()  # fixes where everything is
        figure.set_layout_engine("none")
        taken = _label(axes, points, colour_of)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return taken


def _dress(axes: Axes, points: Sequence[Point], least: float | None) -> None:
    axes.set_xscale("log")
    axes.set_xlim(min(point.sent for point in points) / 2, max(point.sent for point in points) * 4)
    values = [point.accuracy for point in points] + ([least] if least is not None else [])
    room = max(0.5, 0.15 * (max(values) - min(values)))
    axes.set_ylim(min(values) - room, max(values) + room)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("MB sent by each node in training (log scale)", color=GREY)
    axes.set_ylabel("digits recognised, %", color=GREY)
    axes.tick_params(which="both", colors=GREY)
    axes.grid(color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(PALE)
    if least is not None:
        axes.axhline(least, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            "3 % below AllReduce", (1, least), (0, -3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="top", color=GREY, fontsize=8,
        )  # fmt: skip


def _label(axes: Axes, points: Sequence[Point], colour_of: dict[str, str]) -> list[Bbox]:
    """Each beside its point, in the nearest place where it covers nothing else; a thin line leads there from afar."""
    renderer = axes.figure.canvas.get_renderer()
    at = [axes.transData.transform((point.sent, point.accuracy)) for point in points]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in at]
    taken += [text.get_window_extent(renderer) for text in axes.texts]
    for (x, y), point in sorted(zip(at, points, strict=True), key=lambda each: (-each[0][1], each[0][0])):
        text = axes.text(0, 0, point.label, color=colour_of[point.group], transform=None, va="center", bbox=BOX)
        size = text.get_window_extent(renderer)
        box, far = _free_place(x, y, size.width, size.height, taken, axes.bbox)
        taken.append(box)
        text.set_position((box.x0, (box.y0 + box.y1) / 2))
        if far:
            end = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
            axes.plot([x, end[0]], [y, end[1]], color=colour_of[point.group], linewidth=0.5, transform=None)
    return taken


def _free_place(
    x: float, y: float, width: float, height: float, taken: Sequence[Bbox], inside: Bbox
) -> tuple[Bbox, bool]:
    """The box of a label for a point at (x, y), and whether it is far away. The last place, if none is free."""
    for distance, dx, dy in PLACES:
        left = x - width / 2 + dx * (width / 2 + distance)
        box = Bbox.from_bounds(left, y - height / 2 + dy * (distance if dx else height / 2 + distance), width, height)
        fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
        if fits and not any(box.padded(MARGIN).overlaps(other) for other in taken):
            break
    return box, distance > PLACES[0][0]
