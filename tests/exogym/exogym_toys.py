"""Small models, data and runners for the exogym tests; importable by the processes that tests start."""

from __future__ import annotations

import faulthandler
import multiprocessing
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from exogym import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    LoopSettings,
    ParameterServerStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    StepResult,
    Strategy,
    TrainNode,
)
from exogym.comm.comm import ThreadComm
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.errors import PeerLost
from exogym.membership import ROUND
from exogym.rounds.shares import Measured, Speed
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator

torch.set_num_threads(1)


_one_at_a_time = threading.Lock()


@contextmanager
def _seeded(seed: int):
    """Ranks that are threads share one random generator: without the lock they would build different models."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class OtherArithmetic(torch.optim.AdamW):
    """Its steps differ in the last bit, as those of another chip."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))


# Every strategy by a name, with short rounds; settings of all strategies may be given.
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "own": lambda **settings: PlainMean(**settings),
    "allreduce": lambda **settings: AllReduceStrategy(**settings),
    "sharded": lambda **settings: AllReduceStrategy(shard_optimizer=True, **settings),
    "diloco": lambda **settings: DiLoCoStrategy(**{"H": 3, "outer_momentum": 0} | settings),
    "nesterov": lambda **settings: DiLoCoStrategy(**{"H": 2, "outer_momentum": 0.9} | settings),
    "bf16": lambda **settings: DiLoCoStrategy(**{"H": 3, "outer_momentum": 0, "wire": "bf16"} | settings),
    "int8": lambda **settings: DiLoCoStrategy(**{"H": 2, "outer_momentum": 0, "wire": "int8"} | settings),
    "int4": lambda **settings: DiLoCoStrategy(**{"H": 3, "outer_momentum": 0, "wire": "int4"} | settings),
    "hidden": lambda **settings: DiLoCoStrategy(**{"H": 4, "overlap_steps": 2, "outer_momentum": 0.9} | settings),
    "hidden_int8": lambda **settings: DiLoCoStrategy(
        **{"H": 3, "outer_momentum": 0, "overlap_steps": 2, "wire": "int8"} | settings
    ),
    "moments": lambda **settings: DiLoCoStrategy(
        **{"H": 2, "outer_momentum": 0, "wire": "int8", "share_moments": True, "overlap_steps": 1, "weigh_steps": True}
        | settings
    ),
    "server": lambda **settings: ParameterServerStrategy(**{"H": 3, "outer_momentum": 0.9} | settings),
    "fedavg": lambda **settings: FedAvgStrategy(**{"H": 2} | settings),
    "islands": lambda **settings: FedAvgStrategy(**{"H": 2, "island_size": 2} | settings),
    "sparta": lambda **settings: SPARTAStrategy(**{"p_sparta": 0.3} | settings),
    "partitioned": lambda **settings: SPARTAStrategy(
        **{"p_sparta": 0.3, "sparta_interval": 2, "compression_method": "partitioned", "quantization_bits": 8}
        | settings
    ),
    "topk": lambda **settings: SPARTAStrategy(**{"p_sparta": 0.3, "compression_method": "topk"} | settings),
    "sparta_diloco": lambda **settings: SPARTADiLoCoStrategy(
        **{"p_sparta": 0.3, "H": 3, "outer_momentum": 0, "sparta_interval": 2} | settings
    ),
    "demo": lambda **settings: DeMoStrategy(**{"compression_chunk": 4, "compression_topk": 6} | settings),
    "composed": lambda **settings: CommunicateOptimizeStrategy(
        communication_modules=[
            SparseCommunicator(sparsification_rate=0.3),
            AveragingCommunicator(island_size=2, interval=3),
        ],
        **settings,
    ),
}


class PlainMean(Strategy):
    """A user's own, in the two methods that one may write."""

    def communicate_gradients(self):
        for p in self.model.parameters():
            if p.requires_grad:
                flat = p.grad.reshape(-1)
                self.comm.all_reduce_(flat)
                p.grad = (flat / self.num_nodes).view_as(p)

    def update_parameters(self):
        self.optimizer.step()


class Line(nn.Module):
    """y = w x + b on (x [B, 4], y [B, 1]) tuples; a bare mean loss."""

    def __init__(self, seed: int = 0):
        super().__init__()
        with _seeded(seed):
            self.linear = nn.Linear(4, 1)

    def forward(self, batch):
        x, y = batch
        return ((self.linear(x) - y) ** 2).mean()


