"""A table on a terminal that is too narrow for it: each row becomes a heading, with its cells below."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

USUAL_WIDTH = 80  # of a terminal


def fitting(console: Console, table: Table, *, heads: int = 1, below: int | None = None) -> RenderableType:
    """heads: how many cells are the heading. below: columns from which on the table folds its cells instead."""
    wide = console.options.update(max_width=10_000)
    if Measurement.get(console, wide, table).maximum <= console.width or (below and console.width >= below):
        return table
    parts: list[RenderableType] = [Text(table.title, "bold")] if isinstance(table.title, str) else []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row]
        parts.append(Text(" ", "bold").join(filter(None, cells[:heads])))
        named = zip(table.columns[heads:], cells[heads:], strict=True)
        told = [Text.assemble(f"{column.header} ", cell) for column, cell in named if cell]
        parts.append(Padding(Text(", ", overflow="fold").join(told), (0, 0, 0, 2)))
    return Group(*parts)
