"""The console that all commands print to, and tables on one that is too narrow for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rich.console
from rich.cells import cell_len
from rich.console import ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from whisper_tuner.text import harmless

# What is copied, and so gets no new line of ours: what is between backquotes; a line that is far indented; a command
# after a colon or at a line's beginning; what follows a line's last colon or gap, if that holds a slash and is no
# sentence. A terminal may cut these, but puts no new line there.
COPIED = re.compile(
    r"`[^`\n]+`|^ {4}.+|(?:(?<=: )|^ *)(?:multimac|python|ssh|ssh-[\w-]+|cp|hf|less) .*?(?=[.,;] |$)"
    r"|(?<=: |  )[^:,;\n]*/[^:,;\n]*(?<!\.)$",
    re.MULTILINE,
)
NO_SPACE = "\ue000"  # a character that nothing printed has


class Console(rich.console.Console):
    """Print as rich does, but without markup and emoji, and without characters that a terminal would obey.

    soft_wrap: on a terminal lines end at spaces all the same, but for what is to be copied; elsewhere they stay whole.
    """

    def __init__(self, *, markup: bool = False, highlight: bool = False, emoji: bool = False, **options):
        super().__init__(markup=markup, highlight=highlight, emoji=emoji, **options)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        if self.is_terminal and (self.soft_wrap if soft_wrap is None else soft_wrap):
            objects = tuple(wrapped(one, self.width) if isinstance(one, str) else one for one in objects)
        super().print(*objects, soft_wrap=soft_wrap, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def wrapped(text: str, width: int) -> str:
    """Begin new lines at spaces, as far indented as their first one; none within a word or what is to be copied."""
    rows: list[str] = []
    text = "\n".join(line if cell_len(line) <= width else _with_short_paths(line) for line in text.split("\n"))
    for line in COPIED.sub(lambda found: found[0].replace(" ", NO_SPACE), text).split("\n"):
        first, *words = re.findall(r" *[^ ]+", line) or [""]
        rows.append(first)
        for word in words:
            if cell_len(rows[-1] + word) > width:
                rows.append(first[: -len(first.lstrip())] + word.lstrip())
            else:
                rows[-1] += word
    return "\n".join(rows).replace(NO_SPACE, " ")


def _with_short_paths(line: str) -> str:
    """Write paths below the current folder from there, others below the home folder with `~`, as a shell reads both."""
    with contextlib.suppress(OSError, RuntimeError):  # the current folder is gone, or this user has no home
        line = re.sub(rf"(?<![\w./~:-]){re.escape(str(Path.cwd()))}/(?=[^\s/])", "", line)
        line = re.sub(rf"(?<!\S){re.escape(str(Path.home()))}/", "~/", line)  # in quotes no shell would read it
    return line


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
            parts.append(Padding(Text("\n" if folds else ", ", overflow="fold").join(told), (0, 0, 0, 2)))
    return Group(*parts, *([Text(table.caption)] if isinstance(table.caption, str) else []))
