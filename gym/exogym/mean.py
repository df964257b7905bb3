"""A mean whose parts come one by one, each with its weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mean:
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
