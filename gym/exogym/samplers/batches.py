"""Where a rank's batches come from, for ordinary datasets; and what can be said of any batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from exogym.device import random_state, set_random_state
from exogym.errors import SettingError

Batch = Any  # a tensor, or dicts, tuples and lists of them


@runtime_checkable
class BatchSource(Protocol):
    """One rank's share of the work.

    It may have a method `fixed_settings() -> dict`, by name what must be the same when a run is resumed: text and
    numbers. Without it that is the number of steps.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch: the same on all ranks."""

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield a list of micro-batches for each of `steps_per_epoch` optimizer steps; empty for one without work.

        `epoch` counts from 0 and is what a shuffle should depend on; a run that is resumed leaves out the steps before
        `first_step`.
        """


class MapDataset(Protocol):
    """A data set whose samples have numbers, as torch's map-style ones, lists and tensors do."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(eq=False, repr=False)
class DatasetSamples:
    """Any map-style dataset as an ElasticSampler wants it: what is left of an epoch's shuffle in turn.

    batch_size: samples of one rank in an optimizer step; minibatch_size: samples in a forward pass (all, if None);
    collate: makes a batch of samples, in place of torch's default_collate. tells_epoch: the data set's own `set_epoch`,
    if it has one, is called as an epoch begins.
    """

    dataset: MapDataset
    _: KW_ONLY
    batch_size: int = 16
    minibatch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    collate: Callable[[list[Any]], Batch] | None = None
    tells_epoch: bool = True

    def __post_init__(self) -> None:
        name = type(self.dataset).__name__
        if isinstance(self.dataset, DataLoader):
            raise SettingError("give the data set itself, not a DataLoader: batches are made here, by batch_size")
        if not hasattr(self.dataset, "__len__") or isinstance(self.dataset, IterableDataset):
            raise SettingError(f"{name} has no length or no order: wrap a stream in a BatchSource of your own")
        size = self.batch_size if self.minibatch_size is None else self.minibatch_size
        if not 1 <= size <= self.batch_size:
            sizes = f"minibatch_size ({self.minibatch_size}) <= batch_size ({self.batch_size})"
            raise SettingError(f"need 1 <= {sizes}")

    def __len__(self) -> int:
        return len(self.dataset)

    def plan_settings(self) -> dict[str, Any]:
        about = {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}
        return {"samples": len(self), **about}

    def describe(self) -> dict[str, Any]:
        return {"data": described(self.dataset)}

    def order(self, epoch: int) -> torch.Tensor:
        """Return the numbers of all samples in the order of an epoch, as torch's DistributedSampler would have it."""
        if not self.shuffle:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(self.seed + epoch))

    def plan(
        self,
        epoch: int,
        left: torch.Tensor | None,
        members: Sequence[str],
        weights: Sequence[float],
        steps_before: int = 0,
    ) -> list[list[list[int]]]:
        numbers = self.order(epoch)
        order: list[int] = (numbers if left is None else numbers[left[numbers]]).tolist()
        size = self.batch_size
        steps = math.ceil(len(order) / (size * len(members)))
        if len(set(weights)) <= 1:
            own = [order[n :: len(members)] for n in range(len(members))]
            return [[mine[step * size : (step + 1) * size] for step in range(steps)] for mine in own]
        # Larger batches for those with more weight; a mean of batch_size over all members and steps. Exact, so that no
        # rounding can come out differently on another machine.
        parts = list(accumulate(map(Fraction, weights)))
        ends = [len(order) * part // parts[-1] for part in parts]
        sizes = spread([end - begin for begin, end in pairwise([0, *ends])], steps)
        rest = iter(order)
        steps_of = [[list(islice(rest, size)) for size in at_once] for at_once in zip(*sizes, strict=True)]
        return [[step[n] for step in steps_of] for n in range(len(weights))]

    def prefetch(self, steps: Iterable[Sequence[int]]) -> None:
        pass

    def begin_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch is going to be read."""
        if self.tells_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def read(self, steps: Iterable[Sequence[int]]) -> Iterator[list[Batch]]:
        data, size = cast("Dataset[Any]", self.dataset), self.minibatch_size or self.batch_size
        for step in steps:
            parts = [list(step[at : at + size]) for at in range(0, len(step), size)]
            yield list(DataLoader(data, batch_sampler=parts, collate_fn=self.collate)) if parts else []


@dataclass(eq=False, repr=False)
class DatasetBatches(DatasetSamples):
    """A BatchSource over one rank's own map-style dataset.

    may_be_lengthened: each rank has a data set of its own; where another's is longer, this one adds steps without work.
    """

    _: KW_ONLY
    may_be_lengthened: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps_per_epoch = math.ceil(len(self) / self.batch_size)

    def fixed_settings(self) -> dict[str, Any]:
        return self.plan_settings() | self.describe()

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[list[Batch]]:
        self.begin_epoch(epoch)
        order = self.order(epoch).tolist()
        starts = [step * self.batch_size for step in range(first_step, self.steps_per_epoch)]
        return self.read(order[at : at + self.batch_size] for at in starts)


def described(dataset: MapDataset) -> str:
    """Describe a data set without reading it all, to tell it from others.

    It gives type, length, and the first and the last sample where these are the same each time that they are read.
    Floats are rounded, since they may have been computed on another machine, and paths are left out.
    """
    about, ends = [type(dataset).__qualname__, str(len(dataset))], []
    before = random_state(torch.device("cpu"))
    try:
        for _ in range(2):
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)  # not that of an accelerator, which nobody would put back
            ends.append(_told([dataset[n] for n in (0, len(dataset) - 1)]))
    except Exception:  # of whatever kind: a file that is not on this machine, a generator that has run out
        return " ".join(about)
    finally:
        set_random_state(before, torch.device("cpu"))
    return " ".join([*about, *ends[:1]] if ends[0] == ends[1] else about)


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        values = value.detach().double().abs()
        return f"{value.dtype}{list(value.shape)}{values.mean().item():.3g}"
    if isinstance(value, Mapping):
        return str({str(key): _told(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_told(item) for item in value])
    if isinstance(value, int) or (isinstance(value, str) and not set("/\\") & set(value)):
        return str(value)
    return type(value).__qualname__


def spread(counts: Sequence[int], steps: int) -> list[list[int]]:
    """Return for each member the sizes of its `steps` steps, which hold `count` samples and differ by one at most.

    All members take what is over in the same steps, as far as they have it, so that one rests where the others have
    less to do. Reversed bits (van der Corput) put these steps far from each other: a member has work in any
    2 * steps / count steps on end, and in the last one.
    """
    turns = sorted(range(steps), key=lambda step: f"{steps - 1 - step:b}"[::-1])
    sizes = []
    for count in counts:
        each, over = divmod(count, max(steps, 1))
        fuller = set(turns[:over])
        sizes.append([each + (step in fuller) for step in range(steps)])
    return sizes


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`; what is not a tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(value)


def sample_ids(batch: Batch) -> list[str]:
    """Return `batch["ids"]`, the names of its samples, if it has any."""
    return list(batch.get("ids", ())) if isinstance(batch, Mapping) else []


def count_samples(batch: Batch) -> int:
    """Return how many names `batch["ids"]` has, else the first dimension of the first tensor.

    Names tell more: a batch of noise alone has none, and it counts for no sample. Raises SettingError without a tensor.
    """
    if isinstance(batch, Mapping) and "ids" in batch:
        return len(batch["ids"])
    for tensor in tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise SettingError(f"a batch must hold at least one tensor, not just {type(batch).__name__}")
