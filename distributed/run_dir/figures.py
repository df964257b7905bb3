"""A run's whole history, and what it adds up to: steps, clips, seconds and bytes, of the run and of each host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .log import decoded, problem_line

Points = tuple[tuple[float, float], ...]


@dataclass
class Attempt:
    """What one launcher wrote; a resumed run has several."""

    steps: list[dict] = field(default_factory=list)
    others: list[dict] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last, over all ranks."""
        if not self.steps:
            return 0.0
        return max(s["time"] for s in self.steps) - min(s["time"] - s["seconds"] for s in self.steps)

    def of_type(self, *kinds: str) -> list[dict]:
        return [event for event in self.others if event["type"] in kinds]


@dataclass
class RunEvents:
    """A run's whole history. `left_out` tells of lines that cannot be read; "" if all can."""

    attempts: list[Attempt] = field(default_factory=list)
    left_out: str = ""

    def of_type(self, *kinds: str) -> list[dict]:
        return [event for attempt in self.attempts for event in attempt.of_type(*kinds)]


def scan(path: Path) -> RunEvents:
    """A missing file is a run that has not begun. Raises OSError, and ValueError if no line at all can be read."""
    try:
        *lines, cut_short = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return RunEvents()
    found, unreadable = RunEvents(), []
    for number, line in enumerate(lines, 1):
        event = decoded(line)
        if event is None:
            unreadable.append(number)
            continue
        if not found.attempts or (event["type"] == "phase" and "hosts" in event):  # a launcher has just started
            if found.attempts and unreadable[-1:] == [number - 1]:
                unreadable.pop()  # half a line, at which the launcher before it was killed
            found.attempts.append(Attempt())
        last = found.attempts[-1]
        (last.steps if event["type"] == "step" else last.others).append(event)
    if not found.attempts and (unreadable or cut_short):
        raise ValueError(f"{path.name} holds no event that can be read")
    if unreadable:
        more = f", nor can {len(unreadable) - 1} more" if unreadable[1:] else ""
        found.left_out = f"{path.name}:{unreadable[0]} cannot be read{more}: left out"
    return found


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """One rank. `communicating` and `waiting` (for batches; seconds) are None where events do not tell.

    memory: the most bytes that were held after a step: the accelerator's, or of a rank on the CPU its resident size.
    """

    name: str
    device: str = ""
    steps: int = 0
    clips: int = 0
    clips_per_s: float | None = None
    communicating: float | None = None
    waiting: float | None = None
    bytes: int = 0
    memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """(step, value); losses and rates are means over the ranks."""

    loss: Points = ()
    validation: Points = ()
    lr: Points = ()


def figures(events: RunEvents) -> dict[str, Any]:
    """The fields of a RunSummary that events tell."""
    all_steps = [step for attempt in events.attempts for step in attempt.steps]
    steps, others = _kept(events.attempts)
    seconds = sum(attempt.seconds for attempt in events.attempts)
    per_host = tuple(_host(name, events.attempts) for name in _names(events, all_steps))
    planned = [event for event in others if event["type"] == "plan"] or events.of_type("start")
    rates = {event["when"]: event["wer"] for event in events.of_type("evaluation")}
    return {
        "steps": max((step["step"] for step in steps), default=0),
        "total_steps": planned[-1]["total_steps"] if planned else 0,
        "lost": dict(Counter(event["host"] for event in events.of_type("lost"))),
        "apart": dict(_pairs(events.attempts)),
        "rounds": max((event["round"] for event in others if event["type"] == "round"), default=0),
        "clips": sum(step["samples"] for step in steps),
        "seconds": seconds,
        "clips_per_s": _rate(all_steps, seconds),
        "bytes": sum(host.bytes for host in per_host),
        "attempts": len(events.attempts),
        "wer_before": rates.get("before"),
        "wer_after": rates.get("after"),
        "problems": tuple(dict.fromkeys(map(problem_line, events.of_type("problem", "warning")))),
        "per_host": per_host,
        "curves": Curves(
            loss=_mean_by_step(steps, "loss"),
            lr=_mean_by_step(steps, "lr"),
            validation=_mean_by_step((e for e in others if e["type"] == "validation"), "loss"),
        ),
    }


