"""Joins two ranks over gloo, each bound to its own address: how fast, and when a killed or silent one is noticed."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable

import torch

from distributed.control.messages import send_event
from exogym.comm.process_group import ProcessGroupComm
from exogym.comm.relayed_store import RelayedStore
from exogym.errors import PeerLost

WHOLE = 64 << 20  # bytes, at most
SMALL = 1 << 20
MEASURE_S = 4.0  # of one transfer, at most: over Wi-Fi less than 64 MB are sent
PAUSE_S = 0.05
LATE_S = 5.0


def speed(request: dict) -> dict:
    """Measure Mbit/s of the payload: all_reduce, and from each rank to the other. Rank 0 measures."""
    began = time.perf_counter()
    comm = _joined(request)
    formed_s = time.perf_counter() - began
    small = torch.zeros(SMALL // 4)
    comm.all_reduce_(small)
    seconds = _seconds(lambda: comm.all_reduce_(small), comm)
    # Both agree on how many bytes pass within MEASURE_S.
    agreed = torch.tensor([max(SMALL, min(WHOLE, int(SMALL * MEASURE_S / seconds) // 4 * 4))])
    comm.broadcast_(agreed)
    count = int(agreed) // 4
    flat = torch.full((count,), float(comm.rank + 1))
    both = _seconds(lambda: comm.all_reduce_(flat), comm)
    is_right = bool((flat == 3.0).all())
    first, second = (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send)
    there = _seconds(functools.partial(first, flat, 1 - comm.rank), comm)
    back = _seconds(functools.partial(second, flat, 1 - comm.rank), comm)
    rates = {name: 32 * count / seconds / 1e6 for name, seconds in (("both", both), ("there", there), ("back", back))}
    return {"formed_s": formed_s, "bytes": 4 * count, "is_right": is_right, "mbit": rates}


def survivor(request: dict) -> dict:
    """Exchange until the peer is lost. The peer runs this too, and is killed."""
    comm = _joined(request)
    comm.all_reduce_(torch.zeros(1))
    send_event({"type": "formed"})
    try:
        while True:
            comm.all_reduce_(torch.zeros(1))
            time.sleep(PAUSE_S)
    except PeerLost as error:
        return {"noticed": str(error)}


def silent(request: dict) -> dict:
    """Measure when gloo gives an operation up whose time-out is below its group's; rank 1 takes no part in it.

    Until then gloo keeps what was to be sent.
    """
    comm = _joined(request)
    comm.all_reduce_(torch.zeros(1))
    comm.timeout, began = request["operation_s"], time.monotonic()
    if comm.rank == 1:
        time.sleep(request["timeout_s"])
    with contextlib.suppress(PeerLost):  # whoever waits gives up by its own clock; gloo is asked below
        comm.all_reduce_(torch.zeros(1))
    (work, _), *_ = comm._held.values()
    assert work is not None
    while not (has_ended := work.is_completed()) and time.monotonic() < began + comm.timeout + LATE_S:
        time.sleep(PAUSE_S)
    return {"has_ended": has_ended, "seconds": time.monotonic() - began, "operation_s": comm.timeout}


def _joined(request: dict) -> ProcessGroupComm:
    """Join the other rank, once torch is loaded on both: no time-out must run on a slow start of the other.

    The second line of stdin has the key of this pair. The lines after it are what the other one sets in the store.
    """
    send_event({"type": "ready"})
    key = bytes.fromhex(json.loads(sys.stdin.buffer.readline())["key"])

    def told(name: str) -> str:
        said = json.loads(sys.stdin.buffer.readline())
        if said["key"] != name:
            raise PeerLost(f"the other one has set {said['key']}, not {name}")
        return said["value"]

    store = RelayedStore(lambda name, value: send_event({"type": "set", "key": name, "value": value}), told)
    return ProcessGroupComm(
        rank=request["rank"],
        world_size=2,
        store=store,
        address=request["address"],
        timeout=request["timeout_s"],
        key=key,
    )


def _seconds(work: Callable[[], None], comm: ProcessGroupComm) -> float:
    """Measure the seconds from when both are ready until both have done it."""
    comm.all_reduce_(torch.zeros(1))
    began = time.perf_counter()
    work()
    comm.all_reduce_(torch.zeros(1))
    return time.perf_counter() - began
