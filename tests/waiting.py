"""For what happens in its own time: processes that end, files that appear."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], object], seconds: float = 5.0, tell: Callable[[], object] = lambda: "") -> None:
    """Fails after `seconds`, with what `tell` says then."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.05)
