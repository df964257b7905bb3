"""The fields of each type of event that readers rely on: a line that a disk has damaged may still be JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whisper_tuner.errors import ExitStatus

MOST = 1e15  # of bytes, steps or seconds: no run comes near it, and sums of such numbers stay finite


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


def _maybe(known: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or known(value)


OF_ALL = {"time": _number, "type": _text, "host": _maybe(_text), "step": _maybe(_count)}
OF_HOST = {"host": _text}
SPENT = {"step": _count, "bytes": _maybe(_count), "seconds": _maybe(_number)}
FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "phase": {"phase": _text, "hosts": _maybe(_texts)},
    "start": {"total_steps": _count, "device": _text},
    "plan": {"total_steps": _count},
    "step": {
        **{"step": _count, "epoch": _count, "samples": _count, "seconds": _number, "loss": _maybe(_number)},
        **{"lr": _maybe(_number), "bytes": _maybe(_count), "memory": _maybe(_count)},
        **{"seconds_communicating": _maybe(_number)},
    }
    | OF_HOST,
    "round": {"round": _count} | SPENT,
    "stop": SPENT,
    "validation": {"step": _count, "loss": _maybe(_number)},
    "resume": {"step": _count, "round": _count, "epoch": _count} | OF_HOST,
    "lost": {"reason": _text, "given_up": _flag} | OF_HOST,
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
    "end": {"status": lambda value: _count(value) and value in set(ExitStatus), "message": _text},
}


CHECKS = {kind: tuple((OF_ALL | fields).items()) for kind, fields in FIELDS.items()}


def makes_sense(event: Any) -> bool:
    """Whether it is an event with the fields that its type needs; of an unknown type only the common ones are."""
    if not isinstance(event, dict) or not isinstance(kind := event.get("type"), str):
        return False
    return all(known(event.get(name)) for name, known in CHECKS.get(kind, OF_ALL.items()))
