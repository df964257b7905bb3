"""events.jsonl: what happened in a run, one JSON object a line. The launcher writes it; others only read it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from whisper_tuner.files import DISK
from whisper_tuner.json_text import parse_json

from .event_fields import makes_sense


class EventLog:
    """Appends one JSON object a line; every event gets a `time` (Unix seconds).

    What a full disk does not take is kept until the next event: a full disk must not end the run.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._end_a_cut_line(path)

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

    def _end_a_cut_line(self, path: Path) -> None:
        """A killed launcher may have left half a line; the next launcher's first event must not become part of it."""
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                self._waiting = b"\n"


class Senseless(ValueError):
    """A line of JSON that is no event: it has no known shape, or lacks a field that its type must have."""


def decode(line: bytes) -> dict:
    """The event in a line. Raises Senseless, and another ValueError for what is no JSON, such as a line cut short."""
    event = parse_json(line)
    if not makes_sense(event):
        raise Senseless
    return event


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
    events = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(ValueError):
            events.append(decode(line))
    return events, start + len(whole)
