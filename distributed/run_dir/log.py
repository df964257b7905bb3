"""events.jsonl: what happened in a run, one JSON object a line. The launcher writes it; others only read it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whisper_tuner.errors import ExitStatus
from whisper_tuner.files import DISK
from whisper_tuner.json_text import parse_json

MOST = 1e15  # of bytes, steps or seconds: no run comes near it, and sums of such numbers stay finite


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(_texts(pair) and len(pair) == 2 for pair in value)


def _status(value: Any) -> bool:
    return _count(value) and value in set(ExitStatus)


CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("time", "seconds", "seconds_communicating", "seconds_waiting", "loss", "lr", "wer"), _number),
    "seconds_travelling": _number,
    **dict.fromkeys(("step", "epoch", "round", "number", "total_steps", "samples", "bytes", "memory"), _count),
    **dict.fromkeys(("min_hosts", "done", "total", "validations", "best_step"), _count),
    **dict.fromkeys(("type", "host", "phase", "device", "reason", "what", "path", "model", "when", "message"), _text),
    **{"given_up": _flag, "hosts": _texts, "pairs": _pairs, "status": _status},
}
# The fields that readers rely on; one with a question mark may be null or missing.
COMMON = "time type host? step?"
FIELDS = {
    "phase": "phase hosts?",
    "preparing": "host done total",
    "start": "total_steps device",
    "plan": "total_steps",
    "shares": "step what",
    "step": "host step epoch samples seconds loss? lr? bytes? memory? seconds_communicating? seconds_waiting?",
    "round": "round step bytes? seconds? seconds_travelling?",
    "stop": "step bytes? seconds?",
    "validation": "step loss?",
    "early_stop": "step validations total_steps",
    "best": "best_step loss",
    "resume": "host step round epoch",
    "lost": "host reason given_up",
    "generation": "number hosts",
    "paused": "hosts min_hosts",
    "orphaned": "hosts",
    "apart": "pairs hosts",
    "reached": "pairs",
    "problem": "what",
    "warning": "what",
    "notice": "what",
    "model": "path",
    "report": "path",
    "evaluating": "model done total",
    "evaluation": "when wer",
    "end": "status message",
}


class EventLog:
    """Appends one JSON object a line; every event gets a `time` (Unix seconds).

    What a full disk does not take is kept until the next event: a full disk must not end the run. Half a line, left by
    a launcher that was killed, is removed: the first event must not become part of it.
    """

    def __init__(self, path: Path):
        self._file, self._waiting = path.open("ab", buffering=0), b""
        *lines, last = path.read_bytes().split(b"\n")
        if decoded(last):
            self._waiting = b"\n"  # all that it lacks
        else:
            self._file.truncate(sum(len(line) + 1 for line in lines))

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
    return [event for line in whole.split(b"\n") if (event := decoded(line))], start + len(whole)


def decoded(line: bytes) -> dict | None:
    """The event in a line; None for what is no JSON, or lacks a field that its type must have.

    A line that a disk has damaged may still be JSON. Of an event of an unknown type only the common fields are needed.
    """
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(kind := event.get("type"), str):
        return None
    for field in f"{COMMON} {FIELDS.get(kind, '')}".split():
        value = event.get(name := field.rstrip("?"))
        if not (field.endswith("?") and value is None) and not CHECKS[name](value):
            return None
    return event


def problem_line(event: dict) -> str:
    """What a `problem`, a `warning` or a `notice` says to the user. The coordinator's warnings are about no host."""
    if event["type"] == "problem":
        return f"{event.get('host') or 'data'}: skipped: {event['what']}"
    return f"{event['host']}: {event['what']}" if event.get("host") else event["what"]
