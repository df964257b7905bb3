"""A second link between hosts of a lab, beside the one that SSH uses: as between two Macs with Wi-Fi and a cable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lab import network
from lab.lab import Lab
from lab.machine import needed

BRIDGE = network.PREFIX + "br2"
SUBNET = "10.79.0"
INTERFACE = "en1"  # the name inside each host


def address(lab: Lab, host: str) -> str:
    return f"{SUBNET}.{lab[host].address.rpartition('.')[2]}"


@contextlib.contextmanager
def cable(lab: Lab, hosts: Sequence[str], rate: str | None = None) -> Iterator[None]:
    """Each of `hosts` also has `address`, on INTERFACE; `rate`, in tc's words, limits what each of them sends."""
    try:
        network.sh("ip", "link", "add", BRIDGE, "up", "type", "bridge")
        for host in hosts:
            network.plug_in(host, INTERFACE, f"{network.PREFIX}{host}-2", BRIDGE, address(lab, host))
            if rate:
                limit = network.limit_to(rate)
                with needed(network.LIMITED_LINKS):
                    network.in_namespace(host, "tc", "qdisc", "replace", "dev", INTERFACE, *limit)
        yield
    finally:
        for host in hosts:
            network.in_namespace(host, "ip", "link", "del", INTERFACE, check=False)
        network.sh("ip", "link", "del", BRIDGE, check=False)


def set_cable(host: str, up: bool) -> None:
    """In or out; a host keeps its address, but has no route there any more."""
    network.in_namespace(host, "ip", "link", "set", INTERFACE, "up" if up else "down")


def lose_address(lab: Lab, host: str) -> None:
    """As on a Mac whose cable is out: the interface has no address any more."""
    network.in_namespace(host, "ip", "addr", "flush", "dev", INTERFACE)
