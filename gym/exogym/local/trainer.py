"""Training on ranks that are processes of this machine, or this process itself."""

from __future__ import annotations

import copy
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from exogym import device as devices
from exogym.comm.comm import DEFAULT_TIMEOUT, Comm, SingleComm
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.errors import SettingError
from exogym.local.nodes import run_nodes
from exogym.logger import ConsoleLogger, Events, NullLogger
from exogym.minibatch import Memory
from exogym.settings import FitSettings, fit_settings
from exogym.strategy.strategy import Strategy
from exogym.train_node import TrainResult
from exogym.trainer import Trainer


class LocalTrainer(Trainer):
    """Ranks are processes of this machine, or this process itself where there is only one.

    result: rank 0's figures of the last `fit`; results: those of all ranks. None before it, and if it failed.
    """

    result: TrainResult | None = None
    results: list[TrainResult] | None = None
    _num_nodes = 1
    _port, _key = 0, b""
    _timeout = DEFAULT_TIMEOUT
    _available: int | None = None  # bytes of memory, before the nodes were started

    def fit(
        self,
        strategy: Strategy,
        *,
        logger: Events | None = None,
        log_interval: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> nn.Module:
        """Train the model, and return it: the very one that the trainer was given, where it was, with new weights.

        `settings` are the fields of FitSettings, with `autocast` (True, "bf16" or False) for its `precision`. A second
        `fit` goes on from the trained model. The ranks train copies: after an exception the model is as it was.
        logger gets all ranks' events (see TrainNode), and is closed at the end if it has `close`. Without one, what
        happens is shown where standard output is a terminal, or log_interval is given. `should_stop` and logger are
        called in this process.
        Model, data sets and strategy are sent to the ranks' processes with cloudpickle, so they may be defined in a
        script or a notebook. Raises SettingError, or NodeFailed with the first failed rank's traceback; no process
        outlives the call.
        """
        parsed = fit_settings({"strategy": strategy, **settings})
        self.result = self.results = None
        with _open_logger(logger, log_interval) as events:
            run = self._fit_here if parsed.num_nodes == 1 else self._fit_in_processes
            self.results = run(parsed, events, should_stop)
        self.result = self.results[0]
        return self.model

    def _build_connection(self, rank: int) -> Comm:
        if self._num_nodes == 1:
            return SingleComm()
        return ProcessGroupComm(
            rank=rank,
            world_size=self._num_nodes,
            store=join_local_store(self._port, self._timeout),
            address=LOOPBACK,
            timeout=self._timeout,
            key=self._key,
        )

    def _memory(self, device: torch.device, usage: float) -> Memory:
        return Memory.of(device, usage=usage, sharing=self._num_nodes, available=self._available)

    def _fit_here(self, settings: FitSettings, events: Events, should_stop: Callable[[], bool]) -> list[TrainResult]:
        node = copy.copy(self)
        node.model = copy.deepcopy(self.model)
        with devices.random_state_kept(devices.choose(settings.device_of(0))):
            result = node.run_rank(0, settings, events=events, should_stop=should_stop)
        self.model.load_state_dict(node.model.state_dict())
        return [result]

    def _fit_in_processes(
        self, settings: FitSettings, events: Events, should_stop: Callable[[], bool]
    ) -> list[TrainResult]:
        store = local_store(settings.timeout)
        node = copy.copy(self)
        node._num_nodes, node._port, node._timeout = settings.num_nodes, store.port, settings.timeout
        node._key = secrets.token_bytes(32)  # the job is read by this user alone; the store, by anybody on this machine
        node._available = devices.available_memory()
        results, weights = run_nodes((node, settings), settings.num_nodes, events, should_stop)
        self.model.load_state_dict(weights)
        return results


@contextmanager
def _open_logger(logger: Events | None, log_interval: int | None) -> Iterator[Events]:
    """Return the logger to use, closed afterwards if it can be."""
    if logger is None:
        is_wanted = log_interval is not None or sys.stdout.isatty()
        logger = ConsoleLogger() if is_wanted else NullLogger()
    try:
        if log_interval is not None:
            if not hasattr(logger, "log_interval"):
                raise SettingError(f"log_interval would not be used: {type(logger).__name__} has none")
            logger.log_interval = log_interval
        yield logger
    finally:
        if close := getattr(logger, "close", None):
            close()
