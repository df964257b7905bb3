"""The address of this machine towards which ranks form their groups."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable

from distributed.hosts.interfaces import address_on
from whisper_tuner.errors import HostError


class Meeting:
    """`address` changes when this machine gets another one: by DHCP, or by waking elsewhere.

    interface: the one to be on, or "". line: what tells a worker of it; "" before it has moved.
    """

    def __init__(self, address: str, interface: str = ""):
        self._interface, self._first, self.line = interface, address, ""
        self.address = address

    def moved(self, connected: Iterable[str]) -> str:
        """Move if this machine has just lost its address and has another that leads to a host; say where to, or "".

        connected: its own addresses on the connections to hosts, best first. To be called often.
        """
        before = self.address
        if is_own(before) or not (address := self._move(connected)):
            return ""
        return f"the address of this machine was {before}, and is now {address}: the hosts meet there"

    def left(self, connected: Iterable[str]) -> str:
        """Move if hosts do not reach each other where they meet: to the usual network, and back from there.

        The fastest one, where a run begins, may be a cable that somebody pulls.
        """
        before = self.address
        if not (address := self._move(connected)):
            return ""
        return f"not all hosts reach each other by {before}: they meet at {address} now"

    def _move(self, connected: Iterable[str]) -> str:
        with contextlib.suppress(HostError):  # the network may be on its way up
            for address in self._others(connected):
                self.address, self.line = address, json.dumps({"type": "meeting", "address": address})
                return address
        return ""

    def _others(self, connected: Iterable[str]) -> list[str]:
        """List other addresses, the best first: that of the host first in the file, or where the run began."""
        if self._interface:
            found = [address_on(self._interface, self._interface)]
        else:
            found = [*[address for address in connected if is_own(address)][:1], self._first]
        return [address for address in found if address != self.address and is_own(address)]


def is_own(address: str) -> bool:
    """Tell whether this machine has this address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
