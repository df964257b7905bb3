"""Settings as dataclass fields: type, range, default and one line of help stand together, once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from pathlib import Path

from whisper_tuner.paths import expanded

LARGEST = 2**63  # what torch and the disk's formats hold
TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def setting(default=dataclasses.MISSING, help: str = "", *, low=None, high=None, choices: tuple[str, ...] = ()):
    """A dataclass field that knows its range and its help text."""
    metadata = {"help": help, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """', did you mean X?' or ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def parse(field: dataclasses.Field, hint, text: str, folder: Path):
    """The value of `text` for a field annotated `hint`; relative paths start at `folder`.

    Raises ValueError with what was expected.
    """
    text = text.strip()
    if isinstance(hint, types.UnionType):
        if not text:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    value = _convert(hint, text, folder)
    check(field, value)
    return value


def check(field: dataclasses.Field, value) -> None:
    """Raise ValueError if `value` is outside the range or choices of `field`."""
    meta = field.metadata
    if meta.get("choices") and value not in meta["choices"]:
        raise ValueError(f"expected one of {', '.join(meta['choices'])}{nearest(str(value), meta['choices'])}")
    low, high = meta.get("low"), meta.get("high")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise ValueError("expected a number below 2^63")
    if value is not None and low is not None and not low <= value <= (math.inf if high is None else high):
        raise ValueError(f"expected a number {f'at least {low}' if high is None else f'from {low} to {high}'}")


def _convert(hint, text: str, folder: Path):
    if hint is bool:
        if text.lower() not in TRUE | FALSE:
            raise ValueError("expected true or false")
        return text.lower() in TRUE
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"expected {'a whole number' if hint is int else 'a number'}") from None
    if hint is Path:
        return (folder / expanded(text)).absolute()
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, part, folder) for part in text.replace(",", " ").split())
    return text


def validate(instance) -> None:
    """Check every field of a settings dataclass; for `__post_init__`."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            check(field, value)
        except ValueError as error:
            raise ValueError(f"{field.name} = {value!r}: {error}") from None
