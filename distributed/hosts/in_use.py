"""Keeps a project folder from being removed by `hosts remove` while a process works in it. The agent knows the name."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

IN_USE = "in-use"  # in the store: locked by all that work in the project folder


def hold(store: str, work: str) -> None:
    """Until this process ends, however it ends; several may hold it."""
    with contextlib.suppress(OSError):  # the disk is full, or knows no locks
        Path(store).mkdir(mode=0o700, exist_ok=True)
        lock = os.open(Path(store, IN_USE), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.truncate(lock, 0)
        os.write(lock, work.encode())
