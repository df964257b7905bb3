"""A CPU share per host, by cgroup v1 or v2. Where there is neither, hosts have no limits."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from lab.errors import LabError
from lab.machine import needed
from lab.network import PREFIX

PERIOD_US = 100_000
THREADS = "threads"  # the group inside a host's, see set_share_of_first_threads
SHARES = "shares of the processor (cgroups)"


def root() -> Path:
    """Folder of the CPU controller: cgroup v2's root, or the v1 hierarchy, which may not be there."""
    base = Path("/sys/fs/cgroup")
    if (base / "cgroup.controllers").exists():
        return base
    return base / ("cpu,cpuacct" if (base / "cpu,cpuacct").exists() else "cpu")


def group(host: str) -> Path:
    return root() / (PREFIX + host)


def add_group(host: str, cpus: float | None) -> None:
    with needed(SHARES):
        group(host).mkdir(exist_ok=True)
    set_share(host, cpus)


def join(host: str) -> str:
    """The beginning of a shell line whose process joins the host's group, if there is one."""
    procs = group(host) / "cgroup.procs"
    return f"echo $$ > {shlex.quote(str(procs))} && " if procs.exists() else ""


def set_share(host: str, cpus: float | None) -> None:
    """Limit the host to `cpus` cores (0.5 is half of one); None lifts the limit."""
    folder = group(host)
    quota = None if cpus is None else int(cpus * PERIOD_US)
    with needed(SHARES):
        if (root() / "cgroup.controllers").exists():
            with contextlib.suppress(OSError):  # already delegated, or by systemd only
                (root() / "cgroup.subtree_control").write_text("+cpu")
            if not (folder / "cpu.max").exists():
                raise LabError(f"{folder}: the cpu controller is not available here")
            (folder / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota or -1))


def set_share_of_first_threads(host: str, pids: Iterable[int], cpus: float) -> None:
    """Limit the first thread of each process to `cpus` cores, of all of them together, out of what the host has.

    Threads that it starts later begin with its limit: call this again to free them. Raises LabError on cgroup v2, where
    a host's processes would have to be set up for it.
    """
    if (root() / "cgroup.controllers").exists():
        raise LabError("threads of a process have shares of their own with cgroup v1 only")
    folder = group(host) / THREADS
    folder.mkdir(exist_ok=True)
    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * PERIOD_US)))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                limited = thread.name == str(pid)
                ((folder if limited else group(host)) / "tasks").write_text(thread.name)


def pids(folder: Path) -> list[int]:
    found: set[int] = set()
    for each in (folder, folder / THREADS):
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in (each / "cgroup.procs").read_text().split()}
    return sorted(found)


def groups() -> list[Path]:
    return sorted(root().glob(PREFIX + "*"))


def remove_all(timeout: float = 5.0) -> None:
    """Remove every group of any lab; waits for killed processes to leave."""
    deadline = time.monotonic() + timeout
    for folder in [path for each in groups() for path in (each / THREADS, each)]:
        while True:
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LabError(f"{folder}: {error} (processes {pids(folder)})") from error
                time.sleep(0.05)
