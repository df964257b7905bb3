"""Signals that end a command as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def as_ctrl_c(*numbers: signal.Signals) -> Iterator[None]:
    """These signals raise KeyboardInterrupt. One that was ignored stays so: `nohup` means its SIGHUP."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
        before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
