"""How many clips a worker computes at once: measured on this machine before the first round."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distributed.plan.run_spec import RunSpec
from exogym import device as devices
from exogym.batches import Batch, to_device
from exogym.random_state import random_state, set_random_state
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.errors import RunError
from whisper_tuner.model.machine_memory import machine_memory
from whisper_tuner.model.memory import AFTER_A_STEP_BYTES, FLOAT
from whisper_tuner.text import size

WORKER = f"{__package__}.main"
RESERVE = 0.1  # of the memory: left to what else runs there
GROWTH = 1.15  # of what a clip takes, from the first step to later ones, when freed memory lies in pieces (CPU: 1.13)
REMEDY = (
    "Train with method = lora, gradient_checkpointing = true, a smaller max_duration_s, fewer workers on that machine, "
    "or a smaller model; close other programs there."
)
SPARE = 64_000_000  # bytes: for clips that are read ahead, and for the heap's gaps between parts of a batch


class TooLittleMemory(RunError):
    """Not even one clip fits."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a worker may hold of a device's memory: `bytes`, one of `workers` equal parts of what is available now.

    most: of all that there is. What other programs hold they can give back, so only what does not fit into this does
    not fit.
    """

    device: torch.device
    bytes: int
    most: int
    workers: int = 1

    def among(self) -> str:
        return f" ({self.workers} workers are on this machine)" if self.workers > 1 else ""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes at the peak: `one` of a step with one clip, `more` for each further clip.

    is_full: the share was too small; `one` is what had been taken until that was seen.
    """

    one: int
    more: int
    is_full: bool = False

    def of(self, clips: int) -> int:
        return self.one + (clips - 1) * self.more

    def clips_in(self, room: int) -> int:
        return 0 if self.is_full or room < self.one else 1 + (room - self.one) // self.more


class _Full(Exception):
    """More than the share is in use."""


def fit_into_memory(
    model: nn.Module,
    train: ShardBatches,
    validation: ShardBatches | None,
    *,
    share: Share,
    precision: str,
    events: Callable[[dict], None],
) -> None:
    """Measure steps of the longest clips; where a batch of them takes more than this worker's share, cut it up.

    Gradients are weighted by tokens and added up, so that the parts are to the optimizer what the batch was. Nothing
    of the model is changed but where it is: on the device that trains. Raises TooLittleMemory.
    """
    model.to(share.device)
    longest = train.longest()
    at_once = _fit(model, train, longest, share, precision, events, training=True)
    if validation is None:
        return
    theirs = validation.longest()
    if any(own > known for own, known in zip(theirs, longest, strict=True)):
        _fit(model, validation, theirs, share, precision, events, training=False)
    elif at_once < validation.clips_at_once:
        validation.compute_at_most(at_once)


def _fit(
    model: nn.Module,
    batches: ShardBatches,
    longest: tuple[int, int],
    share: Share,
    precision: str,
    events: Callable[[dict], None],
    *,
    training: bool,
) -> int:
    """Clips that are computed at once from now on."""
    began, whole = time.perf_counter(), batches.clips_at_once

    def measured(clips: int) -> Needs:
        return measure(model, lambda count: batches.blank(count, longest), clips, share, precision, training=training)

    needs = measured(min(2, whole))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    later = trained * AFTER_A_STEP_BYTES + SPARE
    at_once, clip_s = needs.clips_in(share.bytes - later), batches.seconds(longest[0])
    if at_once < whole:  # gradients are then kept from one part to the next
        later += trained * FLOAT
        at_once = needs.clips_in(share.bytes - later)
        if at_once > 2:  # what one clip adds is little beside what else there is: told more exactly by several
            needs = measured(at_once)
            at_once = min(at_once, needs.clips_in(share.bytes - later))
    if at_once < 1 and (needs.is_full or needs.one + later > share.most):
        raise TooLittleMemory(_too_little(needs.one + later, clip_s, share, needs.is_full), remedy=REMEDY)
    at_once = max(1, at_once)
    about = {"clip_s": clip_s, "clips": whole, "needed": needs.of(whole) + later, "share": share.bytes}
    if at_once < whole:
        batches.compute_at_most(at_once)
        events({"type": "warning", "what": _cut(about, share, batches.clips_at_once, training)})
    at_once = batches.clips_at_once
    events({"type": "memory", **about, "at_once": at_once, "seconds": time.perf_counter() - began})
    return at_once


