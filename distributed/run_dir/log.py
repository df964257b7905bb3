"""events.jsonl: what happened in a run, one JSON object a line. The launcher writes it; others only read it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from whisper_tuner.files import DISK
from whisper_tuner.json_text import parse_json

from .event_fields import makes_sense


class EventLog:
    """Appends one JSON object a line; every event gets a `time` (Unix seconds).

    What a full disk does not take is kept until the next event: a full disk must not end the run. Half a line, left by
    a launcher that was killed, is removed: the first event must not become part of it.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
        self._waiting = b""

    def __call__(self, event: dict) -> None:
        self._waiting += (json.dumps({"time": round(time.time(), 3), **event}) + "\n").encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in DISK:
                raise

    def close(self) -> None:
        self._file.close()


def read_events(path: Path, start: int = 0) -> tuple[list[dict], int]:
    """Whole lines from byte `start` on, and where to go on from. A half-written last line is left for the next call.

    Lines that are no events are left out.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    whole = data[: data.rfind(b"\n") + 1]
    return [event for line in whole.split(b"\n") if (event := _decoded(line))], start + len(whole)


def _decoded(line: bytes) -> dict | None:
    """None for what is no JSON, or lacks a field that its type must have: a disk may damage lines."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if makes_sense(event) else None


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
        event = _decoded(line)
        if event is None:
            unreadable.append(number)
            continue
        if not found.attempts or (event["type"] == "phase" and "hosts" in event):  # a launcher has just started
            found.attempts.append(Attempt())
        last = found.attempts[-1]
        (last.steps if event["type"] == "step" else last.others).append(event)
    if not found.attempts and (unreadable or cut_short):
        raise ValueError(f"{path.name} holds no event that can be read")
    if unreadable:
        more = f", nor can {len(unreadable) - 1} more" if unreadable[1:] else ""
        found.left_out = f"{path.name}:{unreadable[0]} cannot be read{more}: left out"
    return found


def problem_line(event: dict) -> str:
    """What a `problem` or a `warning` says to the user. The coordinator's warnings are about no host."""
    if event["type"] == "problem":
        return f"{event.get('host') or 'data'}: skipped: {event['what']}"
    return f"{event['host']}: {event['what']}" if event.get("host") else event["what"]
