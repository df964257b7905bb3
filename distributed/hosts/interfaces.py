"""Which of this machine's addresses and interfaces reaches another machine (IPv4).

gloo must be told: left alone it resolves the host's own name and may bind 127.0.0.1, where no other host finds it.
The agent uses this on a host, so it needs no more than Python 3.9 until psutil is asked.
"""

from __future__ import annotations

import ipaddress
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.errors import HostError

# Loopback, VPN tunnels, Apple's peer-to-peer Wi-Fi, and macOS's bridges of virtual machines and of Internet Sharing,
# which it numbers from 100: reachable for one side only, as a rule. bridge0 is the Thunderbolt Bridge.
UNFIT = re.compile(r"(lo|utun|awdl|llw)\d*|bridge(\d\d+|[1-9])?")
# Of containers and virtual machines on Linux: every host may have the same network, with nobody else in it. And VPNs.
INNER = re.compile(r"(docker|virbr|veth|br-|cni|podman|lxc|lxd|tun|tap|wg|zt|feth|tailscale|ppp|ipsec)\S*")
HARDWARE_PORTS = ["/usr/sbin/networksetup", "-listallhardwareports"]
LINKS = ("Wi-Fi", "Thunderbolt", "Ethernet")  # as macOS names them, alone or in a longer name


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


def kinds_of_links() -> dict[str, str]:
    """Return Wi-Fi, Ethernet, Thunderbolt or the system's own name for it, of each interface that has a device."""
    if platform.system() == "Darwin":
        try:
            said = subprocess.run(HARDWARE_PORTS, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):  # the link is only told
            return {}
        named = re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", said.decode("utf-8", "replace"))
        return {device: next((kind for kind in LINKS if kind in port), port) for port, device in named}
    found = {}
    for place in Path("/sys/class/net").glob("*/device"):
        is_thunderbolt = "thunderbolt" in (place / "driver").resolve().name
        wired = "Thunderbolt" if is_thunderbolt else "Ethernet"
        found[place.parent.name] = "Wi-Fi" if (place.parent / "wireless").exists() else wired
    return found


def own_interfaces() -> dict[str, list[str]]:
    """IPv4 addresses of this machine's interfaces, self-assigned ones last; an interface may have none."""
    return {name: [str(each.ip) for each in of] for name, of in _networks().items()}


def other_networks(address: str) -> list[tuple[str, str, int]]:
    """List further networks of this machine that other hosts may share: interface, own address, length of its prefix.

    An interface counts with its self-assigned address only if it has no other. Who trains over a VPN, which is point to
    point or named so, wants nothing sent beside it: there are no others then.
    """
    import psutil

    states = psutil.net_if_stats()
    networks = {}
    for name, of in _networks().items():
        is_vpn = INNER.fullmatch(name) or (name in states and "pointopoint" in states[name].flags)
        if of and not UNFIT.fullmatch(name) and not is_vpn:
            networks[name] = of
    own = [each.network for of in networks.values() for each in of if str(each.ip) == address]
    found = [(name, of[0]) for name, of in networks.items() if own and of[0].network not in own]
    found.sort(key=lambda each: each[1].ip.is_link_local)
    return [(name, str(first.ip), first.network.prefixlen) for name, first in found]


def is_self_assigned(address: str) -> bool:
    """Tell whether an address is one that a machine gives itself where nobody else does: 169.254.x.x."""
    return ipaddress.ip_address(address).is_link_local


def _networks() -> dict[str, list[ipaddress.IPv4Interface]]:
    """List, by interface, its IPv4 addresses with their networks, self-assigned ones last."""
    import psutil

    found = {}
    for name, entries in psutil.net_if_addrs().items():
        of = [entry for entry in entries if entry.family == socket.AF_INET]
        addresses = [ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask or 32}") for entry in of]
        found[name] = sorted(addresses, key=lambda each: each.ip.is_link_local)
    return found


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
