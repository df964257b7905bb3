"""events.jsonl: what happened in a run, one JSON object a line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from whisper_tuner.files import DISK
from whisper_tuner.json_text import parse_json

from .event_fields import makes_sense


class EventLog:
    """Appends one JSON object a line; every event gets a `time` (Unix seconds).

    What a full disk does not take waits for the next event: a run does not end for its log.
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
        """What a killed launcher left half written must not swallow the first event of the next."""
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                self._waiting = b"\n"


def read_events(path: Path, start: int = 0) -> tuple[list[dict], int]:
    """Whole lines from byte `start` on, and where to go on from. A half-written last line is left for the next call."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    whole = data[: data.rfind(b"\n") + 1]
    return list(_decode(whole)), start + len(whole)


def _decode(data: bytes) -> Iterator[dict]:
    for line in data.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            continue  # a line cut short by a crash
        if makes_sense(event):
            yield event
