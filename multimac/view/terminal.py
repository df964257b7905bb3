"""The console that all commands print to."""

from __future__ import annotations

from collections.abc import Iterator

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from whisper_tuner.text import harmless


class Console(rich.console.Console):
    """rich's own, but names and texts from elsewhere are shown without what a terminal would obey."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))
