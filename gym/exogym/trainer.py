"""From a model and datasets to trained weights: what is the same wherever the ranks run, and the local case."""

from __future__ import annotations

import copy
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from exogym.batches import BatchSource, DatasetBatches, DatasetSamples
from exogym.comm.comm import Comm
from exogym.comm.process_group import DEFAULT_TIMEOUT, LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.comm.single import SingleComm
from exogym.config import check_keys
from exogym.elastic_sampler import ElasticSampler
from exogym.local_nodes import WEIGHTS, run_nodes
from exogym.logger import Events, NullLogger
from exogym.settings import FitSettings
from exogym.state.checkpoint import Checkpoints
from exogym.train_node import TrainNode, TrainResult

# A dataset to share among ranks, a factory (rank, num_nodes, train_dataset) of each rank's own, or ready batches.
DataSource = Dataset | BatchSource | Callable[[int, int, bool], Dataset | BatchSource]


class Fit(NamedTuple):
    model: nn.Module  # a trained copy, on the CPU
    result: TrainResult  # rank 0's


class Trainer(ABC):
    """Fits a model on N ranks. A subclass says how a rank reaches the others, and how ranks are started.

    The model's `forward(batch)` returns a mean loss, or `(mean loss, number of target tokens)`.
    """

    def __init__(self, model: nn.Module, train_dataset: DataSource, val_dataset: DataSource | None = None):
        self.model, self.train_dataset, self.val_dataset = model, train_dataset, val_dataset
        self.node: TrainNode | None = None  # in a process that is a rank

    @abstractmethod
    def _build_connection(self, rank: int) -> Comm:
        """The communicator of this process, which is rank `rank`."""

    def run_rank(
        self,
        rank: int,
        settings: FitSettings,
        *,
        events: Events | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> TrainResult:
        """Be rank `rank` until the end of the run; trains `self.model` itself."""
        comm = self._build_connection(rank)
        try:
            torch.manual_seed(settings.seed + rank)
            np.random.seed((settings.seed + rank) % 2**32)
            folder, keep = settings.checkpoint_dir, settings.keep_checkpoints
            self.node = TrainNode(
                self.model,
                comm,
                copy.deepcopy(settings.strategy),
                self._batches(self.train_dataset, comm, settings, training=True),
                settings,
                val=self._batches(self.val_dataset, comm, settings, training=False),
                events=events,
                should_stop=should_stop,
                checkpoints=Checkpoints(folder, comm.members[comm.rank], keep=keep) if folder else None,
            )
            return self.node.run()
        finally:
            comm.close()

    def _batches(self, data: DataSource | None, comm: Comm, settings: FitSettings, *, training: bool):
        own = callable(data) and not isinstance(data, (Dataset, BatchSource))
        if own:
            data = data(comm.rank, comm.world_size, training)
        if data is None or isinstance(data, BatchSource):
            return data
        sizes = {"batch_size": settings.batch_size, "minibatch_size": settings.minibatch_size}
        order = {"shuffle": training and settings.shuffle, "seed": settings.seed}
        if own:
            return DatasetBatches(data, **sizes, **order, may_be_lengthened=training)
        return ElasticSampler(DatasetSamples(data, **sizes, **order), comm.members, comm.members[comm.rank])


class LocalTrainer(Trainer):
    """Ranks are processes of this machine, or this process itself where there is only one."""

    _num_nodes = 1
    _port = 0
    _timeout = DEFAULT_TIMEOUT

    def fit(
        self,
        *,
        events: Events | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> Fit:
        """Train a copy of the model and return it; `settings` are the fields of FitSettings.

        Model, datasets and strategy must be picklable, and a script must guard its start with
        `if __name__ == "__main__"`, since each node starts a fresh interpreter. `events` and `should_stop` are called
        in this process. Raises NodeFailed with the first failed node's traceback; no node outlives the call.
        """
        check_keys("fit", settings, [f.name for f in fields(FitSettings)])
        parsed = FitSettings(**settings)
        if parsed.num_nodes == 1:
            return self._fit_here(parsed, events, should_stop)
        return self._fit_in_processes(parsed, events or NullLogger(), should_stop)

    def _build_connection(self, rank: int) -> Comm:
        if self._num_nodes == 1:
            return SingleComm()
        store = join_local_store(self._port, self._timeout)
        return ProcessGroupComm(
            rank=rank, world_size=self._num_nodes, store=store, address=LOOPBACK, timeout=self._timeout
        )

    def _fit_here(self, settings: FitSettings, events: Events | None, should_stop: Callable[[], bool]) -> Fit:
        node = copy.copy(self)
        node.model = copy.deepcopy(self.model)
        with torch.random.fork_rng(devices=[]):
            result = node.run_rank(0, settings, events=events, should_stop=should_stop)
        return Fit(node.model.cpu(), result)

    def _fit_in_processes(self, settings: FitSettings, events: Events, should_stop: Callable[[], bool]) -> Fit:
        store = local_store(settings.timeout)
        node = copy.copy(self)
        node._num_nodes, node._port, node._timeout = settings.num_nodes, store.port, settings.timeout
        with tempfile.TemporaryDirectory(prefix="exogym-") as folder:
            results = run_nodes((node, settings), Path(folder), settings.num_nodes, events, should_stop)
            weights = torch.load(Path(folder, WEIGHTS), map_location="cpu", weights_only=True)
        model = copy.deepcopy(self.model).cpu()
        model.load_state_dict(weights)
        return Fit(model, results[0])
