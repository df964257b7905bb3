"""Makes records of the events of all ranks: when the ranks' steps are complete, and what belongs to which record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from exogym.config import at_least

from .event import Event
from .record import Record, Spent, Sums, of_losses

DEFAULT_INTERVAL = 10  # optimizer steps
IN_TRANSIT = 8  # steps of one rank whose events may still be under way when another's have come
REPEATED = (  # at the end, from the last record that had them
    *("step", "epoch", "ranks", "loss", "perplexity", "lr"),
    *("val_loss", "val_perplexity", "local_val_loss", "local_val_perplexity"),
)
Rank = Hashable


class Summary:
    """Takes the events of all ranks, in any order between ranks, and gives records in the order of steps.

    A step belongs to one interval of `log_interval` steps, and counts once: a rank that makes a step again replaces
    what it told of it, unless the interval's record has been given. A record is given once all ranks have come to its
    step. Between two agreements ranks are at most `steps_in_round` steps apart; a rank that is further behind is gone,
    and nobody waits for it. So what is kept is bounded.
    """

    def __init__(self, log_interval: int = DEFAULT_INTERVAL, *, clock: Callable[[], float] = time.monotonic):
        self.log_interval = log_interval
        self._clock = clock
        self._began: float | None = None
        self._num_nodes, self._steps_in_round = 1, 1
        self._total_steps = math.inf
        self._first: int | None = None  # where ranks are that have told nothing yet
        self._agreed = 0  # the step of the last round's end
        self._reached: dict[Rank, int] = {}  # the last step of each rank
        self._told: dict[Rank, Event] = {}  # the event of its last step
        self._open: dict[int, dict[tuple[Rank, int], Event]] = {}  # last step of an interval -> its steps
        self._waiting: dict[tuple[str, int], Event] = {}  # validations and correlations, by kind and step
        self._given: dict[str, int] = {}  # kind -> last step of which the record was given
        self._late = Spent()  # told when the record of its step had been given
        self._total = Sums()
        self._last: dict[str, Any] = {}

    @property
    def log_interval(self) -> int:
        return self._log_interval

    @log_interval.setter
    def log_interval(self, steps: int) -> None:
        at_least("log_interval", steps, 1)
        self._log_interval = int(steps)

    def take(self, event: Event) -> list[Record]:
        """Return the records that are complete now."""
        if self._began is None:
            self._began = self._clock()
        kind, rank, step = event["type"], event.get("host", event.get("rank")), event.get("step")
        self._total_steps = event.get("total_steps") or self._total_steps
        if kind == "start":
            self._num_nodes = max(self._num_nodes, event.get("num_nodes") or 1)
            self._steps_in_round = max(self._steps_in_round, event.get("steps_in_round") or 1)
        if kind == "start" or rank is None or step is None:
            return []
        if kind == "step":
            self._add_step(rank, event)
        elif kind in ("round", "stop"):
            self._add_agreement(rank, event)
        elif kind in FIGURES and step > self._given.get(kind, -1):
            self._waiting.setdefault((kind, step), event)
        self._reached[rank] = step
        if self._first is None:
            self._first = step - (kind == "step")
        return list(self._complete(self._slowest()))

    def finish(self) -> list[Record]:
        """Return the records that are left, and that of the end; none if there was no event."""
        if self._began is None:
            return []
        records = list(self._complete(math.inf))
        self._total.spent.add(self._late)
        self._late = Spent()
        last = {"step": max(self._reached.values(), default=0), "epoch": 1, **self._last}
        figures = {**last, **self._total.figures(), "bytes_total": self._total.spent.bytes}
        return [*records, self._record("end", figures)]

    def _add_step(self, rank: Rank, event: Event) -> None:
        step, replaced = event["step"], event
        if step > self._given.get("train", 0):
            steps = self._open.setdefault(-(-step // self.log_interval) * self.log_interval, {})
            replaced = steps.get((rank, step))
            steps[rank, step] = event
        if replaced:  # it does not count, but what it sent has been sent
            self._late.add(Spent.of_step(replaced))
        self._told[rank] = event

    def _add_agreement(self, rank: Rank, event: Event) -> None:
        """Add what a round cost that ends after its last step; else the step that ended it has told that."""
        told = self._told.get(rank)
        if told is None or told["step"] != event["step"] or not Spent.of_step(told):
            self._late.add(Spent.of_round(event))
        if event["type"] == "round":
            self._agreed = event["step"]

    def _slowest(self) -> float:
        """Return the step to which all ranks have come that are not gone."""
        foremost = max(self._reached.values())
        oldest = max(foremost - 2 * self._steps_in_round, min(self._agreed, foremost)) - IN_TRANSIT
        for rank in [rank for rank, step in self._reached.items() if step < oldest]:
            del self._reached[rank]
            self._told.pop(rank, None)
        is_waited_for = len(self._reached) < self._num_nodes and self._first >= oldest
        return min([*self._reached.values(), *([self._first] if is_waited_for else [])])

    def _complete(self, until: float) -> Iterator[Record]:
        """Records up to this step, in the order of steps."""
        open_until = math.inf if until >= self._total_steps else until  # the last interval may be shorter
        ended = [(max(step for _, step in steps), 0, end) for end, steps in self._open.items() if end <= open_until]
        others = [(step, 1, kind) for kind, step in self._waiting if step <= until]
        for step, _, what in sorted([*ended, *others], key=lambda entry: entry[:2]):
            if isinstance(what, int):
                self._given["train"] = step
                yield self._record("train", self._of_steps(self._open.pop(what)))
            else:
                self._given[what] = step
                event = self._waiting.pop((what, step))
                yield self._record(what, _at(event) | FIGURES[what](event))

    def _of_steps(self, steps: dict[tuple[Rank, int], Event]) -> dict[str, Any]:
        sums = Sums.of(steps.values())
        sums.spent.add(self._late)
        self._late = Spent()
        self._total.add(sums)
        last = max(step for _, step in steps)
        at_last = [event for (_, step), event in steps.items() if step == last]
        rates = [event["lr"] for event in at_last if event.get("lr") is not None]
        return {
            **_at(at_last[0]),
            **of_losses(loss=sums.loss.value()),
            **sums.figures(),
            "ranks": len({rank for rank, _ in steps}),
            "lr": max(rates, default=None),  # that of a rank which has just come may be lower
            "bytes_total": self._total.spent.bytes,
        }

    def _record(self, kind: str, figures: dict[str, Any]) -> Record:
        self._last |= {key: figures[key] for key in REPEATED if figures.get(key) is not None}
        return Record(kind=kind, seconds=self._clock() - self._began, **figures)


def _at(event: Event) -> dict[str, int]:
    return {"step": event["step"], "epoch": event.get("epoch", 0) + 1}


def _validation(event: Event) -> dict[str, Any]:
    """Read a validation's losses; there is only one where ranks have the same weights."""
    return of_losses(val_loss=event.get("loss"), local_val_loss=event.get("local_loss", event.get("loss")))


def _correlation(event: Event) -> dict[str, Any]:
    return {"correlation": event.get("value")}


FIGURES = {"validation": _validation, "correlation": _correlation}
