"""gloo over libuv, as on a Mac, made of the real one: who joins where nobody listens never returns, and a collective
with a lost peer raises nothing before its own time-out, and keeps its buffers until then.

Seen with gloo built with USE_LIBUV on Linux. There is no Mac here, and torch's own builds for Linux have TCP only.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from exogym.comm import process_group

TURN_S = 0.01


class UvWork:
    def __init__(self, work: dist.Work, limit_s: float, held: list):
        self._work, self._deadline, self._held = work, time.monotonic() + limit_s, held

    def _has_failed(self) -> bool:
        """Of one that is completed."""
        try:
            return not self._work.wait()
        except RuntimeError:
            return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():  # asked once: it may fail at any time
            return False
        return not self._has_failed() or time.monotonic() >= self._deadline

    def wait(self, timeout: timedelta | None = None) -> bool:
        until = self._deadline if timeout is None else min(self._deadline, time.monotonic() + timeout.total_seconds())
        while True:
            if self._work.is_completed() and not self._has_failed():
                return True
            if time.monotonic() >= until:
                raise RuntimeError("Timed out waiting for recv operation to complete")
            time.sleep(TURN_S)


class UvGroup:
    def __init__(self, group: dist.ProcessGroupGloo, limit: timedelta):
        self._group, self._limit_s = group, limit.total_seconds()

    def allreduce(self, tensors, options):
        return UvWork(self._group.allreduce(tensors, options), options.timeout.total_seconds(), tensors)

    def broadcast(self, tensors, options):
        return UvWork(self._group.broadcast(tensors, options), options.timeout.total_seconds(), tensors)

    def allgather(self, gathered, tensors):
        return UvWork(self._group.allgather(gathered, tensors), self._limit_s, [gathered, tensors])

    def send(self, tensors, peer, tag):
        return UvWork(self._group.send(tensors, peer, tag), self._limit_s, tensors)

    def recv(self, tensors, peer, tag):
        return UvWork(self._group.recv(tensors, peer, tag), self._limit_s, tensors)


def install() -> None:
    """From now on in this process; what is given up is forgotten."""
    real = process_group._gloo

    def gloo(store, rank, size, timeout, address):
        try:
            return UvGroup(real(store, rank, size, timeout, address), timeout)
        except RuntimeError:
            threading.Event().wait()

    process_group._gloo = gloo
