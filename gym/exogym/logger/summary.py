"""Records of a run's figures, made of the events of all ranks: when steps are complete, and what belongs to which."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from exogym.config import at_least

from .event import Event, Mean

DEFAULT_INTERVAL = 10  # optimizer steps
IN_TRANSIT = 8  # steps of one rank whose events may still be under way when another's have come
REPEATED = (  # at the end, from the last record that had them
    *("step", "epoch", "ranks", "loss", "perplexity", "lr"),
    *("val_loss", "val_perplexity", "local_val_loss", "local_val_perplexity", "val_accuracy"),
)
FIGURES = ("validation", "correlation")  # kinds of events besides steps that are records
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
        step = event["step"]
        replaced: Event | None = event
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
        if told is None or told["step"] != event["step"] or Spent.of_step(told) == Spent():
            self._late.add(Spent(event.get("bytes") or 0, event.get("seconds") or 0.0))
        if event["type"] == "round":
            self._agreed = event["step"]

    def _slowest(self) -> float:
        """Return the step to which all ranks have come that are not gone."""
        foremost = max(self._reached.values())
        oldest = max(foremost - 2 * self._steps_in_round, min(self._agreed, foremost)) - IN_TRANSIT
        for rank in [rank for rank, step in self._reached.items() if step < oldest]:
            del self._reached[rank]
            self._told.pop(rank, None)
        slowest = min(self._reached.values())
        assert self._first is not None, "some rank has told something"
        is_waited_for = len(self._reached) < self._num_nodes and self._first >= oldest
        return min(slowest, self._first) if is_waited_for else slowest

    def _complete(self, until: float) -> Iterator[Record]:
        """Records up to this step, in the order of steps."""
        open_until = math.inf if until >= self._total_steps else until  # the last interval may be shorter
        ended = [(max(step for _, step in steps), 0, "train", end) for end, steps in self._open.items()]
        ended = [entry for entry in ended if entry[-1] <= open_until]
        others = [(step, 1, kind, step) for kind, step in self._waiting if step <= until]
        for step, _, kind, end in sorted([*ended, *others], key=lambda entry: entry[:2]):
            self._given[kind] = step
            if kind == "train":
                yield self._record(kind, self._of_steps(self._open.pop(end)))
                continue
            event = self._waiting.pop((kind, step))
            if kind == "correlation":
                figures: dict[str, Any] = {"correlation": event.get("value")}
            else:  # a validation has only one loss where ranks have the same weights
                figures = of_losses(
                    val_loss=event.get("loss"), local_val_loss=event.get("local_loss", event.get("loss"))
                ) | {"val_accuracy": event.get("accuracy")}
            yield self._record(kind, _at(event) | figures)

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
        assert self._began is not None, "there was an event"
        self._last |= {key: figures[key] for key in REPEATED if figures.get(key) is not None}
        return Record(kind=kind, seconds=self._clock() - self._began, **figures)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Figures at one optimizer step. What is not known, or does not belong to the kind, is None.

    kind: "train" sums up the last `log_interval` steps, "end" the whole run; besides "validation" and "correlation".
    epoch: counted from 1. seconds: since the first event. ranks: how many took part.
    loss: weighted by target tokens, over these steps and all ranks; at the end, that of the last interval.
    val_loss: of the averaged model. local_val_loss: the mean of the ranks' own models. Perplexities are exp of a loss.
    val_accuracy: from 0 to 1, where the model gives it.
    samples_per_s, tokens_per_s: of all ranks together, validation and checkpoints apart. Where the model gives a bare
    loss, tokens are samples.
    bytes_per_step, bytes_total: sent by all ranks together in exchanges, since this process began; the first weights,
    validation and checks are apart.
    bandwidth: bytes a second that one rank sent on average while it was in an exchange, waiting included.
    memory: bytes, of the rank that held most. correlation: see mean_correlation.
    """

    kind: str
    step: int
    epoch: int
    seconds: float
    ranks: int | None = None
    loss: float | None = None
    perplexity: float | None = None
    val_loss: float | None = None
    val_perplexity: float | None = None
    local_val_loss: float | None = None
    local_val_perplexity: float | None = None
    val_accuracy: float | None = None
    correlation: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    bytes_per_step: float | None = None
    bytes_total: int | None = None
    bandwidth: float | None = None
    memory: int | None = None

    def figures(self) -> dict[str, float]:
        """Return what is known, without kind and step."""
        return {key: value for key, value in vars(self).items() if value is not None and key not in ("kind", "step")}


@dataclass
class Spent:
    """On exchanges: bytes sent, and seconds of all ranks."""

    bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of_step(cls, event: Event) -> Spent:
        return cls(event.get("bytes") or 0, event.get("seconds_exchanging") or 0.0)

    def add(self, other: Spent) -> None:
        self.bytes += other.bytes
        self.seconds += other.seconds


@dataclass
class Sums:
    """Over steps and ranks. steps: optimizer steps, however many ranks made them; duration: seconds that they took."""

    loss: Mean = field(default_factory=Mean)
    norm: Mean = field(default_factory=Mean)
    samples: int = 0
    tokens: float = 0.0
    steps: int = 0
    duration: float = 0.0
    memory: int = 0
    spent: Spent = field(default_factory=Spent)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Sums:
        """events: of steps, at least one."""
        sums, events = cls(), list(events)
        for event in events:
            tokens, loss, norm = event.get("tokens") or 0, event.get("loss"), event.get("grad_norm")
            if loss is not None and math.isfinite(loss):
                sums.loss.add(loss * tokens, tokens)
            if norm is not None and math.isfinite(norm):
                sums.norm.add(norm, 1)
            sums.samples += event.get("samples") or 0
            sums.tokens += tokens
            sums.memory = max(sums.memory, event.get("memory") or 0)
            sums.spent.add(Spent.of_step(event))
        sums.steps = len({event["step"] for event in events})
        # Of the mean rank: one that is lost has made fewer steps, and one that is fast waits in the last of a round.
        sums.duration = sum(event.get("seconds") or 0.0 for event in events) / len(events) * sums.steps
        return sums

    def add(self, other: Sums) -> None:
        """Add all but losses and norms, which are of an interval only."""
        self.samples += other.samples
        self.tokens += other.tokens
        self.steps += other.steps
        self.duration += other.duration
        self.memory = max(self.memory, other.memory)
        self.spent.add(other.spent)

    def figures(self) -> dict[str, Any]:
        return {
            "grad_norm": self.norm.value(),
            "samples_per_s": _ratio(self.samples, self.duration),
            "tokens_per_s": _ratio(self.tokens, self.duration),
            "bytes_per_step": _ratio(self.spent.bytes, self.steps),
            "bandwidth": _ratio(self.spent.bytes, self.spent.seconds),
            "memory": self.memory or None,
        }


def of_losses(**losses: float | None) -> dict[str, float | None]:
    """Return each loss with its perplexity; None for one that is not finite."""
    found: dict[str, float | None] = {}
    for name, loss in losses.items():
        found[name] = found[name.replace("loss", "perplexity")] = None
        if loss is not None and math.isfinite(loss):
            found[name] = loss
            try:
                found[name.replace("loss", "perplexity")] = math.exp(loss)
            except OverflowError:
                found[name.replace("loss", "perplexity")] = math.inf
    return found


def _at(event: Event) -> dict[str, int]:
    return {"step": event["step"], "epoch": event.get("epoch", 0) + 1}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
