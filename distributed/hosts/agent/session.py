"""Requests on stdin, answers on stdout, each one line of JSON.

A request is `{"id", "op", ...}`, with `last` if none comes after it: then the operation itself may read on. An answer
is `{"id", "answer"}` or `{"id", "error", "errno"}`, in any order. An `event` comes without a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading

children: list = []  # processes, and what else goes with the agent
_writing = threading.Lock()


def say(**message) -> None:
    with _writing, contextlib.suppress(OSError):  # the caller may have gone
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def serve(operations: dict) -> None:
    """Answer until stdin ends, each request in a thread of its own but for the last, which is finished in any case.

    A file that has arrived is always entered in the index, even if the caller has gone.
    """
    signal.signal(signal.SIGALRM, end)  # of BOOT
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            break  # the link was cut in the middle of a request
        request = json.loads(line)
        if request.pop("last", False):
            answer(operations, request)
            break
        threading.Thread(target=answer, args=(operations, request), daemon=True).start()
    end()


def end(*_signal) -> None:
    for child in children:
        child.kill()
    os._exit(0)  # nobody waits for the other threads


def answer(operations: dict, request: dict) -> None:
    number, name = request.pop("id"), request.pop("op")
    try:
        say(id=number, answer=operations[name](**request))
    except OSError as error:
        where = error.filename or request.get("root", name)  # a write names no file
        say(id=number, error=f"{where}: {error.strerror or error}", errno=error.errno)
    except Exception as error:  # the boundary: whatever it is must reach the caller
        say(id=number, error=f"{type(error).__name__}: {error}", errno=None)
