"""The console that all commands print to, and tables on one that is too narrow for them."""

from __future__ import annotations

from collections.abc import Iterator

import rich.console
from rich.console import ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from whisper_tuner.text import harmless


class Console(rich.console.Console):
    """Print as rich does, but without markup, and without characters that a terminal would obey."""

    def __init__(self, *, markup: bool = False, highlight: bool = False, **options):
        super().__init__(markup=markup, highlight=highlight, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def fitting(console: rich.console.Console, table: Table, *, heads: int = 1, folds: bool = False) -> RenderableType:
    """Return the table, or each row as a heading with its cells below it where the terminal is too narrow.

    heads: how many cells are the heading. folds: cells may take several lines instead, if no word is broken by that.
    """
    wide = console.options.update(max_width=10_000)
    if Measurement.get(console, wide, table).maximum <= console.width:
        return table
    if folds:
        words = {word for column in table.columns for cell in column.cells for word in str(cell).split()}
        if words <= {*"".join(segment.text for segment in console.render(table)).split()}:
            return table
    parts: list[RenderableType] = [Text(table.title, "bold")] if isinstance(table.title, str) else []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = [Text(": ").join((cell if isinstance(cell, Text) else Text(str(cell))).split("\n")) for cell in row]
        parts.append(Text(" ", "bold").join(filter(None, cells[:heads])))
        named = zip(table.columns[heads:], cells[heads:], strict=True)
        told = [Text.assemble(f"{column.header} ".replace("\n", " "), cell) for column, cell in named if cell]
        if told:
            parts.append(Padding(Text(", ", overflow="fold").join(told), (0, 0, 0, 2)))
    return Group(*parts, *([Text(table.caption)] if isinstance(table.caption, str) else []))
