"""Joins an SSH session to a worker that is there already: `python -m distributed.control.relay DOOR ARRIVED`.

ARRIVED is how many of the worker's events the launcher has; the worker answers with how many lines it has heard. From
then on what comes in goes to the worker, and what it writes goes out, as if it had been started by this session.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

NOBODY_THERE, END_UNSEEN = 71, 72  # exit statuses: no worker answers; the worker has ended, nobody knows how
GREETING_S = 3.0  # for the first words through the door
BLOCK = 1 << 16


def main() -> int:
    door, arrived = sys.argv[1:]
    worker = socket.socket(socket.AF_UNIX)
    worker.settimeout(GREETING_S)
    try:
        worker.connect(door)
        worker.sendall(f"{arrived}\n".encode())
        block = worker.recv(BLOCK)
    except OSError:
        return NOBODY_THERE
    worker.settimeout(None)
    threading.Thread(target=_bring_in, args=(worker,), daemon=True).start()
    while block:
        while block:
            block = block[os.write(1, block) :]
        block = worker.recv(BLOCK)
    return END_UNSEEN


def _bring_in(worker: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := os.read(0, BLOCK):
            worker.sendall(block)
        worker.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os._exit(main())  # whatever the thread that reads is at
    os._exit(END_UNSEEN)
