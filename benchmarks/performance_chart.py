"""The chart of benchmarks/step_cost.py: a bar for each way to train, made of the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SIZE = 8.0, 3.6  # inches
INK, GREY, PALE = "#1f2328", "#59636e", "#d1d9e0"
COLOURS = ("#0a58a5", "#1a7f37", "#9a4a00", "#8a2a6a")  # each 5:1 or more on white
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "performance", "font.family": "DejaVu Sans", "font.size": 9}

Parts = Mapping[str, float]
"""Seconds a clip in each part of a step."""


def draw_steps(shapes: Mapping[str, Mapping[str, Parts]], path: Path) -> None:
    """Write an SVG: for each shape a panel, in it a bar for each way."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, dpi=72, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(shapes), squeeze=False)[:, 0]
        for axes, (shape, ways) in zip(panels, shapes.items(), strict=True):
            _draw(axes, shape, ways)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        panels[-1].set_xlabel("ms a clip of 2.5 s", color=GREY)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw(axes: Axes, shape: str, ways: Mapping[str, Parts]) -> None:
    for row, parts in enumerate(ways.values()):
        left = 0.0
        for (part, seconds), colour in zip(parts.items(), COLOURS, strict=True):
            width = max(0.0, 1000 * seconds)  # a difference of two measurements may come out below 0
            axes.barh(row, width, left=left, color=colour, label=part if row == 0 else None, height=0.7)
            left += width
        axes.annotate(f" {left:.0f}", (left, row), va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(ways)), ways, color=GREY)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_title(shape, loc="left", color=INK, fontsize=9)
    axes.tick_params(colors=GREY)
    axes.grid(axis="x", color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(PALE)
