"""What all loggers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from exogym.errors import ExogymError

from .event import Event
from .record import Record
from .summary import DEFAULT_INTERVAL, Summary


class Logger(ABC):
    """Takes the events of a run's ranks, in the process that called `fit`, and writes records of their figures.

    A subclass has to `write` a record. `fit` takes any callable that takes an event; of one that has them, it calls
    `close()` at the end, and sets `log_interval` (optimizer steps that a record sums up) if `fit` was given one.
    A logger is for one run.
    """

    def __init__(self, *, log_interval: int | None = None):
        self._summary = Summary(DEFAULT_INTERVAL if log_interval is None else log_interval)
        self._has_started = self._is_closed = False

    @property
    def log_interval(self) -> int:
        return self._summary.log_interval

    @log_interval.setter
    def log_interval(self, steps: int) -> None:
        self._summary.log_interval = steps

    def __call__(self, event: Event) -> None:
        if self._is_closed:
            raise ExogymError(f"this {type(self).__name__} is closed: make a new one for each run")
        if event["type"] == "start" and not self._has_started:
            self._has_started = True
            self.started(event)
        for record in self._summary.take(event):
            self.write(record)
        self.saw(event)

    def close(self) -> None:
        """Write what is left. Safe when called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for record in self._summary.finish():
                self.write(record)
        finally:
            self.ended()

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write a record that is complete."""

    def started(self, event: Event) -> None:  # noqa: B027
        """Act on the start of the first rank: `event` has the run's settings."""

    def saw(self, event: Event) -> None:  # noqa: B027
        """See any event, after the records that it completes."""

    def ended(self) -> None:  # noqa: B027
        """End: nothing more will come."""
