"""How fast ranks exchange tensors, and whether all of them get the right ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.config import at_least
from exogym.flat import digest
from exogym.launch import launch
from exogym.launched import join, world_size
from exogym.strategy import communicate

MEGABYTE = 1_000_000
COLUMNS = f"{'collective':12}{'MB':>8}{'ms':>10}{'MB/s':>10}{'MB sent':>10}  result"
COLLECTIVES: dict[str, Callable[[Comm, Tensor], None]] = {
    "all_reduce": lambda comm, flat: comm.all_reduce_(flat),
    "broadcast": lambda comm, flat: comm.broadcast_(flat),
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One collective at one size. seconds: the median of how long the slowest rank took.

    sent: bytes that a rank sends, the most of any. is_right, is_equal: what all ranks have got is what they should,
    and the same to the bit.
    """

    collective: str
    megabytes: float
    seconds: float
    sent: int
    is_right: bool
    is_equal: bool

    def __str__(self) -> str:
        result = ("right" if self.is_right else "WRONG") + ("" if self.is_equal else ", NOT EQUAL on all ranks")
        speed, sent = self.megabytes / self.seconds, self.sent / MEGABYTE
        return f"{self.collective:12}{self.megabytes:8g}{self.seconds * 1e3:10.2f}{speed:10.1f}{sent:10.2f}  {result}"


@dataclass(frozen=True)
class CommunicationCheck:
    """As text, a table."""

    ranks: int
    timed: list[Timed]

    @property
    def passed(self) -> bool:
        return all(each.is_right and each.is_equal for each in self.timed)

    def __str__(self) -> str:
        return "\n".join([f"{self.ranks} ranks", COLUMNS, *map(str, self.timed)])


def check_communication(
    num_nodes: int | None = None, megabytes: Sequence[float] = (1, 16), *, repeats: int = 5
) -> CommunicationCheck:
    """Time all_reduce and broadcast of tensors of these sizes (1 MB = 1,000,000 bytes), and check what comes out.

    num_nodes: real processes of this machine that are started for it. Without it, the ranks of a launched script that
    calls this (on all of them), else two processes. Raises SettingError, PeerLost, NodeFailed.
    """
    at_least("repeats", repeats, 1)
    for size in megabytes:
        at_least("megabytes", size, 4 / MEGABYTE)
    comm = communicate.current()
    if num_nodes is None and comm.world_size > 1:
        return measure(comm, megabytes, repeats)
    if num_nodes is None and world_size() > 1:
        return _measure_launched(megabytes, repeats)
    at_least("num_nodes", 2 if num_nodes is None else num_nodes, 2)
    return launch(_measure_launched, [list(megabytes), repeats], nproc_per_node=num_nodes or 2)[0]


def _measure_launched(megabytes: Sequence[float], repeats: int) -> CommunicationCheck:
    comm = join()
    try:
        return measure(comm, megabytes, repeats)
    finally:
        comm.close()


def measure(comm: Comm, megabytes: Iterable[float], repeats: int) -> CommunicationCheck:
    """All ranks of `comm` call this, and get the same result."""
    sizes = [(size, name) for size in megabytes for name in COLLECTIVES]
    return CommunicationCheck(comm.world_size, [_timed(comm, name, size, repeats) for size, name in sizes])


def _timed(comm: Comm, name: str, megabytes: float, repeats: int) -> Timed:
    collective, count = COLLECTIVES[name], max(1, round(megabytes * MEGABYTE / 4))
    is_right = _is_right(comm, name, count)
    uneven = torch.rand(count, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
    seconds = torch.zeros(repeats, dtype=torch.float64)
    sent = 0
    for turn in range(repeats):
        flat = uneven.clone()
        comm.all_reduce_(torch.zeros(1))  # all begin together
        before, started = comm.bytes_sent, time.perf_counter()
        collective(comm, flat)
        devices.synchronize(comm.device)
        seconds[turn], sent = time.perf_counter() - started, comm.bytes_sent - before
    told = comm.all_gather(torch.tensor([int(is_right), digest(flat.cpu()), sent]))
    rights, digests, sents = zip(*(numbers.tolist() for numbers in told), strict=True)
    slowest = torch.stack(comm.all_gather(seconds)).amax(0)
    return Timed(
        collective=name,
        megabytes=megabytes,
        seconds=statistics.median(slowest.tolist()),
        sent=max(sents),
        is_right=all(rights),
        is_equal=len({*digests}) == 1,
    )


def _is_right(comm: Comm, name: str, count: int) -> bool:
    """With whole numbers, whose sums are exact."""
    base = torch.arange(count).remainder(1021).float().to(comm.device)
    flat = base * (comm.rank + 1)
    COLLECTIVES[name](comm, flat)
    times = comm.world_size * (comm.world_size + 1) // 2 if name == "all_reduce" else 1
    return torch.equal(flat, base * times)
