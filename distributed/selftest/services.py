"""What a run asks of the system besides networks and GPUs: open files, addresses, a disk that syncs, no sleep."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from distributed.hosts.backups import TMUTIL
from distributed.hosts.keep_awake import CAFFEINATE, HOLD
from distributed.worker.main import OPEN_FILES, allow_open_files

from .network import ELSEWHERE
from .programs import said_by

MANY = OPEN_FILES - 100  # of what is allowed, Python has some itself
PMSET = "/usr/bin/pmset"
SOON_S, END_S = 1.0, 5.0


def services(request: dict) -> dict:
    """Of each its answer, or what `failed`."""
    looks = {"open_files": open_files, "foreign_address": foreign_address, "folder": folder, "awake": awake}
    return {name: _tried(look) for name, look in looks.items()}


def _tried(look: Callable[[], dict]) -> dict:
    try:
        return look()
    except Exception as error:  # one that fails keeps no other from answering
        return {"failed": f"{type(error).__name__}: {error}"}


def open_files() -> dict:
    """As a worker raises their limit; then really so many."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_open_files()
    opened: list[int] = []
    try:
        for _ in range(MANY):
            opened.append(os.dup(0))
    except OSError:
        pass
    finally:
        for handle in opened:
            os.close(handle)
    return {"before": before, "after": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "opened": len(opened)}


def foreign_address() -> dict:
    """By this error a launcher knows that its machine has lost an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return {"error": _error(lambda: probe.bind((ELSEWHERE, 0)))}


def folder() -> dict:
    """A new one in the project, where runs are, since folders for temporary files are never backed up."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".selftest-") as made:
        handle = os.open(made, os.O_RDONLY)
        try:
            return {"sync": _synced(handle), "backups": _backups(made) if sys.platform == "darwin" else None}
        finally:
            os.close(handle)


def _synced(handle: int) -> dict:
    began = time.perf_counter()
    is_mac = sys.platform == "darwin"
    error = _error(lambda: fcntl.fcntl(handle, fcntl.F_FULLFSYNC) if is_mac else os.fsync(handle))
    return {"how": "F_FULLFSYNC" if is_mac else "fsync", "error": error, "seconds": time.perf_counter() - began}


def _backups(made: str) -> dict:
    """Time Machine's word on it before and after it is excluded. The mark goes with the folder."""
    before = _excluded(made)
    status = said_by([TMUTIL, "addexclusion", made])["status"]
    return {"before": before, "status": status, "after": _excluded(made)}


def _excluded(made: str) -> str:
    found = re.search(r"\[(\w+)\]", said_by([TMUTIL, "isexcluded", made])["output"])
    return found[1] if found else ""


def awake() -> dict | None:
    """Hosts are held awake by a process that ends with its stdin. None where it is not a Mac."""
    if sys.platform != "darwin":
        return None
    before = _caffeinated()
    holder = subprocess.Popen(["/bin/sh", "-c", HOLD, CAFFEINATE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        time.sleep(SOON_S)
        during = _caffeinated() - before
        holder.stdin.close()
        status = holder.wait(END_S)
        return {"shown": bool(during), "status": status, "ended": True, "left": bool(during & _caffeinated())}
    except subprocess.TimeoutExpired:
        return {"shown": bool(during), "status": None, "ended": False, "left": True}
    finally:
        holder.kill()
        holder.wait()


def _caffeinated() -> set[str]:
    """Only process ids: the rest of the output names programs and devices of the owner's."""
    return set(re.findall(r"pid (\d+)\(caffeinate\)", said_by([PMSET, "-g", "assertions"])["output"]))


def _error(act: Callable[[], object]) -> str:
    """The name of the system's error, "" without one."""
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return ""
