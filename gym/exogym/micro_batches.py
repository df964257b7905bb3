"""Forward and backward of one rank's micro-batches, and how large they can be: measured before it trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from exogym import device as devices
from exogym.errors import ExogymError, OutOfMemory, SettingError
from exogym.flat import FlatParameters
from exogym.logger.event import Mean
from exogym.samplers.batches import Batch, DatasetSamples, count_samples, sample_ids, tensors, to_device

USAGE = 0.8  # of the memory available, unless somebody says how much
GROWTH = 1.15  # of what a sample takes, from the first step to later ones, when freed memory lies in pieces (CPU: 1.13)
CERTAIN = 0.5  # of the room: what is expected to take more is tried
TWO = 2  # samples of the first pass: BatchNorm cannot train on one
FEW = 4  # samples that tell, beside the first, what one more takes
CLOSE = 1.1  # times what fits: a better guess is not worth a pass
FLOAT = 4  # bytes
CONTRACT = (
    "forward(batch) must return the mean loss, a tensor of one float, or (that, number of target tokens, an int), or a "
    "dict or object with that as its 'loss', where other figures may stand too"
)
# For each trained parameter, after the first step: AdamW's moments (8), on the CPU the strategy's flats (12), and
# copies while the optimizer steps and while a checkpoint is written.
LATER_BYTES = {"cpu": 40, "mps": 40, "cuda": 16}


class Forward:
    """The model's loss of a micro-batch, on its device and in its precision.

    accuracy: of the last one, from 0 to 1, where the model's output has an "accuracy" beside its loss.
    """

    accuracy: float | None = None

    def __init__(self, model: nn.Module, device: torch.device, precision: str):
        self._model, self._device, self._precision = model, device, precision
        self._shapes: list[torch.Size] = []

    def __call__(self, batch: Batch) -> tuple[Tensor, float, int]:
        """Return (mean loss, weight of that mean, number of samples)."""
        batch = self.on_device(batch)
        samples = count_samples(batch)
        with devices.autocast(self._device, self._precision):
            output = self._model(batch)
            loss, weight = loss_of(output)
        found = output.get("accuracy") if isinstance(output, Mapping) else getattr(output, "accuracy", None)
        # Of validations only: to read it waits for the device.
        is_figure = isinstance(found, Real) or (isinstance(found, Tensor) and found.numel() == 1)
        self.accuracy = float(cast(Any, found)) if is_figure and not torch.is_grad_enabled() else None
        return loss, float(samples if weight is None else weight), samples

    def on_device(self, batch: Batch) -> Batch:
        if self._device.type == "mps":  # the driver's memory grows with each new shape until the cache is emptied
            shapes = [t.shape for t in tensors(batch)]
            if shapes != self._shapes:
                devices.trim_cache(self._device)
            self._shapes = shapes
        return to_device(batch, self._device)


def loss_of(output: Any) -> tuple[Tensor, int | None]:
    """Return the mean loss in what a model returned, and the number of target tokens if that tells it.

    The loss is the output itself, its "loss" or `loss`, or its first item. A single number beside it must be that of
    its tokens; logits and what else there is are not looked at. Raises SettingError.
    """
    weight: int | None = None
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        loss = getattr(output, "loss", output[0])
        weight = _weight_of(output[1]) if loss is output[0] and len(output) > 1 else None
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"{loss.dtype}{[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
        raise SettingError(f"the model returned {type(output).__name__}, and its loss is {found}: {CONTRACT}")
    if torch.is_grad_enabled() and not loss.requires_grad and weight != 0:
        raise SettingError(f"the model's loss has no gradient, as after detach() or under no_grad(): {CONTRACT}")
    return loss, weight


def _weight_of(second: Any) -> int | None:
    """Return the number of target tokens; None for logits, predictions and collections. Raises SettingError."""
    value = second
    if isinstance(second, Tensor):
        if second.dim() and (second.numel() > 1 or second.is_floating_point()):
            return None
        value = second if second.dim() else second.item()
    elif isinstance(second, (Mapping, tuple, list)):
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        what = f"the model returned {second!r} beside its loss, and that is no number of target tokens"
        raise SettingError(f"{what}: {CONTRACT}")
    return int(value)


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
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
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
        if not math.isfinite(value):
            parameters.write_buffers(buffers)
            work.not_finite += ids if work.not_finite else [f"the loss is {value}", *ids]
            continue
        if weight > 0:
            with no_sync() if left else nullcontext():
                (loss * weight).backward()
            work.loss.add(value * weight, weight)
        work.samples += samples
    parameters.check()
    return work


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The part of a device's memory that this rank may take: `most` bytes, of what device.memory_in_use counts.

    told: how much that is, and of what.
    """

    device: torch.device
    most: int
    told: str

    @classmethod
    def of(cls, device: torch.device, *, usage: float, sharing: int = 1, available: int | None = None) -> Memory:
        """Divide what there is. sharing: ranks on this machine. available: to all of them, before they were started;
        now, if None."""
        devices.empty_cache(device)
        resident = devices.memory_in_use(torch.device("cpu"))
        held, limits = devices.memory_in_use(device), []
        if own := devices.own_memory(device):
            free, total = own
            limits.append(usage * min(free + held, total / devices.sharers(device, sharing)))
        if device.type != "cuda":  # on a Mac the GPU has no memory of its own
            elsewhere = held - resident if device.type != "cpu" else 0
            room = usage * (devices.available_memory() if available is None else available) / sharing
            limits.append(room + elsewhere + (resident if available is None else 0))
        most, among = max(0, int(min(limits))), f" to {sharing} ranks" if sharing > 1 else ""
        told = f"{most / 1e9:.2f} GB on {device} (max_memory_usage = {usage:g} of what is available{among})"
        return cls(device=device, most=most, told=told)


