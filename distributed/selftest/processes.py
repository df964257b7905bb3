"""Process groups: whether a command leads the group that was announced, and what killing one does."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from distributed.control.messages import send_event

GONE_S = 3.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def sit(request: dict) -> dict:
    """Say what process and group this is, with a child in it, and wait to be killed."""
    child = subprocess.Popen(SLEEPER)
    shells = {"login": _name(_login_shell()), "session": _name(os.environ.get("SHELL", ""))}
    send_event({"type": "sits", "pid": os.getpid(), "group": os.getpgid(0), "child": child.pid, "shells": shells})
    while True:
        time.sleep(60)


def _login_shell() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return ""


def _name(shell: str) -> str:
    return Path(shell).name


def alive(request: dict) -> list[int]:
    """Which of `pids` are still there after GONE_S; zombies are not."""
    deadline = time.monotonic() + GONE_S
    while (left := [pid for pid in request["pids"] if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def zombie(request: dict) -> dict:
    """killpg on a group whose only member has ended: before somebody waits for it, and after."""
    child = subprocess.Popen(["/bin/sh", "-c", "exit 0"], start_new_session=True)
    deadline = time.monotonic() + GONE_S
    while _lives(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    unreaped = _killed(child.pid)
    child.wait()
    return {"unreaped": unreaped, "reaped": _killed(child.pid)}


def _killed(group: int) -> str:
    """The name of the error, "" without one."""
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return ""
