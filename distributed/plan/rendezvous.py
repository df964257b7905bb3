"""The address where the ranks meet: this machine's own, towards the workers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from distributed.hosts.interfaces import addresses_of, own_interfaces, route_to
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from whisper_tuner.errors import ConfigError


def meeting_address(hosts: Hosts, remotes: Sequence[Remote]) -> str:
    """This machine's own IPv4 address towards the workers. Raises ConfigError if it is not the master."""
    check_is_this_machine(hosts.master)
    peer = hosts.workers[0].address if hosts.workers else "127.0.0.1"
    if hosts.master.interface or not remotes:
        return route_to(peer, interface=hosts.master.interface).address
    return remotes[0].local_address or route_to(peer).address


def address_towards(hosts: Hosts, remotes: Sequence[Remote]) -> str:
    """The same, even if this is not the master, whose interface is then none of this machine's."""
    try:
        return meeting_address(hosts, remotes)
    except ConfigError:
        return meeting_address(replace(hosts, master=Host(address="localhost")), remotes)


def check_is_this_machine(master: Host) -> None:
    """Raise ConfigError unless `master` is the machine that this runs on: the launcher must run there."""
    names = {socket.gethostname().lower(), socket.gethostname().split(".")[0].lower()}
    names |= {name + ".local" for name in names} | {"localhost"}
    if master.address.lower() in names:
        return
    own = {address for addresses in own_interfaces().values() for address in addresses}
    found = addresses_of(master.address)
    if not found & own:
        where = f" ({', '.join(sorted(found))})" if found - {master.address} else ""
        here = ", ".join(sorted(address for address in own if not address.startswith("127."))) or "127.0.0.1"
        raise ConfigError(
            f"master {master.address}{where} is not this machine",
            remedy=f'Run this on {master.address}, or set "master" to this machine: {socket.gethostname()} or {here}.',
        )
