"""The group of processes that `exogym.launch` (or torchrun) has started.

A script that was started alone is a group of one, so the same script runs both ways.
"""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from exogym.comm.comm import DEFAULT_TIMEOUT, Comm, SingleComm
from exogym.comm.process_group import ProcessGroupComm, brief, gloo_options, leave_default_group
from exogym.config import one_of
from exogym.errors import PeerLost, SettingError
from exogym.strategy import communicate

BACKEND = "EXOGYM_BACKEND"  # what `--backend` says
RESTARTS = "TORCHELASTIC_RESTART_COUNT"

_store: dist.Store | None = None
_groups = count()


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def init(backend: str | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> Comm:
    """Join the default group of torch.distributed with all processes of the launch, unless this one already has.

    backend: as `--backend` if not given. timeout: seconds that a rank waits for the slowest. Returns what
    `exogym.strategy.communicate` uses now: its `rank` and `world_size`. Raises SettingError, PeerLost.
    """
    if not dist.is_initialized():
        backend = check_backend(backend or os.environ.get(BACKEND) or "gloo")
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        wait = timedelta(seconds=timeout)
        try:
            store = dist.PrefixStore(_next_group(), meeting_store(timeout))
            options = gloo_options(wait, own_address()) if backend == "gloo" else None
            dist.init_process_group(
                backend, store=store, rank=rank(), world_size=world_size(), timeout=wait, pg_options=options
            )
        except RuntimeError as error:
            raise PeerLost(f"rank {rank()} of {world_size()} could not join the group: {brief(error)}") from error
        atexit.register(leave_default_group)
    return communicate.current()


def check_backend(name: str) -> str:
    return one_of("backend", name, [known for known in dist.Backend.backend_list if known != dist.Backend.UNDEFINED])


def join(timeout: float = DEFAULT_TIMEOUT) -> Comm:
    """Form a new group of all processes of the launch, beside any others. Raises SettingError, PeerLost."""
    if world_size() == 1:
        return SingleComm()
    try:
        store = dist.PrefixStore(_next_group(), meeting_store(timeout))
    except RuntimeError as error:
        raise PeerLost(f"rank {rank()} of {world_size()} cannot reach the others: {brief(error)}") from error
    return ProcessGroupComm(rank=rank(), world_size=world_size(), store=store, address=own_address(), timeout=timeout)


def meeting_store(timeout: float) -> dist.Store:
    """Return the store where the processes of the launch meet. Raises SettingError, RuntimeError."""
    global _store
    if _store is None and world_size() == 1:
        _store = dist.HashStore()
    elif _store is None and dist.is_initialized():
        _store = dist.distributed_c10d._get_default_store()
    elif _store is None:
        try:
            _store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except ValueError as error:
            raise SettingError(f"this process was not launched as it should be: {error}") from None
    return _store


def own_address() -> str | None:
    """Return this machine's IPv4 address on the way to where all meet; None if gloo is to take GLOO_SOCKET_IFNAME's."""
    master = os.environ.get("MASTER_ADDR")
    if "GLOO_SOCKET_IFNAME" in os.environ or not master:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        try:
            probe.connect((master, int(os.environ.get("MASTER_PORT") or 1)))
        except OSError as error:
            raise SettingError(f"MASTER_ADDR = {master} cannot be reached over IPv4: {error}") from None
        return probe.getsockname()[0]


def _next_group() -> str:
    """Return a name for each group that forms, the same on all ranks; a launch that is restarted keeps its store."""
    return f"exogym/{os.environ.get(RESTARTS, 0)}/{next(_groups)}"
