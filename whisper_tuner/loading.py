"""Loading what somebody else has made with other people's libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whisper_tuner.errors import ModelError

PANIC = "PanicException"  # of a library in Rust: no Exception, and it cannot be imported


@contextmanager
def loading(failure: str, *, remedy: str) -> Iterator[None]:
    """Of a damaged folder the libraries raise whatever their code stumbles over: all of it becomes a ModelError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{failure}: {reason}", remedy=remedy) from error
