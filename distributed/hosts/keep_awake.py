"""What a machine does by itself while it works: it keeps awake, and leaves out of Time Machine's backups what it may.

A closed lid puts a laptop to sleep all the same.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from distributed.ssh.machine import Machine, Process, on_each
from whisper_tuner.errors import HostError

from .paths import REMOTE_WHEELS, STORE

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
TMUTIL = "/usr/bin/tmutil"
# Below a project folder: packages, copies of models and audio, caches. Checkpoints are as large as several models and
# new every few minutes; a run whose Mac is lost goes on from those of another host. Models, logs and settings stay.
MADE_ANEW = (".venv", STORE, ".cache", REMOTE_WHEELS, ".sync")
TOLD = Path(STORE, "left-out-of-backups")  # there once the user has been told


def keep_awake(pid: int) -> str:
    """Hold off idle sleep until process `pid` ends, however it ends; returns what does it, "" if nothing can."""
    holder = _hold(pid)
    command = holder.args if holder else None
    return Path(str(command[0])).name if isinstance(command, list) else ""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Keep this machine awake while a command of the user runs; also as a decorator, `@awake()`."""
    holder = _hold(os.getpid())
    try:
        yield
    finally:
        if holder:
            holder.terminate()
            holder.wait()


@contextlib.contextmanager
def hosts_awake(remotes: Iterable[Machine]) -> Iterator[None]:
    """Keep hosts awake until this is left or the connections end. Where nothing can do that, they are used as is."""

    def hold(remote: Machine) -> Process | None:
        with contextlib.suppress(HostError):
            return remote.start(["/bin/sh", "-c", HOLD, CAFFEINATE])
        return None

    held = on_each(list(remotes), hold)
    try:
        yield
    finally:
        for process in held:
            if process:
                process.close_stdin()


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
    return _start(command, own_session=True)


def _start(command: Sequence[str], *, own_session: bool = False) -> subprocess.Popen:
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=own_session)


def exclude_from_backups(*folders: Path) -> str:
    """On a Mac, leave out those of the folders that exist. The mark is an attribute of theirs, and needs no root.

    A folder behind a link is the user's own. Nobody waits for it: without it backups are larger, and that is all (man
    tmutil). Returns what is to be told, the first time.
    """
    found = [str(folder.absolute()) for folder in folders if folder.is_dir() and not folder.is_symlink()]
    if platform.system() != "Darwin" or not found or not Path(TMUTIL).exists():
        return ""
    _start([TMUTIL, "addexclusion", *found])
    with contextlib.suppress(OSError):
        TOLD.parent.mkdir(mode=0o700, exist_ok=True)
        TOLD.touch(exist_ok=False)
        return f"Time Machine leaves out from now on, as can be made anew: {', '.join(found)} (docs/removing.md)"
    return ""
