"""Which of this machine's addresses and interfaces reaches another machine (IPv4).

gloo must be told: left alone it resolves the host's own name and may bind 127.0.0.1, where no other host finds it.
The agent uses this on a host, so it needs no more than Python 3.9 until psutil is asked.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from whisper_tuner.errors import HostError

# Loopback, VPN tunnels, Apple's peer-to-peer Wi-Fi, and bridges: reachable for one side only, as a rule.
UNFIT = re.compile(r"(lo|utun|awdl|llw|bridge)\d*")


class Route(NamedTuple):
    """This machine's own address and interface on the way to a peer."""

    address: str
    interface: str


def resolve_ipv4(name: str) -> str:
    """IPv4 address of a name or address. Raises HostError."""
    found = addresses_of(name)
    if not found:
        raise HostError(
            name, "the name has no IPv4 address", remedy=f"Check it with `ping {name}`, or use the address."
        )
    reachable = {address for address in found if not ipaddress.ip_address(address).is_loopback}
    return min(reachable or found)


def addresses_of(name: str) -> set[str]:
    """All IPv4 addresses of a name; empty if it has none."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)}
    except (socket.gaierror, UnicodeError):
        return set()


def route_to(peer: str, *, interface: str | None = None) -> Route:
    """This machine's address towards `peer` (name or IPv4), on `interface` if the user named one. Raises HostError."""
    if interface is not None:
        return Route(address=address_on(interface, peer), interface=interface)
    there = resolve_ipv4(peer)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))  # sends nothing: it only asks the routing table
        except OSError as error:
            raise HostError(peer, f"no route to {there}: {error.strerror}", remedy="Is the network up?") from error
        address = probe.getsockname()[0]
    name = interface_with(address)
    if UNFIT.fullmatch(name) and not ipaddress.ip_address(there).is_loopback:
        raise HostError(
            peer,
            f"{there} is reached through {name}, which other hosts cannot use",
            remedy='Name the right one with "interface" in the hosts file, or switch the VPN off.',
        )
    return Route(address=address, interface=name)


def own_interfaces() -> dict[str, list[str]]:
    """IPv4 addresses of this machine's interfaces; an interface may have none."""
    import psutil

    found = psutil.net_if_addrs()
    return {name: [entry.address for entry in found[name] if entry.family == socket.AF_INET] for name in found}


def interface_with(address: str) -> str:
    for name, addresses in own_interfaces().items():
        if address in addresses:
            return name
    raise HostError(address, "no interface of this machine has this address")


def address_on(interface: str, peer: str) -> str:
    interfaces = own_interfaces()
    if addresses := interfaces.get(interface):
        return addresses[0]
    problem = "has no IPv4 address" if interface in interfaces else "is not an interface of this machine"
    raise HostError(peer, f"{interface} {problem}", remedy=f"Its interfaces: {', '.join(sorted(interfaces))}.")
