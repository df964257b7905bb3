"""What events.jsonl must say for its followers: a line that a disk has damaged may still be JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whisper_tuner.errors import ExitStatus

MOST = 1e15  # of anything that is counted: bytes, steps, seconds


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


OF_ALL = {"type": _text, "host": _maybe(_text)}
OF_HOST = {"host": _text}
FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "phase": {"phase": _text, "hosts": _maybe(_texts)},
    "start": {"total_steps": _count, "device": _text},
    "plan": {"total_steps": _count},
    "step": {
        **{"step": _count, "epoch": _count, "samples": _count, "seconds": _number},
        **{"loss": _maybe(_number), "bytes": _maybe(_count), "memory": _maybe(_count)},
    },
    "round": {"round": _count},
    "validation": {"step": _count, "loss": _number},
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


def makes_sense(event: Any) -> bool:
    """Whether it is an event with the fields that its type needs; of a type that is not followed anything goes."""
    if not isinstance(event, dict):
        return False
    needed = OF_ALL | FIELDS.get(event.get("type") if _text(event.get("type")) else "", {})
    return all(known(event.get(name)) for name, known in needed.items())