class _Full(Exception):
    """More than there is room for is in use."""


def peak_of(one_pass: Callable[[], None], model: nn.Module, device: torch.device, limit: int) -> tuple[int, bool]:
    """Measure the bytes in use on the device at the peak of a forward and backward pass of the model.

    The second value tells whether the pass was broken off: more than `limit` bytes were in use as a module was called,
    or the allocator had no more. Gradients are dropped.
    """

    def look(*_call: object) -> None:
        if devices.memory_in_use(device) > limit:
            raise _Full

    is_full = False
    with devices.PeakMemory(device) as peak:
        looking = register_module_forward_pre_hook(look)
        try:
            one_pass()
        except Exception as error:
            is_full = isinstance(error, _Full) or devices.is_out_of_memory(error)
            if not is_full:
                raise
        finally:
            looking.remove()
            model.zero_grad(set_to_none=True)
    return peak.bytes, is_full


@dataclass(frozen=True)
class Trial:
    """Forward and backward passes with samples of the first epoch; `alive` is called before each."""

    model: nn.Module
    samples: DatasetSamples
    memory: Memory
    precision: str
    alive: Callable[[], None] = lambda: None

    def peak(self, count: int) -> int | None:
        """Return the bytes in use at the peak of a pass of `count` samples; None if there is no room for it."""
        self.alive()
        peak, is_full = peak_of(lambda: self.run(count), self.model, self.memory.device, self.memory.most)
        return None if is_full or peak > self.memory.most else peak

    def run(self, count: int) -> None:
        order = self.samples.order(0)
        numbers = order[torch.arange(count) % len(order)].tolist()
        forward = Forward(self.model, self.memory.device, self.precision)
        for batch in next(iter(self.samples.read([numbers]))):
            loss, weight, _ = forward(batch)
            (loss * weight).backward()


def samples_at_once(trial: Trial, wanted: int) -> int:
    """Return the most samples, up to `wanted`, whose passes fit into memory, now and at every later step.

    In equal parts of `wanted`. Leaves the model, its gradients and the random generators as they were. A model that
    raises an error is not tried further: training will show it, if it was not only for the number of samples. Raises
    OutOfMemory if not even one sample fits.
    """
    trained = sum(p.numel() for p in trial.model.parameters() if p.requires_grad)
    if not trained:
        return wanted
    later = trained * LATER_BYTES.get(trial.memory.device.type, LATER_BYTES["cpu"])
    try:
        with untouched(trial.model, trial.memory.device):
            trial.model.train()
            fits = _search(trial, wanted, trial.memory.most - later, kept=trained * FLOAT)
    except ExogymError:
        raise
    except Exception:  # a boundary: the user's model and data
        return wanted
    return math.ceil(wanted / math.ceil(wanted / fits))


def _search(trial: Trial, wanted: int, room: int, kept: int) -> int:
    """kept: taken too where a batch has several passes, by gradients."""
    fewest, lowest = _smallest(trial, min(TWO, wanted), room)
    fits = fewest
    too_many, count = wanted + 1, min(FEW, wanted)
    while fits < count and (fits == fewest or count > CLOSE * fits):
        peak = trial.peak(count)
        if peak is None or peak > (room if count == wanted else room - kept):
            too_many, count = count, (fits + count) // 2
            continue
        fits = count
        more = max(1.0, GROWTH * (peak - lowest) / (count - fewest))
        expected = (wanted - fewest) * more
        if too_many > wanted and expected < CERTAIN * (room - lowest):
            return wanted
        if too_many > wanted and lowest + expected <= room:
            count = wanted
        else:
            count = min(fewest + int((room - kept - lowest) / more), too_many - 1)
    return fits


def _smallest(trial: Trial, count: int, room: int) -> tuple[int, int]:
    """Return (`count` samples, or one if they do not fit; bytes of a pass of so many). Raises OutOfMemory."""
    trial.peak(count)  # what only a first pass takes would hide what a sample does
    for fewer in range(count, 0, -1):
        peak = trial.peak(fewer)
        if peak is not None and peak <= room:
            return fewer, peak
    needed = "more memory" if peak is None else f"{(peak + trial.memory.most - room) / 1e9:.2f} GB, more"
    what = f"training with a single sample at a time needs {needed}"
    raise OutOfMemory(
        f"{what} than {trial.memory.told}: use fewer ranks, a smaller model, or a larger max_memory_usage"
    )


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave the model and the random generators as they were, and of its modules' attributes also the contents of plain
    dicts, lists and sets. Raises SettingError if a parameter was changed."""

    def containers(module: nn.Module) -> list[tuple[Any, Any]]:
        values = [value for value in vars(module).values() if isinstance(value, (dict, list, set))]
        return [(value, copy.copy(value)) for value in values]

    before = [(module, dict(vars(module)), containers(module)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    parameters = [(name, p, p.grad, p.requires_grad, p._version) for name, p in model.named_parameters()]
    model.zero_grad(set_to_none=True)
    with devices.random_state_kept(device):
        try:
            yield
        finally:
            for module, attributes, contents in before:
                vars(module).clear()
                vars(module).update(attributes)
                for container, content in contents:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(content)
            for buffer, values in buffers:
                buffer.copy_(values)
            for _, parameter, gradient, requires_grad, _ in parameters:
                parameter.grad, parameter.requires_grad = gradient, requires_grad
            devices.empty_cache(device)
    if changed := [name for name, p, *_, version in parameters if p._version != version]:
        raise SettingError(
            f"a forward pass changes the parameter {changed[0]}, so its memory cannot be tried: give minibatch_size"
        )
