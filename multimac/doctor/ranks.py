"""Two ranks on this machine over gloo's loopback: they must agree, and on what two threads agree on."""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from exogym.comm.comm import Comm
from exogym.comm.threads import ThreadComm
from exogym.flat import FlatParameters, digest
from exogym.strategy import DiLoCoStrategy
from exogym.trainer import FitSettings, LocalTrainer, Trainer

from .checks import Finding, Tell, ok, problem

RANKS = 2
LIMIT = 1e-3  # of an accelerator against the CPU, relative; the same device gives the same bits
SETTINGS = {"max_steps": 5, "num_nodes": RANKS, "batch_size": 4, "seed": 3, "timeout": 120.0}
HINT = "Quit VPN and firewall programs and try again; send us this with --json."


class Points(Dataset):
    def __init__(self, count: int = 24):
        chance = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 8, generator=chance)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Curve(nn.Module):
    """A mean loss on (inputs [B, 8], targets [B, 1])."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.layers(inputs) - targets).square().mean()


class ThreadTrainer(Trainer):
    """One rank among threads: the same loop without processes and without gloo."""

    comm: ThreadComm

    def fit(self) -> None:
        self.run_rank(self.comm.rank, FitSettings(strategy=strategy(), device="cpu", **SETTINGS))

    def _build_connection(self, rank: int) -> Comm:
        return self.comm


def strategy() -> DiLoCoStrategy:
    """Rounds after steps 2 and 4, and a short last one."""
    return DiLoCoStrategy(H=2, lr=1e-2)


def check_ranks(device: torch.device, tell: Tell) -> Finding:
    tell("starting two processes")
    fit = LocalTrainer(Curve(), Points()).fit(strategy=strategy(), device=device.type, **SETTINGS)
    found = FlatParameters(fit.model).read()
    if digest(found) != fit.result.digest:
        return problem(f"{device}: rank 0 gave back other weights than the ranks agreed on", HINT)
    tell("the same with two threads")
    expected = by_threads()
    off = float((found - expected).norm() / expected.norm())
    moved = float((expected - FlatParameters(Curve()).read()).norm())
    figures = {"rounds": fit.result.rounds, "bytes": fit.result.bytes_sent, "off": off, "moved": moved}
    if off > LIMIT or (device.type == "cpu" and off > 0):
        return problem(
            f"{device}: the ranks' weights are {off:.1e} off those of two threads on the CPU", HINT, **figures
        )
    same = "bit for bit" if off == 0 else f"within {off:.0e} of"
    detail = f"{fit.result.rounds} DiLoCo rounds of {RANKS} processes on {device} over gloo: digests agree"
    return ok(f"{detail}, {same} what threads give", **figures)


def by_threads() -> Tensor:
    """The flat weights that all ranks agree on."""
    trainers = []
    for comm in ThreadComm.group(RANKS):
        trainer = ThreadTrainer(copy.deepcopy(Curve()), Points())
        trainer.comm = comm
        trainers.append(trainer)
    threads = [threading.Thread(target=_fit, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return FlatParameters(trainers[0].model).read()


def _fit(trainer: ThreadTrainer) -> None:
    try:
        trainer.fit()
    except Exception:
        trainer.comm.abort()  # else the other thread waits for this one
        raise
