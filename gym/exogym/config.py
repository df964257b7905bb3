"""How a setting is declared, read from text and checked: one way for profiles, for hosts and for strategies.

Imports no torch, so that a command line can show settings at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from exogym.errors import SettingError, UnknownSetting

LARGEST = 2**63  # what torch and the disk's formats hold
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "text", Path: "a path"}
TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    example: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    changes_plan: bool = False,
) -> Any:
    """Return a dataclass field that says what it is for; its annotation says how it is read from text.

    example: a value, as the reference page shows it. low, high: the least and the largest number that it may be.
    changes_plan: with another value the same clips make other batches, so a run is not resumed with it.
    """
    metadata = {
        "help": help,
        "example": example,
        "low": low,
        "high": high,
        "choices": choices,
        "changes_plan": changes_plan,
    }
    return dataclasses.field(default=default, metadata=metadata)


hints_of = functools.cache(typing.get_type_hints)  # a class of settings -> the types of its fields, by name


# From text, as an INI file has it.


def kind_of(hint: Any) -> Any:
    """Return the type that text is read as for a field annotated `hint`: the first one, where it may have several."""
    if isinstance(hint, types.UnionType):
        return next(each for each in typing.get_args(hint) if each is not types.NoneType)
    return hint


def parse(field: dataclasses.Field[Any], hint: Any, text: str) -> Any:
    """Return the value of `text` for a field annotated `hint`. Raises SettingError with what was expected."""
    value = from_text(hint, text)
    if value is not None:
        check(field, value)
    return value


def from_text(hint: Any, text: str) -> Any:
    """Return what `text` stands for, whatever the range. Raises SettingError: "expected a whole number"."""
    kind, text = kind_of(hint), text.strip()
    if types.NoneType in typing.get_args(hint) and (not text or (text.lower() == "none" and kind is not Path)):
        return None
    if kind is bool:
        if text.lower() not in TRUE | FALSE:
            raise SettingError("expected true or false")
        return text.lower() in TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise SettingError(f"expected {'a whole number' if kind is int else 'a number'}") from None
    if kind is Path:
        return Path(text)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return tuple(from_text(item, part) for part in text.replace(",", " ").split())
    return text


def check(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise SettingError with what was expected if `value` is outside the range or the choices of `field`."""
    choices, low, high = (field.metadata[key] for key in ("choices", "low", "high"))
    for each in value if isinstance(value, tuple) else (value,):
        if choices and each not in choices:
            known = [choice for choice in choices if choice]
            raise SettingError(f"expected one of {', '.join(known)}{nearest(str(each), known)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError("expected a finite number")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise SettingError("expected a number below 2^63")
    if value is not None and low is not None and not low <= value <= (math.inf if high is None else high):
        raise SettingError(f"expected a number {f'at least {low}' if high is None else f'from {low} to {high}'}")


def validate(instance: Any) -> None:
    """Check every field of a settings dataclass; for its `__post_init__`."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            check(field, value)
        except SettingError as error:
            raise SettingError(f"{field.name} = {value!r}: {error}") from None


# Of arguments by name.


def refuse(reason: str, **given: Any) -> None:
    """Raise SettingError if any of these settings is given, since it would not be used."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise SettingError(f"{reason}: {', '.join(names)} would not be used")


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of those known, else raise SettingError."""
    if value not in known:
        raise SettingError(f"unknown {what} {value!r}{nearest(value, known, '; ')} (known: {', '.join(known)})")
    return value


def check_keys(what: str, keys: Iterable[str], known: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise UnknownSetting for a key that there is not. also: names that are proposed for a misspelt one, too."""
    for key in keys:
        if key not in known:
            raise UnknownSetting(f"{what} has no setting {key!r}{nearest(key, [*known, *also], '; ')}")


def at_least(name: str, value: float, minimum: float) -> None:
    """Raise SettingError if `value` is no number, below `minimum`, or not finite."""
    check_type(name, float, value)
    if not minimum <= value < math.inf:
        raise SettingError(f"{name} must be at least {minimum}, not {value}")


def check_type(name: str, hint: Any, value: Any) -> None:
    """Raise SettingError unless `value` is of a type that an annotation names, if these are all of TYPES."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(kind not in (*TYPES, types.NoneType) for kind in kinds):
        return
    value = value.item() if type(value).__name__ == "bool_" else value  # of numpy, which is not imported for it
    is_number = not isinstance(value, bool)
    as_number = {int: is_number and isinstance(value, Integral), float: is_number and isinstance(value, Real)}
    if not any(as_number.get(kind, isinstance(value, kind)) for kind in kinds):
        told = " or ".join(TYPES.get(kind, "None") for kind in kinds)
        raise SettingError(f"{name} must be {told}, not {value!r}")


def check_types(instance: Any) -> None:
    """Check every field of a dataclass by its annotation, see check_type."""
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        check_type(field.name, hints[field.name], getattr(instance, field.name))


def check_whole(name: str, value: float, minimum: float = -math.inf) -> None:
    """Raise SettingError unless `value` is a whole number, at least `minimum`."""
    check_type(name, int, value)
    at_least(name, value, minimum)


def nearest(word: str, known: Iterable[str], mark: str = ", ", before: str = "") -> str:
    """Return ", did you mean 'x'?" where a known word is like this one, else nothing. before: what x begins with."""
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(str(word).lower(), by_lower_case, n=1)
    return f"{mark}did you mean {before + by_lower_case[matches[0]]!r}?" if matches else ""
