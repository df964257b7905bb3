"""What this machine has, how fast ranks exchange tensors, and whether all of them get the right ones.

`exogym.info()`, `exogym.check_communication()`, and both as the command `python -m exogym.info --check`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.config import at_least
from exogym.errors import ExogymError
from exogym.flat import digest
from exogym.launch import join, launch, rank, world_size
from exogym.strategy import STRATEGIES, communicate

SOURCE = Path(__file__).parent
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
MEGABYTE = 1_000_000
COLUMNS = f"{'collective':12}{'MB':>8}{'ms':>10}{'MB/s':>10}{'MB sent':>10}  result"
COLLECTIVES: dict[str, Callable[[Comm, Tensor], None]] = {
    "all_reduce": lambda comm, flat: comm.all_reduce_(flat),
    "broadcast": lambda comm, flat: comm.broadcast_(flat),
}


class Info(dict[str, Any]):
    """Shows a line for each of its values as text."""

    def __str__(self) -> str:
        lines = []
        for name, value in self.items():
            if name == "devices":
                for device in value:
                    memory = f"{device['memory'] / 1e9:.1f} GB, {device['free'] / 1e9:.1f} GB free"
                    lines.append((f"device {device['name']}", f"{device['kind']}, {memory}"))
            elif isinstance(value, dict):
                lines.append((name, ", ".join(f"{key} {item}" for key, item in value.items())))
            else:
                lines.append((name, ", ".join(value) if isinstance(value, list) else str(value)))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def info() -> Info:
    """Return versions, platform, cores, devices with memory in bytes, torch's backends, strategies, and this rank."""
    comm = communicate.current()
    cores = {"physical": psutil.cpu_count(logical=False), "logical": os.cpu_count()}
    return Info(
        exogym={"source": source_hash(), "in": str(SOURCE)},
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        cores={**cores, "used by torch": torch.get_num_threads()},
        devices=_devices(),
        backends=[name for name in BACKENDS if dist.is_available() and dist.is_backend_available(name)],
        strategies=sorted(STRATEGIES),
        rank=comm.rank if comm.world_size > 1 else rank(),
        world_size=max(comm.world_size, world_size()),
    )


def source_hash() -> str:
    """Changes with any of exogym's source files: machines that train together should have the same."""
    hasher = hashlib.blake2b(digest_size=4)
    for path in sorted(SOURCE.rglob("*.py")):
        hasher.update(f"{path.relative_to(SOURCE).as_posix()}\n".encode() + path.read_bytes())
    return hasher.hexdigest()


def _devices() -> list[dict[str, Any]]:
    memory = psutil.virtual_memory()
    found = [{"name": "cpu", "kind": platform.machine(), "memory": memory.total, "free": memory.available}]
    accelerators = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        accelerators.append(torch.device("mps"))
    for device in accelerators:
        free, total = devices.own_memory(device) or (0, 0)
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "Metal"
        found.append({"name": str(device), "kind": kind, "memory": total, "free": free})
    return found


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
    """Shows a table as text."""

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
    found: list[CommunicationCheck] = launch(
        _measure_launched, [list(megabytes), repeats], nproc_per_node=num_nodes or 2
    )
    return found[0]


def _measure_launched(megabytes: Sequence[float], repeats: int) -> CommunicationCheck:
    comm = join()
    try:
        return measure(comm, megabytes, repeats)
    finally:
        comm.close()


def measure(comm: Comm, megabytes: Iterable[float], repeats: int) -> CommunicationCheck:
    """Time each collective. All ranks of `comm` call this, and get the same result."""
    sizes = [(size, name) for size in megabytes for name in COLLECTIVES]
    return CommunicationCheck(comm.world_size, [_timed(comm, name, size, repeats) for size, name in sizes])


def _timed(comm: Comm, name: str, megabytes: float, repeats: int) -> Timed:
    collective, count = COLLECTIVES[name], max(1, round(megabytes * MEGABYTE / 4))
    base = torch.arange(count).remainder(1021).float().to(comm.device)  # whole numbers, whose sums are exact
    whole, times = base * (comm.rank + 1), comm.world_size * (comm.world_size + 1) // 2 if name == "all_reduce" else 1
    collective(comm, whole)
    is_right = torch.equal(whole, base * times)
    del base, whole  # as large as what is measured next
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m exogym.info", description="What this machine has for training.")
    parser.add_argument("--check", action="store_true", help="time the communication of real processes")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="how many processes (2)")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 16], metavar="MB", help="sizes (1 16)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of which the median is shown (5)")
    options = parser.parse_args(argv)

    print(info())
    if not options.check:
        return 0

    # Processes find a function by its module's name, and this may be `__main__`.
    from exogym.info import check_communication as check

    try:
        found = check(options.nproc, options.megabytes, repeats=options.repeats)
    except ExogymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{found}")
    return 0 if found.passed else 1


class _Module(ModuleType):
    """Stands for the function: once this module has been imported, `exogym.info` is the module."""

    def __call__(self) -> Info:
        return info()


sys.modules[__name__].__class__ = _Module

if __name__ == "__main__":
    sys.exit(main())
