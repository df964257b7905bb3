"""events.jsonl: what happened in a run, one JSON object a line. The launcher writes it; others only read it."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from whisper_tuner.files import DISK
from whisper_tuner.text import parse_json

from .events import Event, event_of

RESERVE = 1 << 20  # bytes: thousands of events
FULL = "the disk of the run's folder is full: nothing is saved there until some space is freed"


class EventLog:
    """Appends one JSON object a line; every event gets a `time` (Unix seconds).

    A full disk must not end the run, and what becomes of it must be told: for that `reserve` bytes of the disk are
    held, and given back once it is full. What it still does not take is kept until the next event. Half a line, left by
    a launcher that was killed, is removed: the first event must not become part of it.
    """

    def __init__(self, path: Path, *, reserve: int = 0):
        self._file, self._waiting = path.open("ab", buffering=0), b""
        self._reserve = _held(path.parent, reserve) if reserve else None
        self.was_full = False
        *lines, last = path.read_bytes().split(b"\n")
        if decoded(last):
            self._waiting = b"\n"  # all that it lacks
        else:
            self._file.truncate(sum(len(line) + 1 for line in lines))

    def __call__(self, event: dict) -> None:
        self._add(event)
        if self._write() or not self._reserve:
            return
        self._reserve.close()
        self._reserve = None
        self._add({"type": "warning", "what": FULL})
        self._write()

    def _add(self, event: dict) -> None:
        self._waiting += (json.dumps({"time": round(time.time(), 3), **event}) + "\n").encode()

    def _write(self) -> bool:
        """Write what waits; returns False where the disk does not take all of it."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in DISK:
                raise
            self.was_full = True
        return not self._waiting

    def close(self) -> None:
        self._file.close()
        if self._reserve:
            self._reserve.close()


def _held(folder: Path, size: int) -> IO[bytes] | None:
    """Return a file without a name, so that its space is free again when it is closed; None on a full disk."""
    with contextlib.suppress(OSError):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it stays open
        try:
            file.write(bytes(size))
            file.flush()
            return file
        except OSError:
            with contextlib.suppress(OSError):  # closing tries to write once more
                file.close()
            raise
    return None


def decoded(line: bytes) -> Event | None:
    """Return the event in a line; None for what is no JSON, or lacks a field that its type must have."""
    try:
        return event_of(parse_json(line))
    except ValueError:
        return None


def new_events(path: Path, start: int = 0, most: int = -1) -> tuple[list[Event], int]:
    """Return the events from byte `start` on, and where to go on from. Lines that are no events are left out.

    A half-written last line is left for the next call. most: bytes to read, -1 for all.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(most)
    except FileNotFoundError:
        return [], start
    whole = data[: data.rfind(b"\n") + 1]
    return [event for line in whole.split(b"\n") if (event := decoded(line))], start + len(whole)


def read_events(path: Path, start: int = 0) -> tuple[list[dict], int]:
    """Do the same as `new_events`, for readers of fields that an Event does not have: events as they are written."""
    events, position = new_events(path, start)
    return [event.written for event in events], position


@dataclass
class Attempt:
    """The events that one launcher wrote, without readings of machines; a resumed run has several attempts."""

    steps: list[Event] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time from the beginning of the first step to the end of the last, over all ranks."""
        if not self.steps:
            return 0.0
        return max(s.time for s in self.steps) - min(s.time - s.seconds for s in self.steps)

    def parts(self, entered: float) -> tuple[float, ...]:
        """Return the seconds until the first step, those of all steps, and those until the end.

        Without those of the report, which has this in it.
        """
        if not self.steps:
            return ()
        first, last = min(s.time - s.seconds for s in self.steps), max(s.time for s in self.steps)
        end = max([last, *(event.time for event in self.others if event.type != "report")])
        return first - entered, last - first, end - last

    def of_type(self, *types: str) -> list[Event]:
        return [event for event in self.others if event.type in types]


@dataclass
class RunEvents:
    """A run's whole history. `left_out` tells of lines that cannot be read; "" if all can."""

    attempts: list[Attempt] = field(default_factory=list)
    left_out: str = ""

    def add(self, event: Event) -> None:
        """Take the next line's event."""
        if event.type == "machine":  # as many as steps, and of no interest once a run is over
            return
        if not self.attempts or self.begins(event):
            self.attempts.append(Attempt())
        last = self.attempts[-1]
        (last.steps if event.type == "step" else last.others).append(event)

    @staticmethod
    def begins(event: Event) -> bool:
        """Say whether a launcher has just started."""
        return event.type == "phase" and "hosts" in event.written

    def of_type(self, *types: str) -> list[Event]:
        return [event for attempt in self.attempts for event in attempt.of_type(*types)]


def scan(path: Path) -> RunEvents:
    """Read the whole file; without one the run has not begun. Raises OSError, and ValueError if no line can be read."""
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
        if found.attempts and found.begins(event) and unreadable[-1:] == [number - 1]:
            unreadable.pop()  # half a line, at which the launcher before it was killed
        found.add(event)
    if not found.attempts and (unreadable or cut_short):
        raise ValueError(f"{path.name} holds no event that can be read")
    if unreadable:
        more = f", nor can {len(unreadable) - 1} more" if unreadable[1:] else ""
        found.left_out = f"{path.name}:{unreadable[0]} cannot be read{more}: left out"
    return found
