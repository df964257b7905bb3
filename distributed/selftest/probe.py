"""One question of the self-test: `python -m distributed.selftest.probe NAME`, on the master as on any host.

The request is the first line of stdin, a JSON object. It answers by events, as a worker (see
distributed/control/messages.py); `answer` or `failed` is the last one. Whatever becomes of its asker, the process ends
after `life_s` seconds.
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

from distributed.control.messages import send_event

# NAME: the module with a function of that name, which takes the request and returns the answer.
PROBES = {
    "system": "system",
    "interfaces": "network",
    "names": "network",
    "place": "network",
    "listen": "connect",
    "connect": "connect",
    "orphan": "connect",
    "speed": "gloo",
    "survivor": "gloo",
    "silent": "gloo",
    "imports": "imports",
    "import_torch": "imports",
    "arithmetic": "compute",
    "shapes": "compute",
    "memory": "compute",
    "sit": "processes",
    "alive": "processes",
    "zombie": "processes",
    "services": "services",
    "beats": "beats",
    "forget": "forget",
}
MODULE = __name__ if __name__ != "__main__" else "distributed.selftest.probe"


def main() -> None:
    name, request = sys.argv[1], json.loads(sys.stdin.buffer.readline())
    signal.alarm(int(request.get("life_s", 60)))  # its default action: nothing that hangs in C can hold it up
    try:
        module = importlib.import_module(f"distributed.selftest.{PROBES[name]}")
        said = {"type": "answer", "answer": getattr(module, name)(request)}
    except Exception as error:  # a machine fails with whatever it likes: that is a finding, not a crash
        said = {"type": "failed", "message": f"{type(error).__name__}: {error}"[:500]}
    send_event({**said, "secrets": secrets()})


def secrets() -> dict[str, list[str]]:
    """What this machine's answers may hold of its owner; the asker removes it from all that it writes."""
    names, users, folders = {socket.gethostname()}, set(), {str(Path.cwd()), os.environ.get("HOME", "")}
    with contextlib.suppress(KeyError):  # a user without an entry
        entry = pwd.getpwuid(os.getuid())
        users |= {entry.pw_name, entry.pw_gecos.split(",")[0]}
        folders.add(entry.pw_dir)
    return {"names": sorted(names), "users": sorted(users), "folders": sorted(folders)}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a group with a lost peer must not hold up the end
