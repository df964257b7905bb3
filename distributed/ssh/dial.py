"""A TCP connection to a host by its name, which is looked up anew each time: addresses change."""

from __future__ import annotations

import socket
import time

# The first connection to a sleeping Mac may only wake it: "Wake for network access" has another device answer for it
# until then, see Apple's "Share your Mac resources when it's in sleep". Of less time than this there is nothing to
# halve: over a full link an answer may be 2 s late.
TWICE_S = 4.0


def dial(name: str, port: int, timeout: float) -> socket.socket:
    """Connect in `timeout` seconds; if half of them bring no answer, once more, to where the name leads then.

    Raises OSError, of which socket.gaierror for a name that is not known; UnicodeError for what cannot be one.
    """
    deadline = time.monotonic() + timeout
    if timeout >= TWICE_S:
        try:
            return _connect(name, port, timeout / 2)
        except TimeoutError:
            pass
    return _connect(name, port, max(0.1, deadline - time.monotonic()))


def _connect(name: str, port: int, timeout: float) -> socket.socket:
    """Connect to the first of its addresses that answers; each has its share of the time."""
    deadline, addresses = time.monotonic() + timeout, _addresses(name, port)
    error: OSError | None = None
    for number, address in enumerate(addresses):
        share = (deadline - time.monotonic()) / (len(addresses) - number)
        try:
            return socket.create_connection(address, timeout=max(0.1, share))
        except OSError as failed:
            error = failed if error is None or isinstance(failed, TimeoutError) else error
    raise error


def _addresses(name: str, port: int) -> list[tuple[str, int]]:
    """Look up IPv4, as the ranks use; IPv6 only for a name that has no other.

    Never for a Mac's `.local` name: its IPv6 address is fe80::..., good for one interface only, and comes first when a
    Mac has just woken.
    """
    try:
        found = socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        if name.lower().rstrip(".").endswith(".local"):
            raise
        found = socket.getaddrinfo(name, port, socket.AF_INET6, socket.SOCK_STREAM)
    return list(dict.fromkeys(entry[4][:2] for entry in found))
