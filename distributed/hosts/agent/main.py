"""What the agent can be asked: requests on stdin, answers on stdout, each one line of JSON.

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
import time
from functools import partial

from .facts import TorchProcess, code, facts, space
from .files import Folders, check, commit, lacking
from .holdings import holdings
from .links import Links

_writing = threading.Lock()


def main() -> None:
    """Answer until stdin ends, each request in a thread of its own but for the last, which is finished in any case.

    A file that has arrived is always entered in the index, even if the caller has gone.
    """
    links, torch, folders = Links(partial(say, event="burst")), TorchProcess(), Folders()
    named: list = [facts, space, code, check, lacking, commit, holdings, folders.mark, folders.seen]
    named += [links.open, links.connect, links.heard, links.burst, torch.torch_facts]
    operations: dict = {operation.__name__: operation for operation in named}
    operations["clock"] = lambda: {"clock": time.time()}
    for op in ("begin_groups", "form_groups"):
        operations[op] = partial(torch.ask, op)

    def end(*_signal) -> None:
        torch.kill()
        folders.remove_marks()
        os._exit(0)  # nobody waits for the other threads

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


def answer(operations: dict, request: dict) -> None:
    number, name = request.pop("id"), request.pop("op")
    try:
        say(id=number, answer=operations[name](**request))
    except OSError as error:
        where = error.filename or request.get("root", name)  # a write names no file
        say(id=number, error=f"{where}: {error.strerror or error}", errno=error.errno)
    except Exception as error:  # the boundary: whatever it is must reach the caller
        say(id=number, error=f"{type(error).__name__}: {error}", errno=None)


def say(**message) -> None:
    with _writing, contextlib.suppress(OSError):  # the caller may have gone
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
