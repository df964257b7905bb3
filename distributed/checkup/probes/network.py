"""A machine's interfaces, the names that it can resolve, its place in the network of the run, and its connections.

A TCP connection is tried by this Python and by the system's own `nc`, and again from a process whose parent is gone.
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

import psutil

from distributed.checkup.programs import said_by
from distributed.control.messages import send_event
from distributed.hosts.interfaces import UNFIT, own_interfaces, route_to
from whisper_tuner.errors import HostError

from .probe import PROBE, answer_in

FAMILIES = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
PROGRAMS = {
    "ports": ["/usr/sbin/networksetup", "-listallhardwareports"],
    "ifconfig": ["/sbin/ifconfig", "-a"],
}
ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has it, so the way there is the default route; nothing is sent
CONNECT_S = 2
ORPHAN_S = 5.0
# The child goes on in a session of its own when this is gone, as a launcher does.
FORSAKE = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"


def interfaces(request: dict) -> dict:
    """List the interfaces, their `addresses` in the system's order: gloo would take the first one over libuv."""
    states = psutil.net_if_stats()
    found = [
        {
            "name": name,
            "up": name in states and states[name].isup,
            "speed": states[name].speed if name in states else 0,
            "addresses": [[FAMILIES[e.family], e.address] for e in entries if e.family in FAMILIES],
        }
        for name, entries in psutil.net_if_addrs().items()
    ]
    programs = PROGRAMS if sys.platform == "darwin" else {}
    return {"interfaces": found, "programs": {name: said_by(command) for name, command in programs.items()}}


def names(request: dict) -> list[dict]:
    """Resolve each of `names`: the addresses in order, the seconds that it took."""
    found: list[dict] = []
    for name in request["names"]:
        began = time.perf_counter()
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            said: dict = {"addresses": [[FAMILIES[e[0]], e[4][0]] for e in entries if e[0] in FAMILIES]}
        except (OSError, UnicodeError) as error:
            said = {"failed": str(error)}
        found.append({"name": name, **said, "seconds": time.perf_counter() - began})
    return found


def place(request: dict) -> dict:
    """Find this machine's own address towards `peer`; without one, on the network that leads elsewhere."""
    if request.get("peer"):
        return route_to(request["peer"], interface=request.get("interface") or None)._asdict()
    try:
        return route_to(ELSEWHERE)._asdict()
    except HostError:  # no default route, or a VPN has it
        fit = [(name, own[0]) for name, own in own_interfaces().items() if own and not UNFIT.fullmatch(name)]
        name, address = next(iter(fit), ("loopback", "127.0.0.1"))
        return {"address": address, "interface": name}


def listen(request: dict) -> dict:
    """Take connections on `address` until this process is killed."""
    with socket.create_server((request["address"], 0), backlog=64) as listener:
        send_event({"type": "listening", "port": listener.getsockname()[1]})
        while True:
            listener.accept()[0].close()


def connect(request: dict) -> list[dict]:
    """Connect to each of `targets`, given as [who, address, port]: from this process, and from an orphan."""
    attached = [{"to": who, **_both(address, port)} for who, address, port in request["targets"]]
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as told:
        parent = subprocess.Popen(
            [sys.executable, "-c", FORSAKE, *PROBE, "network.orphan"],
            stdin=reading,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        told.write(json.dumps({"targets": request["targets"], "parent": parent.pid, "life_s": 30}) + "\n")
        told.flush()
        output, _ = parent.communicate(timeout=30)  # to the end of the orphan, which has the same pipe
    detached = answer_in(output)
    return [{**own, "detached": other} for own, other in zip(attached, detached, strict=True)]


def orphan(request: dict) -> list[dict]:
    """Connect to each of `targets` once this process's parent is gone.

    It ends with its stdin, for it is in no group that the asker kills.
    """

    def end_with_stdin() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    deadline = time.monotonic() + ORPHAN_S
    while os.getppid() == request["parent"] and time.monotonic() < deadline:
        time.sleep(0.02)
    alone = os.getppid() != request["parent"]
    return [{**_both(address, port), "alone": alone} for _, address, port in request["targets"]]


def _both(address: str, port: int) -> dict:
    """Connect by Python, and by nc where there is one. Its -G is the time-out for connecting on macOS (man nc)."""
    began = time.perf_counter()
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
        by_python: dict = {"ok": True, "seconds": time.perf_counter() - began}
    except OSError as error:
        by_python = {"ok": False, "errno": error.errno, "said": error.strerror or str(error)}
    program, limit = shutil.which("nc"), ["-w", str(CONNECT_S)]
    if sys.platform == "darwin":
        program, limit = "/usr/bin/nc", ["-G", str(CONNECT_S)]
    if not program:
        return {"python": by_python, "nc": None}
    done = said_by([program, "-z", *limit, address, str(port)], CONNECT_S + 3)
    return {"python": by_python, "nc": {"ok": done["status"] == 0, **done}}
