"""Forward and backward of one rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor, nn

from exogym import device as devices
from exogym.flat import FlatParameters
from exogym.logger.event import Mean
from exogym.samplers.batches import Batch, count_samples, sample_ids, tensors, to_device


class Forward:
    """The model's loss of a micro-batch, on its device and in its precision."""

    def __init__(self, model: nn.Module, device: torch.device, precision: str):
        self._model, self._device, self._precision = model, device, precision
        self._shapes: list[torch.Size] = []

    def __call__(self, batch: Batch) -> tuple[Tensor, float, int]:
        """Return (mean loss, weight of that mean, number of samples)."""
        if self._device.type == "mps":  # the driver's memory grows with each new shape until the cache is emptied
            shapes = [t.shape for t in tensors(batch)]
            if shapes != self._shapes:
                devices.trim_cache(self._device)
            self._shapes = shapes
        batch = to_device(batch, self._device)
        samples = len(sample_ids(batch)) or count_samples(batch)
        with devices.autocast(self._device, self._precision):
            output = self._model(batch)
        loss, weight = output if isinstance(output, tuple) else (output, samples)
        return loss, float(weight), samples


@dataclass
class StepWork:
    """The sums over the micro-batches of one step.

    not_finite: why some have no finite loss, and their ids. cost: about the work that it was, see Samples.cost.
    """

    loss: Mean = field(default_factory=Mean)
    samples: int = 0
    ids: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    cost: float = 0.0


def accumulate(
    batches: list[Batch],
    forward: Forward,
    parameters: FlatParameters,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> StepWork:
    """Add their gradients up in `.grad`, each weighted. What gives no finite loss is left out, also from buffers.

    no_sync: for the backward passes of all but the last one.
    """
    work = StepWork()
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        ids = sample_ids(batch)
        work.ids += ids
        buffers = parameters.read_buffers()
        loss, weight, samples = forward(batch)
        value = loss.item() if weight > 0 else 0.0  # a mean over no token at all is NaN
        if not isfinite(value):
            parameters.write_buffers(buffers)
            work.not_finite += ids if work.not_finite else [f"the loss is {value}", *ids]
            continue
        if weight > 0:
            with no_sync() if left else nullcontext():
                (loss * weight).backward()
            work.loss.add(value * weight, weight)
        work.samples += samples
    return work
