"""Run as a script in a network namespace of its own: what passes over its loopback in each collective, as JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from exogym_toys import Processes

VALUES = 1_000_000  # float32: 4 MB
COLLECTIVES = {
    "all_reduce": lambda comm: comm.all_reduce_(torch.ones(VALUES)),
    "broadcast": lambda comm: comm.broadcast_(torch.ones(VALUES)),
    "broadcast from the last": lambda comm: comm.broadcast_(torch.ones(VALUES), src=comm.world_size - 1),
    "all_gather": lambda comm: comm.all_gather(torch.ones(VALUES)),
    "send": lambda comm: send(comm),
}


def send(comm) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(VALUES), 1)
    elif comm.rank == 1:
        comm.recv(torch.ones(VALUES), 0)


def written() -> int:
    """Bytes that this process has handed to the kernel."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def passed() -> int:
    """Bytes over the loopback, all headers and acknowledgements included."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def resent() -> int:
    """Packets that TCP has sent again, in this namespace."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def measured(comm) -> dict[str, tuple[int, int, int, int]]:
    """(counted by the communicator, written by this process, passed over the loopback, packets of these that were
    sent again) for each collective.
    """
    return {name: one(comm, collective) for name, collective in COLLECTIVES.items()}


def one(comm, collective) -> tuple[int, int, int, int]:
    comm.all_reduce_(torch.zeros(1))
    loopback, again = passed(), resent()
    comm.all_reduce_(torch.zeros(1))  # nobody begins before all have read
    counted, own = comm.bytes_sent, written()
    collective(comm)
    counted, own = comm.bytes_sent - counted, written() - own
    comm.all_reduce_(torch.zeros(1))
    return counted, own, passed() - loopback, resent() - again


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    found = {}
    for ranks in (2, 3, 4):
        with Processes(ranks, measured) as processes:
            of_ranks = [processes.result(rank) for rank in range(ranks)]
        found |= {f"{name}, {ranks} ranks": [rank[name] for rank in of_ranks] for name in COLLECTIVES}
    print(json.dumps(found))
