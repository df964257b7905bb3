"""Does a change leave the numbers of short runs as they were? `python tools/same_runs.py COMMIT` compares with COMMIT.

Runs are made with the code of COMMIT and with the code here, on this machine, since processors round differently: each
strategy on three ranks, to the end and resumed; random runs with lost hosts, in the simulation of each tree's tests.
Exit status: 0 if all end with the same bits, 1 if one does not.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RANKS, STEPS, STOP_AT = 3, 14, 6
SIMULATED = 60


def main(commit: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(PROJECT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), commit], check=True)
        try:
            old, new = digests(before, Path(folder)), digests(PROJECT, Path(folder))
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    for name in changed:
        print(f"{name}: {old.get(name)} at {commit}, {new.get(name)} here")
    print(f"{len(old | new) - len(changed)} of {len(old | new)} runs ended as at {commit}")
    return bool(changed)


def digests(tree: Path, folder: Path) -> dict[str, Any]:
    """What the runs of the code in `tree` end with, made by a process of their own."""
    result = folder / "digests.json"
    places = [tree / "gym", tree, tree / "tests" / "exogym", tree / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, "--here", str(result)], cwd=tree, env=environment, check=True)
    return json.loads(result.read_text())


def record(result: str) -> None:
    """Write the digests of the code in the present folder to the file `result`."""
    with tempfile.TemporaryDirectory() as folder:
        found = strategies(Path(folder)) | lost_hosts(Path(folder))
    Path(result).write_text(json.dumps(found))


def strategies(folder: Path) -> dict[str, Any]:
    """Each strategy on three ranks, which are threads: to the end at once, and stopped and resumed."""
    import torch
    from exogym_toys import STRATEGIES, run_threads

    from exogym import FitSettings, Trainer

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 2)
            for number, p in enumerate(self.parameters()):
                p.data = torch.linspace(-0.5, 0.5 + number / 10, p.numel()).sin().view_as(p)

        def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
            x, y = batch
            return ((self.second(self.first(x).tanh()) - y) ** 2).mean()

    class Threads(Trainer):
        def __init__(self, comm: Any) -> None:
            super().__init__(Net(), data, data)
            self.comm = comm

        def _build_connection(self, rank: int) -> Any:
            return self.comm

    def fit(make: Callable[..., Any], should_stop: Callable[[], bool] = lambda: False, **settings: Any) -> list[Any]:
        """What each rank has at the end: loss, hash of the agreed weights, and bytes that it sent."""

        def rank_main(comm: Any) -> list[Any]:
            strategy = make(lr=0.01, weight_decay=0.0)
            about = FitSettings(strategy=strategy, max_steps=STEPS, num_nodes=RANKS, **plain, **settings)
            result = Threads(comm).run_rank(comm.rank, about, should_stop=should_stop)
            return [result.val_loss, result.digest, result.bytes_sent]

        return run_threads(RANKS, rank_main)

    x = torch.linspace(0, 40, 96 * 6).cos().view(96, 6)
    data = torch.utils.data.TensorDataset(x, x[:, :2] ** 2)
    plain = {"num_epochs": None, "batch_size": 4, "minibatch_size": 2, "val_interval": 4, "val_size": 96}
    plain["device"] = "cpu"
    found = {}
    for name, make in STRATEGIES.items():
        kept, asked = {"save_dir": str(folder / name), "checkpoint_interval": 1}, count(1)
        found[name] = fit(make)
        fit(make, should_stop=lambda: next(asked) > RANKS * STOP_AT, **kept)  # noqa: B023
        found[f"{name}, resumed"] = fit(make, resume=True, **kept)
    return found


def lost_hosts(folder: Path) -> dict[str, Any]:
    """Random runs with random faults, each with all resumes that it takes; time is simulated, and a seed repeats it."""
    from simulation import Faults, World
    from test_exogym_faults import random_job

    found = {}
    for seed in range(SIMULATED):
        chance = random.Random(seed)
        job, told = random_job(chance), []
        for attempt in range(4):
            faults = Faults(chance, 0.05, most=3 if attempt < 3 else 0)
            world = World(job, folder / f"seed{seed}", chance, resume=attempt > 0, faults=faults)
            world.run()
            told.append([faults.done, {name: result.digest for name, result in sorted(world.results.items())}])
            if world.coordinator.ended and not world.coordinator.stopping:
                break
        found[f"lost hosts, seed {seed}"] = told
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        record(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1]))
