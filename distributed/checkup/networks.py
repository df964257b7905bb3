"""Chooses the network to train on: that of the hosts file's addresses, or a faster one that all hosts share."""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Iterator, Sequence

from distributed.hosts.interfaces import is_self_assigned

from .links import Links
from .look import Look

FASTER = 1.2  # than the usual network: a measurement of less than half a second is no more exact than that
SELF_ASSIGNED = 0.7  # what such an address counts for: a Mac changes it as it likes
THUNDERBOLT = "bridge0"
# macOS has one route for all of 169.254.0.0/16, often by Wi-Fi (targetBridge #130).
BRIDGE_UNUSED = (
    "the Thunderbolt Bridge (bridge0) is not used: with self-assigned addresses it is slower, or not reached. Give each"
    " Mac a fixed one, such as 10.10.0.1 and 10.10.0.2 with the mask 255.255.255.0: System Settings > Network >"
    " Thunderbolt Bridge > Details > TCP/IP > Manually"
)
MOST = 3  # networks besides the usual one that are tried
TRIED_S = 1.2  # a network that loses the first SYN is not worth it
SPARE = 1.5  # measurements take longer now and then
MEASURED_S = 1.5  # of the time for all, kept for the figures


def measured(looks: Sequence[Look], usual: str, deadline: float) -> list[Links]:
    """Measure the usual network, where ranks meet at `usual`, and others that all hosts share and that work."""
    token = secrets.token_hex(16)
    first = Links(looks, usual, deadline, token)
    first.connect()
    networks = [first, *_others(first, looks, token)]
    # With many hosts there is no time to measure all: the usual one comes first.
    del networks[max(1, int((deadline - time.monotonic()) / (SPARE * first.least_s))) :]
    for position, links in enumerate(networks):
        now = time.monotonic()
        links.measure(now + (deadline - now) / (len(networks) - position))
    return networks


def chosen(networks: Sequence[Links]) -> Links:
    """Choose the fastest by its slowest link. Another than the usual one must be clearly faster."""
    best = networks[0]
    for links in networks[1:]:
        if _worth(links) > FASTER * _worth(best):
            best = links
    return best


def told(best: Links, usual: Links) -> str:
    """Tell the user in one line what was chosen; "" where nothing is unusual."""
    if best is not usual:
        before = f"{usual.slowest_mbit:.0f} Mbit/s" if usual.is_whole else "where not all hosts reach each other"
        return f"training uses {_name(best)}, {best.slowest_mbit:.0f} Mbit/s, and not {_name(usual)}, {before}"
    bridges = [[at for name, at, _ in place["networks"] if name == THUNDERBOLT] for place in usual.places.values()]
    if bridges and all(at and is_self_assigned(at[0]) for at in bridges):
        return BRIDGE_UNUSED
    return ""


def _others(usual: Links, looks: Sequence[Look], token: str) -> Iterator[Links]:
    """Yield other networks that work. Every host must be in one; an interface that the user named decides."""
    master = usual.looks.get(0)
    if master is None or master.facts.host.interface:
        return
    end = usual.deadline - MEASURED_S
    for _, address, length in usual.places[0]["networks"][:MOST]:
        if time.monotonic() > end - TRIED_S:
            return
        links = Links(looks, address, usual.deadline, token, connect_s=TRIED_S)
        links.open()
        network = ipaddress.ip_network(f"{address}/{length}", strict=False)
        places = [ipaddress.ip_address(place["address"]) for place in links.places.values()]
        # Bridges of containers have one address on all machines.
        if len(set(places)) == len(looks) and all(place in network for place in places):
            links.connect()
            if links.is_whole:
                yield links


def _worth(links: Links) -> float:
    return links.slowest_mbit * (SELF_ASSIGNED if is_self_assigned(links.peer) else 1.0)


def _name(links: Links) -> str:
    interfaces = dict.fromkeys(place["interface"] for place in links.places.values())
    return f"{' and '.join(interfaces)} ({links.peer})"
