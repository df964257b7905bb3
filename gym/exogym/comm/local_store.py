"""Where ranks of one machine meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from exogym.comm.process_group import DEFAULT_TIMEOUT


def loopback_interface() -> str:
    """`lo` on Linux, `lo0` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def local_store(timeout: float = DEFAULT_TIMEOUT) -> dist.TCPStore:
    """A store that only this machine reaches; its `port` is free."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_local_store(port: int, timeout: float = DEFAULT_TIMEOUT) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
