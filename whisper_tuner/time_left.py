"""How much longer something takes, by its rate so far."""

from __future__ import annotations

FIRST_S = 5.0  # before that a rate says little


class Pace:
    """Estimates the time left of one thing that is done bit by bit. What the first look sees counts as done before."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, now: float, done: float, total: float) -> float | None:
        """Seconds; None in the first ones, before anything has moved, and at the end."""
        if self._first is None or done < self._first[1]:
            self._first = now, done
        since, before = self._first
        if now - since < FIRST_S or not before < done < total:
            return None
        return (total - done) * (now - since) / (done - before)
