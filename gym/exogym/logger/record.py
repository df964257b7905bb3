"""The figures that all loggers show, and how they are computed from the events of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from exogym.logger.event import Mean

from .event import Event


@dataclass(frozen=True, kw_only=True)
class Record:
    """Figures at one optimizer step. What is not known, or does not belong to the kind, is None.

    kind: "train" sums up the last `log_interval` steps, "end" the whole run; besides "validation" and "correlation".
    epoch: counted from 1. seconds: since the first event. ranks: how many took part.
    loss: weighted by target tokens, over these steps and all ranks; at the end, that of the last interval.
    val_loss: of the averaged model. local_val_loss: the mean of the ranks' own models. Perplexities are exp of a loss.
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

    @classmethod
    def of_round(cls, event: Event) -> Spent:
        return cls(event.get("bytes") or 0, event.get("seconds") or 0.0)

    def __bool__(self) -> bool:
        return bool(self.bytes or self.seconds)

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
            if is_finite(loss):
                sums.loss.add(loss * tokens, tokens)
            if is_finite(norm):
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
        found[name] = loss if is_finite(loss) else None
        found[name.replace("loss", "perplexity")] = perplexity(loss) if is_finite(loss) else None
    return found


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
