"""What the user may have to do about a host that is not found again."""

from __future__ import annotations

import ipaddress

from distributed.ssh.local_network import NO_ROUTE  # also what a program gets that may not use the local network

TRIES = 10  # by then a host that only sleeps or starts has had half a minute
TERMINAL_CLOSED = (
    "no route to it (errno 65). Was the terminal closed in which this run was started? macOS may then keep the run off"
    " the local network: docs/lost-hosts.md#the-terminal-was-closed-and-no-host-is-found"
)
BY_ADDRESS = (
    "still not reached. Has it got another address? Only a host given by its name, such as mac-mini.local, is found"
    " again at a new one: write its name into the hosts file, and go on with --resume and --hosts"
)


def advice(name: str, error: Exception, tries: int, *, is_new: bool) -> str:
    """Say what the user may have to do, or "". name: as in the hosts file; is_new: the reason differs from the last."""
    if is_new and getattr(error.__cause__, "errno", None) == NO_ROUTE:
        return TERMINAL_CLOSED
    return BY_ADDRESS if tries == TRIES and _is_address(name) else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
