"""Where ranks of one machine meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from exogym.comm.process_group import DEFAULT_TIMEOUT

LOOPBACK = "127.0.0.1"


def local_store(timeout: float = DEFAULT_TIMEOUT) -> TCPStore:
    """A store that only this machine reaches; its `port` is free."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_local_store(port: int, timeout: float = DEFAULT_TIMEOUT) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))
