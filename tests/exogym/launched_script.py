"""A script for `exogym.launch`: its first argument says what it does."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from exogym_toys import Points
from torch import nn

from exogym import AllReduceStrategy, DiLoCoStrategy, LaunchedTrainer, check_communication, digest
from exogym.launch import init
from exogym.strategy import communicate

torch.set_num_threads(1)


class Normed(nn.Module):
    """With buffers of floats and of integers, and a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.linear.weight.data.copy_(torch.rand(1, 4, generator=generator))
        self.linear.bias.data.zero_()
        self.norm.bias.requires_grad_(False)

    def forward(self, batch):
        x, y = batch
        return ((self.linear(self.norm(x)) - y) ** 2).mean()


def whole(model: nn.Module) -> int:
    """Hash of weights and buffers."""
    return digest(torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]))


def strategy(name: str):
    return DiLoCoStrategy(H=2, lr=0.05) if name == "diloco" else AllReduceStrategy(lr=0.05)


SETTINGS = {"batch_size": 2, "minibatch_size": 2, "num_epochs": 2, "device": "cpu", "timeout": 60}


def show(folder: Path) -> None:
    comm = init()
    total = communicate.all_reduce(torch.tensor([comm.rank + 1.0])).item()
    found = {"argv": sys.argv[3:], "world_size": comm.world_size, "sum": total, "backend": dist.get_backend()}
    (folder / f"{comm.rank}.json").write_text(json.dumps(found))


def fail(folder: Path) -> None:
    comm = init()
    (folder / f"{comm.rank}.pid").write_text(str(os.getpid()))
    communicate.all_reduce(torch.ones(1))
    if comm.rank == 1:
        raise ValueError("on purpose")
    communicate.all_reduce(torch.ones(1))


def fail_and_end_late(folder: Path) -> None:
    """It has left the group, and the others have ended, before this rank has."""
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 3)
    fail(folder)


def recover(folder: Path) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    comm = init()
    communicate.all_reduce(torch.ones(1))
    if attempt == 0 and comm.rank == 1:
        raise ValueError("the first time")
    (folder / f"{comm.rank}.json").write_text(json.dumps(communicate.all_reduce(torch.ones(1)).item() + 10 * attempt))


def wait(folder: Path) -> None:
    comm = init()
    (folder / f"{comm.rank}.pid").write_text(str(os.getpid()))
    time.sleep(120)


def train(folder: Path) -> None:
    """Twice, so that a second group forms; with a default group in between."""
    about = {}
    for name in ("allreduce", "diloco"):
        events = []
        trainer = LaunchedTrainer(Normed(), Points(16))
        model = trainer.fit(strategy(name), logger=events.append, **SETTINGS)
        assert model is trainer.model
        about[name] = [whole(model), trainer.result.digest, trainer.result.steps, sorted({e["rank"] for e in events})]
        init()
    rank = int(os.environ.get("RANK", 0))
    (folder / f"{rank}.json").write_text(json.dumps(about))


def check(folder: Path) -> None:
    """Over a group of its own, then over the default group."""
    own = check_communication(megabytes=[0.01], repeats=1)
    init()
    default = check_communication(megabytes=[0.01], repeats=1)
    assert own.passed and default.passed and own.ranks == default.ranks == 2, f"{own} {default}"
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(str(own) + str(default)))


if __name__ == "__main__":
    modes = (show, check, fail, fail_and_end_late, recover, wait, train)
    {mode.__name__: mode for mode in modes}[sys.argv[1]](Path(sys.argv[2]))
