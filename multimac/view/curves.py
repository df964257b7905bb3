"""Draws curves as text: rows and columns of marks with labelled axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points in one column are averaged. Curves take turns in cells that they share; one in front always wins."""

    mark: str
    points: Sequence[tuple[float, float]]
    in_front: bool = False


def plot(curves: Sequence[Curve], *, width: int = 72, height: int = 12, x_label: str = "step") -> list[str]:
    """Lines of at most `width` characters, the last one labelling x; none without points. All values are finite."""
    everything = [point for curve in curves for point in curve.points]
    if not everything:
        return []
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    labels = _labels(low, high, height)
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    canvas = [[" "] * columns for _ in range(height)]
    for number, curve in enumerate(curves):
        for column, y in _by_column(curve.points, left, right, columns).items():
            row = round((high - y) / (high - low) * (height - 1)) if high > low else height // 2
            if canvas[row][column] == " " or curve.in_front or column % len(curves) == number:
                canvas[row][column] = curve.mark
    lines = [
        f"{label:>{margin}} {'┤' if label else '│'}{''.join(row)}".rstrip()
        for label, row in zip(labels, canvas, strict=True)
    ]
    begin, end = f"{x_label} {left:g}", f"{right:g}" if right > left else ""
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    lines.append(f"{'':>{margin}}  {begin}{end:>{columns - len(begin)}}")
    return lines


def _by_column(points: Sequence[tuple[float, float]], left: float, right: float, columns: int) -> dict[int, float]:
    """Column -> mean y of its points."""
    found: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
        found.setdefault(column, []).append(y)
    return {column: sum(values) / len(values) for column, values in found.items()}


def _labels(low: float, high: float, height: int) -> list[str]:
    """The value at every fourth row and the last, "" at the others."""
    rows = {*range(0, height - 2, 4), height - 1} if high > low else {height // 2}
    values = [high - (high - low) * row / max(1, height - 1) for row in range(height)]
    return [f"{value:.3g}" if row in rows else "" for row, value in enumerate(values)]
