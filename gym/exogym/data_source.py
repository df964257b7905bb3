"""From what a trainer is given as data to what a rank trains or validates on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset

from exogym.batches import BatchSource, DatasetBatches, DatasetSamples
from exogym.config import refuse
from exogym.errors import SettingError
from exogym.settings import FitSettings

# A dataset to share among ranks, a factory (rank, num_nodes, train_dataset) of each rank's own, or ready batches.
DataSource = Dataset | BatchSource | Callable[[int, int, bool], Dataset | BatchSource]


def is_factory(data: Any) -> bool:
    """A data set may be callable too; a class is a factory, since calling it makes a data set."""
    if not callable(data) or (isinstance(data, (Dataset, BatchSource)) and not isinstance(data, type)):
        return False
    return isinstance(data, type) or not hasattr(data, "__getitem__")


def call_factory(factory: Callable[..., Any], rank: int, num_nodes: int, training: bool) -> Any:
    """By keyword where it declares the names, else by place. It may leave `train_dataset` out."""
    places, last = (rank, num_nodes), {"train_dataset": training}
    names = {"rank": rank, "num_nodes": num_nodes}
    try:
        declared = inspect.signature(factory)
    except ValueError:  # not every function that is written in C tells
        return factory(*places, training)
    for args, kwargs in (((), names | last), (places, last), ((*places, training), {}), ((), names), (places, {})):
        try:
            declared.bind(*args, **kwargs)
        except TypeError:
            continue
        return factory(*args, **kwargs)
    raise SettingError(f"a factory of data sets takes (rank, num_nodes, train_dataset), not {declared}")


def samples_of(
    data: DataSource | None, rank: int, num_nodes: int, settings: FitSettings, *, training: bool
) -> DatasetSamples | BatchSource | None:
    """What rank `rank` trains or validates on. DatasetBatches are its own, DatasetSamples are all ranks'."""
    name, own = "train_dataset" if training else "val_dataset", is_factory(data)
    if own:
        data = call_factory(data, rank, num_nodes, training)
    if data is None and not (own or training):
        refuse("without val_dataset", val_size=settings.val_size)
        return None
    if data is None:
        raise SettingError(f"{name} is None, or its factory returned None")
    if isinstance(data, BatchSource):
        _refuse_sizes(data, settings, training=training)
        return data
    kind = DatasetBatches if own else DatasetSamples
    more = {"may_be_lengthened": training} if own else {}
    samples = kind(
        data if training else _part(data, settings.val_size),
        batch_size=settings.batch_size,
        minibatch_size=settings.samples_at_once,
        shuffle=training and settings.shuffle,
        seed=settings.seed,
        tells_epoch=training,
        **more,
    )
    if not len(samples) and not own:
        raise SettingError(f"{name} is empty: {type(data).__name__} has no sample")
    return samples


def _part(data: Dataset, size: int | None) -> Dataset:
    """`size` samples, spread evenly: what is sorted by class is not cut off then."""
    if size is None or not hasattr(data, "__len__") or size >= len(data):
        return data
    return Subset(data, [n * len(data) // size for n in range(size)])


def _refuse_sizes(data: BatchSource, settings: FitSettings, *, training: bool) -> None:
    """A BatchSource makes its batches itself."""
    sizes = ("minibatch_size", "gradient_accumulation", "max_memory_usage") if training else ("val_size",)
    refuse(f"{type(data).__name__} makes its own batches", **{name: getattr(settings, name) for name in sizes})
