"""An address and a port as they come over the network, checked."""

from __future__ import annotations

import ipaddress

Endpoint = tuple[str, int]


def endpoint(address: object, port: object) -> Endpoint:
    """Raises ValueError for what is no IPv4 address and port."""
    if not isinstance(address, str) or type(port) is not int or not 0 < port < 65536:
        raise ValueError(f"{address!r}, {port!r} is no address and port")
    return str(ipaddress.IPv4Address(address)), port
