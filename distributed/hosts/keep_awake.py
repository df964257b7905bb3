"""Keeps a machine from falling asleep while it works; a closed lid puts a laptop to sleep all the same."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.ssh.machine import on_each
from whisper_tuner.errors import HostError

if TYPE_CHECKING:  # a worker needs no paramiko
    from distributed.ssh.connection import Remote
    from distributed.ssh.machine import Process

CAFFEINATE = "/usr/bin/caffeinate"
# Not -d or -u: the display may sleep. While it is on, some Macs restart under a long load of the GPU (mlx 3267).
ASSERTIONS = ["-i", "-m", "-s"]
INHIBIT = ["--what=sleep:idle", "--who=multimac", "--why=training", "--mode=block"]
# On a host, as long as stdin stays open: macOS counts only a session with a terminal as somebody at work
# (ttyskeepawake, man pmset), and installing packages may take longer than it waits to fall asleep.
HOLD = f"""
[ -x "$0" ] && exec "$0" {" ".join(ASSERTIONS)} cat
[ -d /run/systemd/system ] && exec systemd-inhibit {" ".join(INHIBIT)} cat
"""


def keep_awake(pid: int) -> str:
    """Hold off idle sleep until process `pid` ends, however it ends; returns what does it, "" if nothing can."""
    holder = _hold(pid)
    return Path(holder.args[0]).name if holder else ""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """This machine, while a command of the user runs; also as a decorator, `@awake()`."""
    holder = _hold(os.getpid())
    try:
        yield
    finally:
        if holder:
            holder.terminate()
            holder.wait()


@contextlib.contextmanager
def hosts_awake(remotes: Iterable[Remote]) -> Iterator[None]:
    """Hosts, until this is left or the connections end. Where nothing can do that, they are used as they are."""
    held = on_each(list(remotes), _hold_on)
    try:
        yield
    finally:
        for process in filter(None, held):
            process.close_stdin()


def _hold_on(remote: Remote) -> Process | None:
    with contextlib.suppress(HostError):
        return remote.start(["/bin/sh", "-c", HOLD, CAFFEINATE])
    return None


def keeper(pid: int, system: str, *, systemd: bool) -> Sequence[str]:
    """The command that ends with process `pid`; empty where there is none."""
    if system == "Darwin":
        return [CAFFEINATE, *ASSERTIONS, "-w", str(pid)]
    if system == "Linux" and systemd:
        return ["systemd-inhibit", *INHIBIT, "tail", f"--pid={pid}", "-f", "/dev/null"]
    return []


def _hold(pid: int) -> subprocess.Popen | None:
    command = keeper(pid, platform.system(), systemd=Path("/run/systemd/system").is_dir())
    if not command or shutil.which(command[0]) is None:
        return None
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet)
