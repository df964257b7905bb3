"""How much memory this machine has, how much of it is available, and which machine it is.

The preflight sends this file as text to a host whose Python may be 3.9 and lack psutil, so it imports nothing else of
this project (see distributed/hosts/agent_call.py).
"""

from __future__ import annotations

import contextlib
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
    """Return `total` and `available` bytes (None without psutil), and `machine`, the same for all ranks on one machine.

    A lower limit of a container or a service counts as the total. `machine` is "" if it is not known.
    """
    try:
        import psutil

        memory = psutil.virtual_memory()
        total, available = memory.total, memory.available
    except ImportError:
        total, available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    machine = boot_id()
    group = tightest_group(_read(LISTING), GROUPS)
    if group and group[0] < total:
        total, used, identity = group
        available = None if available is None else min(available, max(0, total - used))
        machine = machine and f"{machine} {identity}"
    return {"total": total, "available": available, "machine": machine}


def boot_id() -> str:
    """Return the running system's id: hosts with the same one are one machine, whatever their names. "": not known."""
    text = ""
    if sys.platform != "darwin":
        text = _read(BOOT_ID)
    else:
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            text = subprocess.run(MAC_BOOT_ID, capture_output=True, text=True, timeout=5).stdout
    return text.strip() if UUID.fullmatch(text.strip()) else ""


def tightest_group(listing: str, root: Path) -> tuple[int, int, str] | None:
    """Return (limit, bytes in use, identity) of the control group with the lowest limit around this process, or None.

    listing: the text of /proc/self/cgroup. root: where the groups are mounted. A container may see its own group as the
    root, and a path that does not exist there.
    """
    found = []
    for line in listing.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        (limit_file, used_file, cache), base = (FIRST_VERSION, root / "memory") if kinds else (SECOND_VERSION, root)
        parts = [] if ".." in path else [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            folder = base.joinpath(*parts[:count])
            limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                known = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                about = folder.stat()
                kept = int(known[1]) if known else 0
                found.append((int(limit), max(0, int(used) - kept), f"{about.st_dev}:{about.st_ino}"))
    return min(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
