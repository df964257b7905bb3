"""Asks this machine one question: `python -m distributed.checkup.probes.probe MODULE.FUNCTION`, on master and hosts.

The function takes the request, the first line of stdin as a JSON object, and returns the answer. All is told in events,
as by a worker (see distributed/control/messages.py); `answer` or `failed` is the last one. Whatever becomes of its
asker, the process ends after `life_s` seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pwd
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from distributed.control.messages import send_event, split_line

PROBE = [sys.executable, "-m", "distributed.checkup.probes.probe"]


def main() -> None:
    module, _, function = sys.argv[1].partition(".")
    request = json.loads(sys.stdin.buffer.readline())
    signal.alarm(int(request.get("life_s", 60)))  # its default action: nothing that hangs in C can hold it up
    try:
        ask = getattr(importlib.import_module(f"distributed.checkup.probes.{module}"), function)
        said = {"type": "answer", "answer": ask(request)}
    except Exception as error:  # a machine fails with whatever it likes: that is a finding, not a crash
        said = {"type": "failed", "message": f"{type(error).__name__}: {error}"[:500]}
    send_event({**said, "secrets": secrets()})


def secrets() -> dict[str, list[str]]:
    """Name what this machine's answers may hold of its owner; the asker removes it from all that it writes."""
    names, users, folders = {socket.gethostname()}, set(), {str(Path.cwd()), os.environ.get("HOME", "")}
    with contextlib.suppress(KeyError):  # a user without an entry
        entry = pwd.getpwuid(os.getuid())
        users |= {entry.pw_name, entry.pw_gecos.split(",")[0]}
        folders.add(entry.pw_dir)
    return {"names": sorted(names), "users": sorted(users), "folders": sorted(folders)}


def answer_in(output: str) -> Any:
    """Find the answer in all that a probe has printed. Raises OSError if there is none."""
    # Not splitlines(): to that the mark of an event ends a line.
    events = [event for line in output.split("\n") if (event := split_line(line)[1])]
    if not events or events[-1]["type"] != "answer":
        raise OSError(f"no answer: {events[-1]['message'] if events else output[-300:]}")
    return events[-1]["answer"]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a group with a lost peer must not hold up the end
