"""From a model and datasets to trained weights: on ranks that are processes of this machine, or of a launch."""

from __future__ import annotations

import copy
import inspect
import os
import re
import secrets
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from exogym import device as devices
from exogym.comm.comm import DEFAULT_TIMEOUT, Comm, SingleComm
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.config import check_keys, refuse
from exogym.errors import SettingError
from exogym.flat import check_model
from exogym.logger import ConsoleLogger, Events, NullLogger
from exogym.logger.run_files import logger_of
from exogym.micro_batches import USAGE, Memory, Trial, samples_at_once
from exogym.nodes import run_nodes
from exogym.samplers.batches import BatchSource, DatasetBatches, DatasetSamples
from exogym.samplers.elastic import ElasticSampler
from exogym.settings import VAL_SIZE, FitSettings, fit_settings
from exogym.state.checkpoint import Checkpoints
from exogym.strategy.strategy import Strategy
from exogym.train_node import TrainNode, TrainResult

# A dataset to share among ranks, a factory (rank, num_nodes, train_dataset) of each rank's own, or ready batches.
DataSource = Dataset[Any] | BatchSource | Callable[[int, int, bool], Dataset[Any] | BatchSource]

# What a factory may call its third argument: True for training, or else for validation.
KIND_OF_DATA = re.compile(r"(is_|for_)?((?P<trains>train(ing)?)|val|valid(ation)?|eval(uation)?|test)(_dataset)?")


class Trainer(ABC):
    """Fits a model on N ranks. A subclass says how a rank reaches the others, and how ranks are started.

    The model's `forward(batch)` returns a mean loss, or `(mean loss, number of target tokens)`, or what has a `loss`.
    """

    _sampler: type[ElasticSampler] = ElasticSampler  # of a data set that all ranks have among them

    def __new__(cls, *args: Any, **kwargs: Any) -> Trainer:
        """Make a LocalTrainer where this class is called, as upstream's is."""
        return super().__new__(LocalTrainer if cls is Trainer else cls)

    def __init__(
        self,
        model: nn.Module,
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
        start_port: int | None = None,
        **settings: Any,
    ):
        """start_port: not needed, a free one is taken. settings: device or devices, as `fit` takes them."""
        check_model(model)
        check_keys("the trainer", settings, ("device", "devices"))
        self.model, self.train_dataset, self.val_dataset, self.settings = model, train_dataset, val_dataset, settings
        self.node: TrainNode | None = None  # in a process that is a rank

    @abstractmethod
    def _build_connection(self, rank: int) -> Comm:
        """Return the communicator of this process, which is rank `rank`."""

    def _memory(self, device: torch.device, usage: float) -> Memory:
        """Return what this rank may take: the part `usage` of what there is."""
        return Memory.of(device, usage=usage)

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
            device = devices.choose(settings.device_of(rank), local_rank=comm.rank)
            settings = replace(settings, device=str(device), devices=None)
            devices.seed_all(settings.seed + rank, device)
            here = comm.rank, comm.world_size, settings
            train = samples_of(self.train_dataset, *here, training=True)
            val = samples_of(self.val_dataset, *here, training=False)
            assert train is not None  # SettingError otherwise
            self._choose_minibatch(train, val, comm, settings, device, events or NullLogger())
            folder, keep = settings.save_dir, settings.keep_checkpoints
            self.node = self._node_class(
                self.model,
                comm,
                copy.deepcopy(settings.strategy),
                self._shared(train, comm),
                settings,
                val=None if val is None else self._shared(val, comm),
                events=events,
                should_stop=should_stop,
                checkpoints=Checkpoints(folder, comm.members[comm.rank], keep=keep) if folder else None,
            )
            return self.node.run()
        finally:
            comm.close()

    @property
    def _node_class(self) -> Callable[..., TrainNode]:
        return TrainNode

    def _shared(self, samples: DatasetSamples | BatchSource, comm: Comm) -> BatchSource:
        """Share a data set that all ranks have among them."""
        if isinstance(samples, BatchSource):
            return samples
        return self._sampler(samples, comm.members, comm.members[comm.rank])

    def _choose_minibatch(
        self,
        train: DatasetSamples | BatchSource,
        val: DatasetSamples | BatchSource | None,
        comm: Comm,
        settings: FitSettings,
        device: torch.device,
        events: Events,
    ) -> None:
        """Have as many samples computed at once as fit into memory, unless somebody has said how many."""
        given, usage = settings.samples_at_once, settings.max_memory_usage
        if not isinstance(train, DatasetSamples) or not len(train) or (given and not usage):
            return
        self.model.to(device)
        memory = self._memory(device, usage or USAGE)
        trial = Trial(self.model, train, memory, settings.precision, comm.alive)
        wanted = given or min(settings.batch_size, len(train))
        found = samples_at_once(trial, wanted)
        for samples in (train, val):
            if isinstance(samples, DatasetSamples):
                samples.minibatch_size = found
        if found < wanted:
            what = f"{wanted} samples at once do not fit into {memory.told}: a step has {found} at a time"
            events({"type": "warning", "rank": comm.rank, "epoch": 0, "step": 0, "what": what})


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
        settings = {"strategy": strategy, **self.settings, **settings}
        logger = logger_of(settings, logger)
        parsed = fit_settings(settings)
        self.result = self.results = None
        if parsed.max_steps == 0:
            warnings.warn("max_steps = 0: the model stays as it is", stacklevel=2)
            return self.model
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


