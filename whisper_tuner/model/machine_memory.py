"""How much memory this machine has, how much of it is available, and which machine it is.

The preflight sends this file as text to a host whose Python may be 3.9 and lack psutil, so it imports nothing else of
this project (see distributed/hosts/agent_call.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LISTING, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAC_BOOT_ID = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
UUID = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
# Files of a control group: the limit, the use, and the key of the part of it that the system takes back if need be.
FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
SECOND_VERSION = ("memory.max", "memory.current", "inactive_file")


def machine_memory() -> dict:
    """`total` and `available` bytes (None without psutil), and `machine`, which is equal for ranks on one machine.

    A lower limit of a container or a service counts as the total. `machine` is "" if it is not known.
    """
    total, available = _of_the_system()
    machine = boot_id()
    group = tightest_group(_read(LISTING), GROUPS)
    if group and group[0] < total:
        total, used, identity = group
        available = None if available is None else min(available, max(0, total - used))
        machine = machine and f"{machine} {identity}"
    return {"total": total, "available": available, "machine": machine}


def boot_id() -> str:
    """The id of the running system: hosts with the same id are one machine, whatever their names. "" if not known."""
    text = _output(MAC_BOOT_ID) if sys.platform == "darwin" else _read(BOOT_ID)
    return text.strip() if UUID.fullmatch(text.strip()) else ""


def tightest_group(listing: str, root: Path) -> tuple[int, int, str] | None:
    """(limit, bytes in use, identity) of the control group with the lowest limit around this process; None without one.

    listing: the text of /proc/self/cgroup. root: where the groups are mounted. A container may see its own group as the
    root, and a path that does not exist there.
    """
    found = []
    for line in listing.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        names, base = (FIRST_VERSION, root / "memory") if kinds else (SECOND_VERSION, root)
        parts = [] if ".." in path else [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            found += _limited(base.joinpath(*parts[:count]), *names)
    return min(found, default=None)


def _limited(folder: Path, limit_file: str, used_file: str, cache: str) -> list:
    limit, used = _number(_read(folder / limit_file)), _number(_read(folder / used_file))
    if limit is None or used is None:
        return []
    known = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    about = folder.stat()
    return [(limit, max(0, used - (int(known[1]) if known else 0)), f"{about.st_dev}:{about.st_ino}")]


def _of_the_system() -> tuple:
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _output(command: list) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
