"""A machine's interfaces, the names that it can resolve, and its place in the network of the run."""

from __future__ import annotations

import socket
import sys
import time

import psutil

from distributed.hosts.interfaces import UNFIT, own_interfaces, route_to
from whisper_tuner.errors import HostError

from .programs import said_by

FAMILIES = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
PROGRAMS = {
    "ports": ["/usr/sbin/networksetup", "-listallhardwareports"],
    "ifconfig": ["/sbin/ifconfig", "-a"],
}
ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has it, so the way there is the default route; nothing is sent


def interfaces(request: dict) -> dict:
    """`addresses` in the system's order: on macOS gloo would take the first one of an interface (facts: libuv)."""
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
    """How each of `names` is resolved: the addresses in order, the seconds that it took."""
    return [{"name": name, **_resolved(name)} for name in request["names"]]


def _resolved(name: str) -> dict:
    began = time.perf_counter()
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"failed": str(error), "seconds": time.perf_counter() - began}
    found = [[FAMILIES[entry[0]], entry[4][0]] for entry in entries if entry[0] in FAMILIES]
    return {"addresses": found, "seconds": time.perf_counter() - began}


def place(request: dict) -> dict:
    """This machine's own address towards `peer`; without one, on the network that leads elsewhere."""
    if request.get("peer"):
        return route_to(request["peer"], interface=request.get("interface") or None)._asdict()
    try:
        return route_to(ELSEWHERE)._asdict()
    except HostError:  # no default route, or a VPN has it
        fit = [(name, own[0]) for name, own in own_interfaces().items() if own and not UNFIT.fullmatch(name)]
        name, address = next(iter(fit), ("loopback", "127.0.0.1"))
        return {"address": address, "interface": name}
