"""A TCP connection by this Python against one by the system's own `nc`; again from a process whose parent is gone.

Local Network privacy (macOS 15) asks which program is responsible. Apple's programs are exempt; a Python may get errno
65 at the same moment. A process that outlives its terminal may be judged otherwise than one within it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

from distributed.control.messages import send_event

from .programs import PROBE, answer_in, said_by

CONNECT_S = 2
ORPHAN_S = 5.0
# The child goes on in a session of its own when this is gone, as a launcher does.
FORSAKE = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"


def listen(request: dict) -> dict:
    """Take connections on `address` until this process is killed."""
    with socket.create_server((request["address"], 0), backlog=64) as listener:
        send_event({"type": "listening", "port": listener.getsockname()[1]})
        while True:
            listener.accept()[0].close()


def connect(request: dict) -> list[dict]:
    """To each of `targets`, as [who, address, port]."""
    attached = [{"to": who, **_both(address, port)} for who, address, port in request["targets"]]
    detached = _from_orphan(request)
    return [{**own, "detached": other} for own, other in zip(attached, detached, strict=True)]


def orphan(request: dict) -> list[dict]:
    """The same, once this process's parent is gone; as long as stdin is open, for no group of the asker's has it."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    deadline = time.monotonic() + ORPHAN_S
    while os.getppid() == request["parent"] and time.monotonic() < deadline:
        time.sleep(0.02)
    alone = os.getppid() != request["parent"]
    return [{**_both(address, port), "alone": alone} for _, address, port in request["targets"]]


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _from_orphan(request: dict) -> list[dict]:
    reading, writing = os.pipe()
    about = {"targets": request["targets"], "life_s": 30}
    with os.fdopen(reading), os.fdopen(writing, "w") as told:
        parent = subprocess.Popen(
            [sys.executable, "-c", FORSAKE, *PROBE, "orphan"],
            stdin=reading,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        told.write(json.dumps({**about, "parent": parent.pid}) + "\n")
        told.flush()
        output, _ = parent.communicate(timeout=30)  # to the end of the orphan, which has the same pipe
    return answer_in(output)


def _both(address: str, port: int) -> dict:
    return {"python": _by_python(address, port), "nc": _by_nc(address, port)}


def _by_python(address: str, port: int) -> dict:
    began = time.perf_counter()
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return {"ok": False, "errno": error.errno, "said": error.strerror or str(error)}
    return {"ok": True, "seconds": time.perf_counter() - began}


def _by_nc(address: str, port: int) -> dict | None:
    """None where there is no nc. -G is the time-out for connecting on macOS (man nc), -w elsewhere."""
    if sys.platform == "darwin":
        program, limit = "/usr/bin/nc", ["-G", str(CONNECT_S)]
    else:
        program, limit = shutil.which("nc"), ["-w", str(CONNECT_S)]
    if not program:
        return None
    done = said_by([program, "-z", *limit, address, str(port)], CONNECT_S + 3)
    return {"ok": done["status"] == 0, **done}
