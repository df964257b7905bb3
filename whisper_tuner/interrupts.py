"""What a command does about Ctrl-C and other signals that end it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def as_ctrl_c(*numbers: signal.Signals) -> Iterator[None]:
    """These signals raise KeyboardInterrupt."""
    with _handled(numbers, signal.default_int_handler):
        yield


@contextlib.contextmanager
def calling(function: Callable[[], None], *numbers: signal.Signals) -> Iterator[None]:
    """These signals call a function, in the main thread, between any two of its instructions."""
    with _handled(numbers, lambda _number, _frame: function()):
        yield


@contextlib.contextmanager
def noted(*numbers: signal.Signals) -> Iterator[list[int]]:
    """These signals end nothing: each is added to a list, for whoever looks there in time."""
    came: list[int] = []
    with _handled(numbers, lambda number, _frame: came.append(number)):
        yield came


@contextlib.contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """One that was ignored stays so: `nohup` means its SIGHUP."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
        before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
