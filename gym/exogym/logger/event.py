"""Events, in which ranks tell of their work: dicts, to any callable that takes one. TrainNode lists their types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from typing import Any

Event = dict[str, Any]
Events = Callable[[Event], None]


class NullLogger:
    def __call__(self, event: Event) -> None:
        pass


def plain(value: Any) -> Any:
    """Return a setting as JSON can hold it: dataclasses become dicts, and what is no number or text its name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value)):
        return value
    text = getattr(value, "__name__", None) or str(value)
    return type(value).__name__ if " at 0x" in text else text


@dataclass
class Mean:
    """A mean whose parts come one by one, each with its weight."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float) -> None:
        self.total += total
        self.weight += weight

    def fade(self, keep: float) -> None:
        """Let what was added so far count less than what comes."""
        self.total *= keep
        self.weight *= keep

    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None
