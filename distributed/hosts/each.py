"""Does the same on all hosts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from whisper_tuner.errors import HostError

M, T = TypeVar("M"), TypeVar("T")


def on_each(machines: Sequence[M], work: Callable[[M], T]) -> list[T]:
    """Do `work` for all machines at once, results in their order; then raise one HostError for all that failed."""
    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        futures = [pool.submit(work, machine) for machine in machines]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, HostError):
            raise error
    if errors:
        raise HostError(", ".join(error.host for error in errors), "failed:\n" + "\n".join(map(str, errors)))
    return [future.result() for future in futures]
