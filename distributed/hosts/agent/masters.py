"""Who works in a host's project folder now."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

IN_USE = "in-use"  # in .sync: a lock


def hold(project: Path) -> None:
    """Until this process ends, others see that it works in the folder; only where a sync has been."""
    with contextlib.suppress(OSError):
        lock = os.open(str(project / ".sync" / IN_USE), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
