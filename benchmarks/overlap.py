"""What AllReduce gains by sending gradients while the backward pass still computes others: time of a step.

    sudo flock /tmp/lab.lock python benchmarks/overlap.py [--quick] [--state DIR]

Two lab hosts train a model of 16 equal layers over links of given speed, with batches that take more and less time than
the sending. In each case the same two processes change between the kinds of sending, block by block, so that whatever
else the machine does slows down all of them. What is done is kept in DIR, so an interrupted benchmark goes on where it
stopped. Needs Linux, root, and the system packages of `make test`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.results import current_commit, table, write_section  # noqa: E402
from exogym import AllReduceStrategy, LoopSettings, TrainNode  # noqa: E402
from exogym.comm.comm import Comm  # noqa: E402
from exogym.comm.process_group import ProcessGroupComm, local_store  # noqa: E402
from lab import Lab  # noqa: E402

WIDTH, LAYERS = 384, 16
LINKS = ("100mbit", "1gbit")
BATCHES = (256, 1024, 4096)
KINDS = {
    "in one": {"overlap": False, "bucket_mb": 1000.0},
    "in buckets": {"overlap": False},
    "overlapped": {"overlap": True},
    "overlapped, 4 MB": {"overlap": True, "bucket_mb": 4.0},
    "overlapped, 25 MB": {"overlap": True, "bucket_mb": 25.0},
}
BASE = "in one"
WARM_UP = 1  # steps at the beginning of a block, which are not counted
TIMEOUT_S = 120.0


# What a rank does.


def be_rank(rank: int, address: str, master: str, port: int, batch: int, blocks: int, steps: int) -> None:
    """Prints the store's port on rank 0, and at the end, as JSON, (step, waiting) seconds of each kind's steps."""
    torch.set_num_threads(1)
    if rank == 0:
        store = local_store(TIMEOUT_S, master)
        print(store.port, flush=True)
    else:
        store = TCPStore(master, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    comm = ProcessGroupComm(rank=rank, world_size=2, store=store, address=address, timeout=TIMEOUT_S)
    told: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(blocks):
        for kind, settings in KINDS.items():
            told[kind] += block(comm, settings, batch, steps)
    comm.close()
    print(json.dumps(told), flush=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


class Same:
    """One batch [size, WIDTH], again and again."""

    def __init__(self, size: int, steps: int, seed: int):
        self.steps_per_epoch = steps
        self.x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))

    def epoch(self, epoch: int) -> Iterator[list[Tensor]]:
        yield from [[self.x]] * self.steps_per_epoch


def block(comm: Comm, settings: dict, batch: int, steps: int) -> list[tuple[float, float]]:
    events: list[dict] = []
    strategy = AllReduceStrategy(inner_optim="sgd", lr=1e-3, check_interval=0, **settings)
    train, loop = Same(batch, WARM_UP + steps, comm.rank), LoopSettings(num_epochs=1, device="cpu")
    TrainNode(Model(), comm, strategy, train, loop, events=events.append).run()
    made = [event for event in events if event["type"] == "step"][WARM_UP:]
    return [(event["seconds"], event["seconds_communicating"]) for event in made]


# What the benchmark does.


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.state = (args.state / "quick" if args.quick else args.state).resolve()
        self.state.mkdir(parents=True, exist_ok=True)
        self.quick, self.commit = args.quick, current_commit()
        self.blocks, self.steps = (2, 3) if args.quick else (10, 4)
        self.done_file = self.state / "done.json"
        self.done = json.loads(self.done_file.read_text()) if self.done_file.exists() else {}

    def run(self) -> None:
        for rate in LINKS[:1] if self.quick else LINKS:
            missing = [batch for batch in BATCHES if f"{rate} {batch}" not in self.done]
            if not missing:
                continue
            with Lab(hosts=2, cpus=0.5, rate=rate, shared_home=True) as lab:
                for batch in missing:
                    result = self.measure(lab, batch)
                    self.done[f"{rate} {batch}"] = {"commit": self.commit, "seconds": result}
                    self.done_file.write_text(json.dumps(self.done, indent=1))
                    print(f"{rate} {batch}: done", flush=True)
        self.report()

    def measure(self, lab: Lab, batch: int) -> dict[str, list]:
        """As be_rank prints it, of rank 0."""
        master, processes = lab["h1"].address, []
        try:
            first = self.start(lab, "h1", 0, master, 0, batch)
            processes.append(first)
            processes.append(self.start(lab, "h2", 1, master, int(first.stdout.readline()), batch))
            told = [process.communicate(timeout=3600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise SystemExit("\n".join(errors[-3000:] for _, errors in told))
        return json.loads(told[0][0].splitlines()[-1])

    def start(self, lab: Lab, host: str, rank: int, master: str, port: int, batch: int) -> subprocess.Popen:
        numbers = map(str, (rank, lab[host].address, master, port, batch, self.blocks, self.steps))
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", *numbers]
        return lab.popen(host, command, cwd=str(PROJECT), stdin=subprocess.DEVNULL)

    def report(self) -> None:
        mb = (WIDTH * WIDTH + WIDTH) * LAYERS * 4 / 1e6
        head = ("link", "batch", f"s of a step, {BASE}", "of these waiting", *(f"{k}: ratio" for k in [*KINDS][1:]))
        lines = [
            f"Two hosts of 0.5 core; {LAYERS} layers, {mb:.1f} MB of gradients a step, buckets of 1 MB where no size "
            f"is given. Medians over {self.blocks * self.steps} steps of each kind, in turns of {self.steps}: a step's "
            f"time by that with all gradients sent {BASE} after the backward pass, and in brackets how much of it the "
            "rank waits.",
            "",
            *table(head, [self.row(case) for case in self.done]),
        ]
        print("\n".join(lines))
        if not self.quick:
            commits = [one["commit"] for one in self.done.values()]
            write_section("overlap: AllReduce while the backward pass runs", lines, commits)

    def row(self, case: str) -> list[str]:
        seconds = self.done[case]["seconds"]
        step = {kind: statistics.median(s for s, _ in made) for kind, made in seconds.items()}
        waits = {kind: statistics.median(w / s for s, w in made) for kind, made in seconds.items()}
        others = [f"{step[kind] / step[BASE]:.2f} ({waits[kind]:.0%})" for kind in [*KINDS][1:]]
        return [*case.split(), f"{step[BASE]:.2f}", f"{waits[BASE]:.0%}", *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=PROJECT / ".lab" / "bench-overlap")
    parser.add_argument("--quick", action="store_true", help="one link, few steps; leaves RESULTS.md alone")
    parser.add_argument("--rank", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, address, master, port, *numbers = args.rank
        be_rank(int(rank), address, master, int(port), *map(int, numbers))
    else:
        Bench(args).run()


if __name__ == "__main__":
    main()