def _kept(attempts: Sequence[Attempt]) -> tuple[list[dict], list[dict]]:
    """Steps and other events that count: what a resumed run did again replaces what it had done before."""
    steps: list[dict] = []
    others: list[dict] = []
    for attempt in attempts:
        if attempt.steps:
            first = min(step["step"] for step in attempt.steps)
            steps = [step for step in steps if step["step"] < first]
            others = [event for event in others if event.get("step") is None or event["step"] < first]
        steps += attempt.steps
        others += attempt.others
    return steps, others


def _names(events: RunEvents, steps: Sequence[dict]) -> list[str]:
    """Every host of the run, in the order in which it was first named."""
    named = [name for event in events.of_type("phase") for name in event.get("hosts") or ()]
    return list(dict.fromkeys([*named, *(step["host"] for step in steps)]))


def _pairs(attempts: Sequence[Attempt]) -> Counter[tuple[str, str]]:
    """How often each pair of hosts came apart; an event also names pairs that were apart before it."""
    found: Counter[tuple[str, str]] = Counter()
    for attempt in attempts:
        now: set[tuple[str, str]] = set()
        for event in attempt.of_type("apart", "reached"):
            named = {(one, other) for one, other in event["pairs"]}
            found.update(named - now if event["type"] == "apart" else ())
            now = now | named if event["type"] == "apart" else now - named
    return found


def _host(name: str, attempts: Sequence[Attempt]) -> HostFigures:
    own = [_of_host(name, attempt) for attempt in attempts]
    steps = [step for attempt in own for step in attempt.steps]
    devices = [event["device"] for attempt in own for event in attempt.of_type("start")]
    told = [spent for attempt in own if (spent := _communicating(attempt)) is not None]
    waited = [step["seconds_waiting"] for step in steps if step.get("seconds_waiting") is not None]
    return HostFigures(
        name=name,
        device=devices[-1] if devices else "",
        steps=max((step["step"] for step in steps), default=0),
        clips=sum(step["samples"] for step in steps),
        clips_per_s=_rate(steps, sum(step["seconds"] for step in steps)),
        communicating=sum(told) if told else None,
        waiting=sum(waited) if waited else None,
        bytes=sum(map(_sent, own)),
        memory=max((step.get("memory") or 0 for step in steps), default=0),
    )


def _of_host(name: str, attempt: Attempt) -> Attempt:
    steps = [step for step in attempt.steps if step["host"] == name]
    return Attempt(steps, [event for event in attempt.others if event.get("host") == name])


def _rate(steps: Sequence[dict], seconds: float) -> float | None:
    """Clips a second; None where a damaged line makes that infinite."""
    return sum(step["samples"] for step in steps) / seconds if seconds > 1e-6 else None


def _sent(attempt: Attempt) -> int:
    """Bytes that one host sent. A step's event has those of the round that it ended, so each counts once.

    The last round of a run comes after its last step, whose event lacks its bytes.
    """
    sent = {step["step"]: step["bytes"] for step in attempt.steps if step.get("bytes")}
    without_round = {step["step"] for step in _without_round(attempt)}
    for event in attempt.of_type("round", "stop"):
        if event["step"] not in sent:
            sent[event["step"]] = event.get("bytes") or 0
        elif event["type"] == "round" and event["step"] in without_round:
            sent[event["step"]] += event.get("bytes") or 0
    return sum(sent.values())


def _communicating(attempt: Attempt) -> float | None:
    """Seconds that one host spent in exchanges: those that end a round are told by the round, others by their step."""
    steps, rounds = _without_round(attempt), attempt.of_type("round")
    if not steps and not rounds:
        return None  # a stop's seconds alone are no measure of all steps
    told = {step["step"] for step in steps}
    stops = [event for event in attempt.of_type("stop") if event["step"] not in told]
    seconds = [step["seconds_communicating"] for step in steps]
    return sum(seconds) + sum(event.get("seconds") or 0.0 for event in (*rounds, *stops))


def _without_round(attempt: Attempt) -> list[dict]:
    """Steps that ended with an exchange which is no round: they alone tell its seconds."""
    return [step for step in attempt.steps if step.get("seconds_communicating") is not None]


def _mean_by_step(events: Iterable[dict], name: str) -> Points:
    values: dict[int, list[float]] = {}
    for event in events:
        if event.get(name) is not None:
            values.setdefault(event["step"], []).append(event[name])
    return tuple((float(step), sum(found) / len(found)) for step, found in sorted(values.items()))
