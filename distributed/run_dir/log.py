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
Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(_texts(pair) and len(pair) == 2 for pair in value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _status(value: Any) -> bool:
    return _count(value) and value in set(ExitStatus)


def _maybe(known: Check) -> Check:
    return lambda value: value is None or known(value)


COMMON = {"time": _number, "type": _text, "host": _maybe(_text), "step": _maybe(_count)}
OF_HOST = {"host": _text}
AT_STEP = {"step": _count}
SPENT = AT_STEP | {"bytes": _maybe(_count), "seconds": _maybe(_number)}
WORK = AT_STEP | {"epoch": _count, "samples": _count, "seconds": _number, "seconds_communicating": _maybe(_number)}
RESULT = {"loss": _maybe(_number), "lr": _maybe(_number), "bytes": _maybe(_count), "memory": _maybe(_count)}
FIELDS: dict[str, dict[str, Check]] = {  # that readers rely on
    "phase": {"phase": _text, "hosts": _maybe(_texts)},
    "start": {"total_steps": _count, "device": _text},
    "plan": {"total_steps": _count},
    "step": OF_HOST | WORK | RESULT,
    "round": {"round": _count} | SPENT,
    "stop": SPENT,
    "validation": AT_STEP | {"loss": _maybe(_number)},
    "resume": OF_HOST | AT_STEP | {"round": _count, "epoch": _count},
    "lost": OF_HOST | {"reason": _text, "given_up": _flag},
    "generation": {"number": _count, "hosts": _texts},
    "paused": {"hosts": _texts, "min_hosts": _count},
    "orphaned": {"hosts": _texts},
    "apart": {"pairs": _pairs, "hosts": _texts},
    "reached": {"pairs": _pairs},
    "problem": {"what": _text},
    "warning": {"what": _text},
    "model": {"path": _text},
    "evaluating": {"model": _text, "done": _count, "total": _count},
    "evaluation": {"when": _text, "wer": _number},
    "end": {"status": _status, "message": _text},
}


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
    checks = COMMON | FIELDS.get(kind, {})
    return event if all(known(event.get(name)) for name, known in checks.items()) else None


def problem_line(event: dict) -> str:
    """What a `problem` or a `warning` says to the user. The coordinator's warnings are about no host."""
    if event["type"] == "problem":
        return f"{event.get('host') or 'data'}: skipped: {event['what']}"
    return f"{event['host']}: {event['what']}" if event.get("host") else event["what"]
