"""Joins an SSH session to a worker's supervisor: `python -m distributed.control.relay SOCKET`, see supervisor.py.

The first line of stdin is the worker's command as a JSON list: then a supervisor is started, in a session of its own,
in place of one that may still be there. Both have the socket's path as their last argument, by which the next relay
finds them. An empty list only connects to the one that is there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .timeouts import Timeouts

SUPERVISOR = "distributed.control.supervisor"
NOBODY_THERE = 71  # exit status: no worker is there
BLOCK = 1 << 16
DYING_S = 1.0
POLL_S = 0.02  # of the start, which takes a tenth of a second


def main() -> int:
    path, stdin = Path(sys.argv[1]), sys.stdin.buffer
    assert isinstance(stdin, io.BufferedReader)
    command = json.loads(stdin.readline())
    if command:
        end_supervisor(path)
    started = start_supervisor(path, command) if command else None
    supervisor = connect(path, started)
    if supervisor is None:
        if started and started.stderr:
            _write(started.stderr.read())
        return NOBODY_THERE

    def bring_in() -> None:
        with contextlib.suppress(OSError):
            while block := stdin.read1(BLOCK):
                supervisor.sendall(block)
            supervisor.shutdown(socket.SHUT_WR)

    threading.Thread(target=bring_in, daemon=True).start()
    with contextlib.suppress(OSError):
        for line in supervisor.makefile("rb"):  # whole lines only: a connection that ends leaves no half one
            _write(line)
    return 0


def end_supervisor(path: Path) -> None:
    """Kill the one of this path and its worker, frozen or not: another may start only then.

    A worker that has lost its supervisor is still in its process group, and bears the path itself. Raises SystemExit
    if one may not be killed.
    """
    import psutil  # only where a worker is started: its import takes as long as all the rest

    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []  # other users' may not be looked at
        if arguments[-1:] == [str(path.resolve())] and process.pid != os.getpid():
            try:
                os.killpg(os.getpgid(process.pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:  # macOS's word for a group of zombies too, which only their parent can reap
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(DYING_S)
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    sys.exit(f"an earlier worker may not be killed; on that host: ps -p {process.pid} -o user,command")
    path.unlink(missing_ok=True)


def start_supervisor(path: Path, command: Sequence[str]) -> subprocess.Popen:
    """Start one that outlives this session. It holds none of its streams: else the session would not end."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = str(path.resolve())
    arguments = [sys.executable, "-m", SUPERVISOR, name]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    started = subprocess.Popen(arguments, stdin=pipe, stdout=nothing, stderr=pipe, start_new_session=True)
    assert started.stdin
    with contextlib.suppress(OSError):  # it says on stderr why it has ended
        started.stdin.write(json.dumps([*command, name]).encode() + b"\n")
        started.stdin.close()
    return started


def connect(path: Path, started: subprocess.Popen | None) -> socket.socket | None:
    """None if nobody listens there; to one that has just been started it gives its time.

    From the socket's folder, for a socket's path may only be 104 bytes long.
    """
    with contextlib.suppress(FileNotFoundError):
        os.chdir(path.parent)
    deadline = time.monotonic() + Timeouts().handshake_s
    while True:
        supervisor = socket.socket(socket.AF_UNIX)
        try:
            supervisor.connect(path.name)
            return supervisor
        except OSError:
            supervisor.close()
            if started is None or started.poll() is not None or time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(1, line) :]


if __name__ == "__main__":
    status = main()
    os._exit(status)  # whatever the thread that reads is at
