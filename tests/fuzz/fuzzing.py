"""A test that takes many inputs, and how a reader is judged: a value, or an error of ours, soon."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cli_typer
from exogym.errors import ExogymError
from whisper_tuner.errors import TunerError

MANY = int(os.environ.get("FUZZ_EXAMPLES", 0))  # inputs of each test; `make fuzz` sets it
CPU_S = 3.0  # of the processor, that one input may take
INPUTS: Counter[str] = Counter()  # by format

NOT_JSON = object()

T = TypeVar("T")


class TooSlow(Exception):
    pass


def fuzz(form: str, inputs: st.SearchStrategy[bytes], *, few: int = 20, cost: int = 1) -> Callable:
    """Give a test `inputs` as its argument `data`: a few, or MANY / cost. `form` is the format that they are of."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def counted(*arguments, **named) -> None:
            INPUTS[form] += 1
            test(*arguments, **named)

        chosen = settings(
            max_examples=max(few, MANY // cost),
            deadline=None,
            database=None,
            derandomize=not MANY,
            print_blob=bool(MANY),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )
        return chosen(given(data=inputs)(counted))

    return decorate


def outcome(
    read: Callable[..., T],
    *arguments,
    names: object = "",
    of: bytes | None = None,
) -> T | None:
    """What `read` returns; None where it refuses, in words that name `names` and no line that `of` has not.

    Any other error, and none in CPU_S, is a defect.
    """
    try:
        with in_time():
            return read(*arguments)
    except (TunerError, ExogymError) as error:
        said = str(error)
    assert str(names) in said, f"{names} is not named: {said:.300}"
    if of is not None and (line := re.search(rf"{re.escape(str(names))}(?::| line )(\d+)", said)):
        assert 1 <= int(line[1]) <= len(re.split(rb"\r\n|\r|\n", of)), f"there is no such line: {said:.300}"
    return None


def command(*words: str) -> tuple[int, str]:
    """Exit status and output of a command, on a terminal that takes UTF-8 and nothing else."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(said), redirect_stderr(io.StringIO()), in_time():
        status = cli_typer.main([*words])
    said.flush()
    return status, said.buffer.getvalue().decode()


def parsed(data: bytes | str) -> Any:
    """What the JSON library itself makes of it; NOT_JSON for what it refuses."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return NOT_JSON


def same(one: object, other: object) -> bool:
    """Whether two values are one document: 1 is not True, nan is nan."""
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


@contextmanager
def in_time(seconds: float = CPU_S) -> Iterator[None]:
    """Raises TooSlow. Processor time, because a busy machine is no defect; and pytest-timeout has the other clock."""

    def ring(*_) -> None:
        raise TooSlow(f"more than {seconds:g} s of the processor")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
