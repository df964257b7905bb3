"""Where events go. Any callable that takes a dict will do; these are the ones that ship.

Types of event: see TrainNode. Training never waits for what a sink does with them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Events = Callable[[Event], None]

COLUMNS = (
    *("type", "rank", "step", "epoch", "round", "loss", "lr", "tokens", "samples", "grad_norm", "seconds"),
    *("memory", "bytes", "digest", "steps_per_epoch", "total_steps", "trainable", "device"),
)


class NullLogger:
    def __call__(self, event: Event) -> None:
        pass


class CsvLogger:
    """One row an event, flushed at once; what an event does not have stays empty."""

    def __init__(self, path: str | Path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("w", newline="", encoding="utf-8")  # noqa: SIM115 (closed by close())
        self._rows = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._rows.writeheader()

    def __call__(self, event: Event) -> None:
        self._rows.writerow(event)
        self._file.flush()

    def close(self) -> None:
        self._file.close()
