"""Where the ranks meet: the launcher's TCPStore, on one address of this machine."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Iterable

from distributed.hosts.interfaces import address_on
from distributed.plan.run_spec import Rendezvous
from whisper_tuner.errors import HostError

OPEN_S = 10.0  # for a store to reach itself


class Meeting:
    """`place` is where the store is. It moves when this machine gets another address: by DHCP, or by waking elsewhere.

    interface: which one to listen on, or "". Never on all of them: the store asks nobody who they are.
    line: what tells a worker of it; "" before it has moved.
    """

    def __init__(self, address: str, interface: str = ""):
        self._interface, self._first, self.line = interface, address, ""
        self.place = self._listen(address, secrets.token_hex(16))

    def moved(self, connected: Iterable[str]) -> str:
        """Where to, in words, if this machine has just lost its address and has another that leads to a host; or "".

        connected: its own addresses on the connections to hosts, best first. To be called often.
        """
        before = self.place.address
        if is_own(before) or not (address := self._move(connected)):
            return ""
        return f"the address of this machine was {before}, and is now {address}: the hosts meet there"

    def left(self, connected: Iterable[str]) -> str:
        """The same if hosts do not reach each other where they meet: to the usual network, and back from there.

        The fastest one, where a run begins, may be a cable that somebody pulls.
        """
        before = self.place.address
        if not (address := self._move(connected)):
            return ""
        return f"not all hosts reach each other by {before}: they meet at {address} now"

    def _move(self, connected: Iterable[str]) -> str:
        with contextlib.suppress(HostError, OSError, RuntimeError):  # the network may be on its way up, or down again
            for address in self._others(connected):
                self.place = self._listen(address, self.place.prefix)
                self.line = json.dumps({"type": "meeting", "address": address, "port": self.place.port})
                return address
        return ""

    def _others(self, connected: Iterable[str]) -> list[str]:
        """Of the host first in the file, or where the run began; the best first."""
        if self._interface:
            found = [address_on(self._interface, self._interface)]
        else:
            found = [*[address for address in connected if is_own(address)][:1], self._first]
        return [address for address in found if address != self.place.address and is_own(address)]

    def _listen(self, address: str, prefix: str) -> Rendezvous:
        from exogym.comm.process_group import open_store

        self._store = open_store(address, OPEN_S)
        return Rendezvous(address=address, port=self._store.port, prefix=prefix)


def is_own(address: str) -> bool:
    """Whether this machine has this address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