class Tokens(nn.Module):
    """Next-token model on dict batches, tied head, a frozen part: (mean loss per token, number of tokens)."""

    def __init__(self, seed: int = 0, vocabulary: int = 11):
        super().__init__()
        with _seeded(seed):
            self.embedding = nn.Embedding(vocabulary, 8)
            self.hidden = nn.Linear(8, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch):
        states = self.frozen(torch.tanh(self.hidden(self.embedding(batch["inputs"]))))
        labels = batch["labels"]
        loss = nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss, (labels != -100).sum()


class Scalar(nn.Module):
    """One weight, for steps that can be computed by hand."""

    def __init__(self, value: float = 1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))


class Points(torch.utils.data.Dataset):
    def __init__(self, size: int, nan_at: int | None = None):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 1
        if nan_at is not None:
            self.y[nan_at] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Steps:
    """A BatchSource of given steps: a list of micro-batches for each."""

    def __init__(self, steps: list[list[Any]]):
        self.steps = steps
        self.epochs_seen: list[int] = []

    @property
    def steps_per_epoch(self) -> int:
        return len(self.steps)

    def epoch(self, epoch: int):
        self.epochs_seen.append(epoch)
        yield from self.steps


class Resumable(Steps):
    """It can begin in the middle of an epoch."""

    def epoch(self, epoch: int, *, first_step: int = 0):
        yield from self.steps[first_step:]


class GivenSpeed(Speed):
    """Whatever the clock says."""

    def __init__(self, speed: float):
        super().__init__()
        self._speed = speed

    def measured(self):
        return Measured(self._speed, 0.0)


def train_node(
    model,
    comm,
    strategy,
    train,
    *,
    val=None,
    score=None,
    events=None,
    should_stop=lambda: False,
    checkpoints=None,
    **settings: Any,
) -> TrainNode:
    """A TrainNode on the CPU; `settings` are those of LoopSettings, `epochs` for short."""
    epochs = settings.pop("epochs", None)
    loop = LoopSettings(**{"device": "cpu", "num_epochs": epochs, **settings})
    return TrainNode(
        model, comm, strategy, train, loop, val=val, score=score, events=events, should_stop=should_stop,
        checkpoints=checkpoints,
    )  # fmt: skip


def make_step(strategy: Strategy, weight: float, samples: int, *, stopping: bool = False) -> StepResult:
    """One optimizer step as TrainNode makes it, and the end of the round where it is due."""
    local = strategy.local_step(weight, samples)
    return end_round(strategy, local, stopping=stopping) if stopping or strategy.is_round_due else local


def end_round(strategy: Strategy, local: StepResult = StepResult(), *, stopping: bool = False) -> StepResult:  # noqa: B008
    exchanged = strategy.comm.commit_together(ROUND, lambda: strategy.exchange(stopping), about=strategy.about)
    result = strategy.apply(exchanged, local)
    if result.digest is not None:
        strategy.comm.compare(result.digest, f"round {result.round}")
    return result


def token_batch(samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Sentences of unequal length, so that ranks have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(11, (samples, 6), generator=generator)
    lengths = torch.randint(1, 7, (samples, 1), generator=generator)
    labels = torch.where(torch.arange(6) < lengths, (inputs * 3 + 1) % 11, -100)
    return {"inputs": inputs, "labels": labels}


class Sentences(torch.utils.data.Dataset):
    """For Tokens: 24 of them."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return {key: value[0] for key, value in token_batch(1, seed=i).items()}


def join_batches(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}


def run_threads(size: int, rank_main: Callable[[ThreadComm], Any]) -> list[Any]:
    """rank_main(comm) on every rank; the first error that is not a consequence of another is raised."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = rank_main(comm)
        except BaseException as error:
            errors.append(error)
            comm.abort()

    threads = [threading.Thread(target=main, args=(comm,)) for comm in ThreadComm.group(size, timeout=20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # a rank that fails closes its strategy first, and so lets others know that it is lost
        raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
    return results


def _process_main(rank_main, rank, size, port, timeout, pipe, args):
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(150)  # where a rank hangs
    store = join_local_store(port, 30)
    comm = ProcessGroupComm(rank=rank, world_size=size, store=store, address=LOOPBACK, timeout=timeout)
    try:
        pipe.send(rank_main(comm, *args))
    finally:
        comm.close()


class Processes:
    """rank_main(comm, *args) in a real process for each rank, joined by gloo over loopback; a context manager."""

    def __init__(self, size: int, rank_main: Callable[..., Any], *args: Any, timeout: float = 30.0):
        context = multiprocessing.get_context("spawn")
        self.store = local_store()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank_main, rank, size, self.store.port, timeout, theirs, args)
            process = context.Process(target=_process_main, args=arguments)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def result(self, rank: int, timeout: float = 180) -> Any:
        assert self.pipes[rank].poll(timeout), f"rank {rank} is silent"
        return self.pipes[rank].recv()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()
