"""Dataclasses as JSON and back. What comes back has exactly the types of the fields, or is refused by its place.

A dataclass that has to look at its fields before they are built has a classmethod `read(data, where)`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from exogym.config import hints_of, kind_of
from whisper_tuner.errors import ConfigError
from whisper_tuner.text import parse_json

T = TypeVar("T")


def json_of(instance: Any, **options: Any) -> str:
    """Return a dataclass and all that is in it as JSON. `build` reads it."""
    return json.dumps(dataclasses.asdict(instance), default=os.fspath, **options)


def build(hint: Any, data: Any, where: str) -> Any:
    """Return `data`, as it comes from JSON, as what a field annotated `hint` holds; no value changes its type.

    Raises ConfigError naming the place of what is missing, unknown, of the wrong type or out of range.
    """
    if data is None and types.NoneType in typing.get_args(hint):
        return None
    hint = kind_of(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        read = getattr(hint, "read", None) or functools.partial(build_object, hint)
        return read(_exactly(dict, data, where), where)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(build(item, part, f"{where}[{n}]") for n, part in enumerate(_exactly(list, data, where)))
    if hint is Path:
        if data == "":
            raise ConfigError(f"{where}: an empty path")  # Path("") is the current folder
        return Path(_exactly(str, data, where))
    if hint is float and type(data) is int:
        number: int = data
        try:
            return float(number)
        except OverflowError:
            raise ConfigError(f"{where}: a number of {len(str(abs(number)))} digits") from None
    return _exactly(hint, data, where)


def build_from_text(cls: type[T], text: str, where: str) -> T:
    """Return a dataclass from its JSON. Raises ConfigError."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    return build(cls, data, where)


def build_object(cls: type, data: dict[str, Any], where: str, **other_hints: Any) -> Any:
    """Return a dataclass from its fields. other_hints: for fields whose type is not what the class says."""
    hints = hints_of(cls) | other_hints
    for key in sorted(set(data) - set(hints)):
        raise ConfigError(f"{where}: unknown key {key!r}")
    for field in dataclasses.fields(cls):
        if field.name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: no {field.name!r}")
    values = {key: build(hints[key], item, f"{where}: {key}") for key, item in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _exactly(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ConfigError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    return value
