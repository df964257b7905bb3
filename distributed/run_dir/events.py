"""Reads a run's events.jsonl into steps, rounds and what else happened; quick, since `runs list` reads all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.json_text import parse_json

# Nearly all lines are steps. This is several times faster than parsing them; a line that it does not fit is parsed.
STEP = re.compile(
    rb'\{"time": ([\d.]+), "type": "step", "rank": (\d+), "epoch": \d+, "step": (\d+), "loss": ([\d.e+-]+|null), '
    rb'"lr": ([\d.e+-]+), "tokens": [\d.e+-]+, "samples": (\d+), "seconds": ([\d.e+-]+), '
    rb'"grad_norm": (?:[\d.e+-]+|null), "bytes": (\d+), "memory": (\d+)'
    rb'(?:, "seconds_communicating": ([\d.e+-]+))?, "host": "([^"\\]*)"\}'
)
PROGRESS = b'"type": "evaluating"'


class Step(NamedTuple):
    """One optimizer step of one rank; `communicating` is None where the event does not tell."""

    time: float
    rank: int
    step: int
    loss: float | None
    lr: float | None
    samples: int
    seconds: float
    bytes: int
    memory: int
    communicating: float | None
    host: str


@dataclass
class Attempt:
    """What one launcher wrote: a resumed run has several."""

    steps: list[Step] = field(default_factory=list)
    others: list[dict] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last, over all ranks."""
        if not self.steps:
            return 0.0
        return max(s.time for s in self.steps) - min(s.time - s.seconds for s in self.steps)

    def of_type(self, *kinds: str) -> list[dict]:
        return [event for event in self.others if event["type"] in kinds]


@dataclass
class RunEvents:
    """`damage` says what of the file could not be read; "" if nothing."""

    attempts: list[Attempt] = field(default_factory=list)
    first_time: float | None = None
    last_time: float | None = None
    damage: str = ""


def scan(path: Path) -> RunEvents:
    """Raises OSError; a missing file is a run that has not begun."""
    found = RunEvents()
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    bad = None  # a line that was cut short, allowed where a launcher was killed: at the end, or before the next one
    for number, line in enumerate(lines[:-1], 1):
        if PROGRESS in line:
            continue
        try:
            event = _step(match) if (match := STEP.fullmatch(line)) else _event(line)
        except (ValueError, TypeError, KeyError, OverflowError):
            found.damage = found.damage or (f"{path.name}:{bad} is damaged" if bad else "")
            bad = number
            continue
        if bad and not _begins(event):
            found.damage = found.damage or f"{path.name}:{bad} is damaged"
        bad = None
        _take(found, event)
    if not found.attempts and any(lines):
        found.damage = found.damage or f"{path.name} holds no event that can be read"
    return found


def _step(match: re.Match[bytes]) -> Step:
    time, rank, step, loss, lr, samples, seconds, sent, memory, communicating, host = match.groups()
    return Step(
        float(time),
        int(rank),
        int(step),
        None if loss == b"null" else float(loss),
        float(lr),
        int(samples),
        float(seconds),
        int(sent),
        int(memory),
        float(communicating) if communicating else None,
        host.decode("utf-8", "replace"),
    )


def _event(line: bytes) -> Step | dict:
    """Raises ValueError, TypeError, KeyError or OverflowError for what is not an event of ours."""
    event = parse_json(line)
    time, kind = float(event["time"]), event["type"]
    if kind == "step":
        return Step(
            time,
            int(event["rank"]),
            int(event["step"]),
            _number(event, "loss"),
            _number(event, "lr"),
            int(event["samples"]),
            float(event["seconds"]),
            int(event.get("bytes") or 0),
            int(event.get("memory") or 0),
            _number(event, "seconds_communicating"),
            str(event["host"]),
        )
    for key in {"round": ("rank", "step", "round"), "validation": ("step",), "end": ("status",)}.get(kind, ()):
        event[key] = int(event[key])
    return event


def _number(event: dict, key: str) -> float | None:
    value = event.get(key)
    return None if value is None else float(value)


def _begins(event: Step | dict) -> bool:
    """Whether a launcher has just started."""
    return isinstance(event, dict) and event["type"] == "phase" and "hosts" in event


def _take(found: RunEvents, event: Step | dict) -> None:
    if _begins(event) or not found.attempts:
        found.attempts.append(Attempt())
    attempt = found.attempts[-1]
    if isinstance(event, Step):
        attempt.steps.append(event)
        found.last_time = event.time
    else:
        attempt.others.append(event)
        found.last_time = event["time"]
    found.first_time = found.first_time or found.last_time
