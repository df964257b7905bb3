"""A limit of memory per host, by cgroup v1 or v2."""

from __future__ import annotations

import contextlib
import shlex
import time
from pathlib import Path

from lab import cpu
from lab.network import PREFIX

LIMITS = "limits of memory (cgroups)"
V1 = Path("/sys/fs/cgroup/memory")


def group(host: str) -> Path:
    """Return the folder of a host's group: with cgroup v2 that of its share of the processor."""
    return cpu.group(host) if _is_v2() else V1 / (PREFIX + host)


def _is_v2() -> bool:
    return (cpu.root() / "cgroup.controllers").exists()


def set_limit(host: str, limit: int | None) -> None:
    """Limit the host to so many bytes, without swap, from its next process on; None lifts the limit."""
    folder = group(host)
    folder.mkdir(exist_ok=True)
    if _is_v2():
        with contextlib.suppress(OSError):  # already delegated
            (cpu.root() / "cgroup.subtree_control").write_text("+memory")
        files = {"memory.max": str(limit or "max"), "memory.swap.max": "max" if limit is None else "0"}
    else:
        files = {"memory.limit_in_bytes": str(limit or -1), "memory.swappiness": "60" if limit is None else "0"}
    for name, value in files.items():
        (folder / name).write_text(value)


def join(host: str) -> str:
    """Return the beginning of a shell line whose process joins the host's group, if there is one of its own."""
    procs = group(host) / "cgroup.procs"
    return f"echo $$ > {shlex.quote(str(procs))} && " if not _is_v2() and procs.exists() else ""


def remove_all(timeout: float = 5.0) -> None:
    """Remove every group of any lab; waits for killed processes to leave."""
    deadline = time.monotonic() + timeout
    for folder in [] if _is_v2() else V1.glob(PREFIX + "*"):
        while folder.exists():
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