def measure(
    model: nn.Module,
    blank: Callable[[int], Batch],
    clips: int,
    share: Share,
    precision: str,
    *,
    training: bool = True,
) -> Needs:
    """A step with one clip and, if that is not all, one with `clips`; `blank` makes the batches.

    Leaves no trace in the model or in random generators.
    """
    with _untouched(model, share.device):
        model.train(training)
        one, is_full = _peak(model, blank(1), share.device, share.most, precision, training)
        if is_full or clips == 1:
            return Needs(one=one, more=1, is_full=is_full)
        if one > share.bytes:
            return Needs(one=one, more=one)
        all_of_them, is_full = _peak(model, blank(clips), share.device, share.bytes, precision, training)
        added = max(all_of_them, share.bytes) if is_full else all_of_them
        return Needs(one=one, more=max(1, int(GROWTH * (added - one) / (clips - 1))))


def _peak(
    model: nn.Module, batch: Batch, device: torch.device, limit: int, precision: str, training: bool
) -> tuple[int, bool]:
    """(bytes, whether it was broken off since it took more than `limit` of them)"""

    def look(*_call: object) -> None:
        if devices.memory_in_use(device) > limit:
            raise _Full

    is_full = False
    with devices.PeakMemory(device) as peak:
        looking = register_module_forward_pre_hook(look)
        try:
            _step(model, batch, device, precision, training)
        except Exception as error:
            is_full = isinstance(error, _Full) or devices.is_out_of_memory(error)
            if not is_full:
                raise
        finally:
            looking.remove()
            model.zero_grad(set_to_none=True)
    return peak.bytes, is_full


def _step(model: nn.Module, batch: Batch, device: torch.device, precision: str, training: bool) -> None:
    with torch.set_grad_enabled(training):
        batch = to_device(batch, device)
        with devices.autocast(device, precision):
            loss, weight = model(batch)
        if training:
            (loss * weight).backward()


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    chance = random_state(device)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, before in buffers:
            buffer.copy_(before)
        set_random_state(chance, device)
        devices.empty_cache(device)


def _cut(about: dict, share: Share, at_once: int, training: bool) -> str:
    clips = f"{about['clips']} {'clips' if training else 'clips of the validation'} of {about['clip_s']:.1f}"
    needs = f"{clips} s at once would take {size(about['needed'])} of memory, and its share is {size(share.bytes)}"
    return f"{needs}{share.among()}: it computes {at_once} at once"


def _too_little(needed: int, clip_s: float, share: Share, is_full: bool) -> str:
    takes = f"{'more than ' if is_full else ''}{size(needed)}"
    part = f"{size(share.most)}{share.among()}"
    return f"one clip of {clip_s:.1f} s takes {takes} of memory, and the share of this worker is {part}"


def share_of_memory(spec: RunSpec, device: str | None) -> Share:
    """What this worker may hold of the memory of the device that it trains on."""
    chosen = devices.choose(device, local_rank=spec.rank)
    own = devices.own_memory(chosen)
    held = devices.memory_in_use(chosen)
    workers = spec.machine_workers if own is None else devices.sharers(chosen, spec.machine_workers)
    now, most = [], []
    if own:
        free, total = own
        reserve = int(RESERVE * total / workers)
        now.append(min(free + held, total // workers) - reserve)
        most.append(total // workers - reserve)
    if chosen.type != "cuda":  # on a Mac the GPU has no memory of its own
        elsewhere = held - devices.memory_in_use(torch.device("cpu"))
        available, whole = _of_machine(spec)
        now.append(available + elsewhere)
        most.append(whole + elsewhere)
    return Share(device=chosen, bytes=max(0, min(now)), most=max(0, min(most)), workers=workers)


def _of_machine(spec: RunSpec) -> tuple[int, int]:
    """Bytes for this process, of those available and of all; what the run's workers hold is shared among them too."""
    memory = machine_memory()
    reserve = RESERVE * memory["total"]
    ours = min(memory["available"] + _held_by_workers(spec.run_id), memory["total"])
    return int(ours - reserve) // spec.machine_workers, int(memory["total"] - reserve) // spec.machine_workers


def _held_by_workers(run_id: str) -> int:
    """Bytes that only this process and the run's other workers on this machine hold."""
    held = 0
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        line, memory = process.info["cmdline"] or (), process.info["memory_info"]
        if memory and (process.pid == os.getpid() or (WORKER in line and run_id in line)):
            held += memory.rss - getattr(memory, "shared", 0)
    return held
