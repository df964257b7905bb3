"""The fields of each type of event that readers rely on: a line that a disk has damaged may still be JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whisper_tuner.errors import ExitStatus

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
FIELDS: dict[str, dict[str, Check]] = {
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


def makes_sense(event: Any) -> bool:
    """Whether it is an event with the fields that its type needs; of an unknown type only the common ones are."""
    if not isinstance(event, dict) or not isinstance(kind := event.get("type"), str):
        return False
    checks = COMMON | FIELDS.get(kind, {})
    return all(known(event.get(name)) for name, known in checks.items())