class LaunchedTrainer(Trainer):
    """This process is one rank of the launch, and trains the model that it was given.

    result: this rank's figures of the last `fit`.
    """

    result: TrainResult | None = None
    _timeout = DEFAULT_TIMEOUT

    def fit(
        self,
        strategy: Strategy,
        *,
        logger: Events | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> nn.Module:
        """Train the model together with the other processes, which must call this too, and return it.

        All ranks have the same weights then. `settings` are the fields of FitSettings; `num_nodes` is that of the
        launch. logger gets the events of rank 0, in that process, and is closed at the end if it has `close`.
        Raises SettingError, PeerLost and what TrainNode does.
        """
        from exogym.launch import rank, world_size  # loads torch's launcher, which on a Mac warns of itself

        settings = {**self.settings, **settings}
        check_keys("fit", settings, [field.name for field in fields(FitSettings)])
        if settings.setdefault("num_nodes", world_size()) != world_size():
            raise SettingError(f"num_nodes = {settings['num_nodes']}, but {world_size()} processes were launched")
        parsed = FitSettings(strategy=strategy, **settings)
        events = logger if logger is not None and rank() == 0 else NullLogger()
        self._timeout = parsed.timeout
        home = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        try:
            self.result = self.run_rank(rank(), parsed, events=events, should_stop=should_stop)
        finally:
            self.model.to(home)
            if close := getattr(logger, "close", None):
                close()
        return self.model

    def _build_connection(self, rank: int) -> Comm:
        from exogym.launch import join

        return join(self._timeout)

    def _memory(self, device: torch.device, usage: float) -> Memory:
        return Memory.of(device, usage=usage, sharing=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def _open_logger(given: Events | None, log_interval: int | None) -> Iterator[Events]:
    """Return the logger to use, closed afterwards if it can be."""
    logger: Any = given
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


def is_factory(data: Any) -> bool:
    """Say whether `data` is a factory, as a class is, whose call makes a data set; a data set may be callable too."""
    if not callable(data) or (isinstance(data, (Dataset, BatchSource)) and not isinstance(data, type)):
        return False
    return isinstance(data, type) or not hasattr(data, "__getitem__")


def call_factory(factory: Callable[..., Any], rank: int, num_nodes: int, training: bool) -> Any:
    """Call it by keyword where it declares the names, else by place.

    The kind of data goes by the name of what it is told as: True for training as `train_dataset`, `train` or
    `is_training`, False as `val`, `is_val` or `test`. A factory may leave it out, or take it as one of `*arguments`.
    """
    places, names = (rank, num_nodes), {"rank": rank, "num_nodes": num_nodes}
    try:
        declared = inspect.signature(factory)
    except ValueError:  # not every function that is written in C tells
        return factory(*places, training)
    found = declared.parameters.values()
    bound = getattr(factory, "keywords", {})  # of a functools.partial
    told = [p for p in found if p.name not in bound and (p.default in (p.empty, None) or isinstance(p.default, bool))]
    flags = [(p, kind) for p in told if (kind := KIND_OF_DATA.fullmatch(p.name))]
    needed = [(p, kind) for p, kind in flags if p.default is p.empty] or flags[:1]
    last = {p.name: training is bool(kind["trains"]) for p, kind in needed}
    if not last and any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        last = {"train_dataset": training}
    for args, kwargs in (((), names | last), (places, last), ((*places, *last.values()), {})):
        try:
            declared.bind(*args, **kwargs)
        except TypeError:
            continue
        return factory(*args, **kwargs)
    what = "a factory of data sets takes (rank, num_nodes, train_dataset), or `val` as the third"
    raise SettingError(f"{what}, not {declared}")


def samples_of(
    source: DataSource | None, rank: int, num_nodes: int, settings: FitSettings, *, training: bool
) -> DatasetSamples | BatchSource | None:
    """Return what rank `rank` trains or validates on. DatasetBatches are its own, DatasetSamples are all ranks'."""
    name, own, data = "train_dataset" if training else "val_dataset", is_factory(source), cast(Any, source)
    given_val_size = None if settings.val_size == VAL_SIZE else settings.val_size
    if own:
        data = call_factory(data, rank, num_nodes, training)
    if not training and settings.val_size == 0:
        return None
    if data is None and not (own or training):
        refuse("without val_dataset", val_size=given_val_size)
        return None
    if data is None:
        raise SettingError(f"{name} is None, or its factory returned None")
    if isinstance(data, BatchSource):
        sizes = ("minibatch_size", "gradient_accumulation", "max_memory_usage")
        given = {name: getattr(settings, name) for name in sizes} if training else {"val_size": given_val_size}
        refuse(f"{type(data).__name__} makes its own batches", **given)
        return data
    size, whole = None if training else settings.val_size, data
    while isinstance(whole, Subset) and not hasattr(whole, "collate_fn"):
        whole = whole.dataset
    if size is not None and hasattr(data, "__len__") and size < len(data):
        # Spread evenly: what is sorted by class is not cut off then.
        data = Subset(data, [n * len(data) // size for n in range(size)])
    kind: Any = partial(DatasetBatches, may_be_lengthened=training) if own else DatasetSamples
    samples: DatasetSamples | DatasetBatches = kind(
        data,
        batch_size=settings.batch_size,
        minibatch_size=settings.samples_at_once,
        shuffle=training and settings.shuffle,
        seed=settings.seed,
        collate=getattr(whole, "collate_fn", None),
        tells_epoch=training,
    )
    if not len(samples) and not own:
        raise SettingError(f"{name} is empty: {type(source).__name__} has no sample")
    return samples
