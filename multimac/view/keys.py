"""Single keys of a terminal, read while something else is shown on it."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from collections.abc import Callable, Iterator

MANY = 4096  # bytes


def is_in_front(terminal: int = 1) -> bool:
    """Tell whether this process may use its terminal: a shell's job in the background would be stopped by that.

    terminal: stdout, or another of this process's files.
    """
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is no terminal
        return False


@contextlib.contextmanager
def keys() -> Iterator[Callable[[], str] | None]:
    """Give a function that returns the key that was pressed since the last call; "" for none, and for several at once.

    None where stdin is no terminal: nothing is read there. What is pasted, or comes from an arrow key, is several: it
    means nothing. Ctrl-C stays a signal. The terminal is left as it was found.
    """
    terminal = 0  # stdin
    if not is_in_front(terminal):
        yield None
        return
    before = termios.tcgetattr(terminal)

    def pressed() -> str:
        if not (is_in_front(terminal) and select.select([terminal], [], [], 0)[0]):
            return ""
        with contextlib.suppress(OSError):  # the terminal is gone
            typed = os.read(terminal, MANY).decode("utf-8", "replace")
            return typed if len(typed) == 1 else ""
        return ""

    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        yield pressed
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
