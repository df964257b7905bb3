"""How many clips a worker computes at once: measured on this machine before the first round."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
import transformers

from distributed.plan.run_spec import RunSpec
from exogym import device as devices
from exogym.micro_batches import GROWTH, peak_of, untouched
from exogym.samplers.batches import to_device
from whisper_tuner.data.batch_shapes import CPU_POSITIONS, LABEL_GRID, NO_LIMIT, POSITIONS, BatchLayout, positions
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.errors import RunError
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import hash_of
from whisper_tuner.model.machine_memory import machine_memory
from whisper_tuner.model.memory import (
    AFTER_A_STEP_BYTES,
    CUDA_AFTER_A_STEP_BYTES,
    CUDA_CONTEXT,
    FLOAT,
    RESERVE,
    STAGED,
)
from whisper_tuner.text import counted, size

from .whisper_wrapper import WhisperModelWrapper

MEMORY, FORM = "memory of a step", 1  # FORM is raised when the code of a step changes what it takes
WORKERS = {f"{__package__}.main", f"{__package__}.speed"}
CARD_RESERVE = 4_000_000_000  # bytes, the most that is left of a card's memory: for contexts, and the allocator's gaps
OTHERS = 0.9  # of a device: where less than this is left of it, other programs have the rest
CHECKPOINTED = "it computes activations again in the backward pass (gradient_checkpointing), which takes a third longer"
NO_FULL_CLIP = (
    "no clip is padded or joined to 30 s (audio_context = mixed, timestamps_share): "
    "one takes more than this worker's share of memory"
)
_OR = "a smaller max_duration_s, fewer workers on that machine, or a smaller model; close other programs there."
REMEDY = f"Train with method = lora, {_OR}"
RAN_OUT_REMEDY = f"Train with method = lora, gradient_checkpointing = true, {_OR}"  # which may still be off
# Mel frames whose computation takes as long as what a micro-batch takes beside its clips. Not measured on accelerators,
# but each small kernel has its price there. A CPU has none that are padded to each other.
FIXED_COST = 1_000
SPARE = 80_000_000  # bytes: for clips that are read ahead, and for the heap's gaps between parts of a batch


class TooLittleMemory(RunError):
    """The memory does not hold even one clip."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The memory of a device that a worker may hold: `bytes`, one of `workers` equal parts of what is available now.

    most: one of as many parts of all the memory there is, also of what other programs hold now and may give back.
    """

    device: torch.device
    bytes: int
    most: int
    workers: int = 1

    def among(self) -> str:
        return f" ({self.workers} workers share this machine)" if self.workers > 1 else ""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes at the peak: `one` of a step with one clip, `more` for each further clip.

    is_full: one clip did not fit into the room there was; `one` is what had been taken until that was seen.
    """

    one: int
    more: int
    is_full: bool = False

    def of(self, clips: int) -> int:
        return self.one + (clips - 1) * self.more

    def told(self, later: int) -> str:
        """Say what one clip takes, with `later` bytes more."""
        return f"{'more than ' if self.is_full else ''}{size(self.one + later)}"

    def clips_in(self, room: int) -> int:
        return 0 if self.is_full or room < self.one else 1 + (room - self.one) // self.more


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Training steps of `model` with silent clips of `longest`, which leave no trace."""

    model: WhisperModelWrapper
    batches: ShardBatches
    longest: tuple[int, int]
    share: Share
    precision: str
    facts: FactStore | None = None

    def clips_in(self, room: int, kept: int) -> tuple[int, Needs]:
        """Tell how many clips of a batch fit into `room` bytes, and what was measured.

        kept: bytes that are taken besides if a batch is computed in parts.
        """
        whole = self.batches.at_once(*self.longest)
        needs = self.measure(min(2, whole))
        if needs.clips_in(room) >= whole:
            return whole, needs
        room -= kept
        several = clips = needs.clips_in(room)
        if 2 < several < whole:  # what one clip adds is little beside what else there is: told more exactly by several
            needs = self.measure(several)
            clips = min(clips, needs.clips_in(room))
        return clips, needs

    def measure(self, clips: int) -> Needs:
        """Measure a step with one clip and, if that is not all, one with `clips`; or know it from an earlier run."""
        stamps = {self._described(clips): f"{FORM} {torch.__version__} {transformers.__version__}"}
        for known in self.facts.known(MEMORY, stamps).values() if self.facts else ():
            return Needs(**known)
        needs = self._measured(clips)
        if self.facts and needs.of(clips) <= self.share.bytes:  # else it was broken off
            self.facts.keep(MEMORY, stamps, {name: asdict(needs) for name in stamps})
        return needs

    def _described(self, clips: int) -> str:
        """Return a hash of all on which the memory of a step depends."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        shapes = [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
        again = [
            name for name, module in self.model.named_modules() if getattr(module, "gradient_checkpointing", False)
        ]
        how = self.batches.layout, self.longest, clips, self.share.device.type, self.precision, torch.get_num_threads()
        config: Any = self.model.model.config  # dropout is not a module
        return hash_of(repr((shapes, again, str(self.model), config.to_json_string(), how)).encode()).hex()

    def _measured(self, clips: int) -> Needs:
        with untouched(self.model, self.share.device):
            self.model.train()
            one, is_full = self._peak(1, self.share.most)
            if is_full or clips == 1 or one > self.share.bytes:
                return Needs(one=one, more=one, is_full=is_full)
            all_of_them, is_full = self._peak(clips, self.share.bytes)
            added = max(all_of_them, self.share.bytes) if is_full else all_of_them
            return Needs(one=one, more=max(1, int(GROWTH * (added - one) / (clips - 1))))

    def _peak(self, clips: int, limit: int) -> tuple[int, bool]:
        return peak_of(lambda: self._step(clips), self.model, self.share.device, limit)

    def _step(self, clips: int) -> None:
        batch = to_device(self.batches.blank(clips, self.longest), self.share.device)
        with devices.autocast(self.share.device, self.precision):
            loss, weight = self.model.alone(batch)
        (loss * weight).backward()


def fit_into_memory(
    model: WhisperModelWrapper,
    train: ShardBatches,
    validation: ShardBatches | None,
    *,
    share: Share,
    precision: str,
    events: Callable[[dict], None],
    more_bytes: int = 0,
    facts: FactStore | None = None,
) -> None:
    """Measure steps of the longest clips; where a batch of them takes more than this worker's share, cut it up.

    more_bytes: see plan/automatic.py. Gradients are weighted by tokens and added up, so that the parts are to the
    optimizer what the batch was. Afterwards the model is on the device that trains; nothing else of it is changed, but
    where one clip would not fit it does without the activations that it keeps. Raises TooLittleMemory.
    """
    model.to(share.device)
    for batches in filter(None, (train, validation)):
        batches.layout = _suit(share.device, batches.layout)
    began = time.perf_counter()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    later = _later(trained, share.device, more_bytes)
    trial = Trial(model=model, batches=train, longest=train.longest(), share=share, precision=precision, facts=facts)
    if (full := train.full_clip()) and replace(trial, longest=full).clips_in(share.bytes - later, 0)[0] < 1:
        train.layout = replace(train.layout, pads_in_full=False)
        trial = replace(trial, longest=train.longest())
        events({"type": "warning", "what": f"{NO_FULL_CLIP} ({size(share.bytes)}{share.among()})"})
    longest = trial.longest
    clip_s, whole = train.seconds(longest[0]), train.at_once(*longest)
    kept = trained * FLOAT if whole > 1 else 0  # gradients, from one part of a batch to the next
    at_once, needs = trial.clips_in(share.bytes - later, kept)
    later += kept if at_once < whole else 0
    if at_once < 1:
        if model.checkpoint_gradients():
            what = _too_large(clip_s, needs.told(later), share.bytes, share)
            events({"type": "warning", "what": f"{what}: {CHECKPOINTED}"})
            return fit_into_memory(
                model,
                train,
                validation,
                share=share,
                precision=precision,
                events=events,
                more_bytes=more_bytes,
                facts=facts,
            )
        _refuse(clip_s, needs, later, share)
    needed = needs.of(whole) + later
    if max(1, at_once) < whole:
        train.layout = train.layout.within(max(1, at_once) * positions(*longest))
        what = f"{counted(whole, 'clip')} of {clip_s:.1f} s at once would need {size(needed)} of memory"
        but = f"but this worker's share is {size(share.bytes)}{share.among()}"
        events({"type": "warning", "what": f"{what}, {but}: it computes {train.at_once(*longest)} at a time"})
    if validation:
        _limit(validation, longest, needs.clips_in(share.bytes - later))
    told = {"clip_s": clip_s, "clips": whole, "at_once": train.at_once(*longest), "needed": needed}
    events({"type": "memory", **told, "share": share.bytes, "seconds": time.perf_counter() - began})


def _later(trained: int, device: torch.device, more_bytes: int) -> int:
    """Return the bytes that steps take at their peak beside what the first one shows."""
    if device.type == "cuda":  # what the strategy keeps is not on the card
        return trained * CUDA_AFTER_A_STEP_BYTES + 2 * min(STAGED, trained * FLOAT) + SPARE
    return trained * (AFTER_A_STEP_BYTES + more_bytes) + SPARE


def _limit(validation: ShardBatches, longest: tuple[int, int], fit: int) -> None:
    """Compute as many validation clips at once as fit, where `fit` of training's longest do.

    Without gradients a clip takes less for each second.
    """
    longer = max(1, *(own / known for own, known in zip(validation.longest(), longest, strict=True)))
    clips = max(1, int(fit / longer))
    validation.layout = validation.layout.within(clips * positions(*validation.longest()))


def _too_large(clip_s: float, needed: str, most: int, share: Share) -> str:
    return (
        f"one clip of {clip_s:.1f} s needs {needed} of memory, but this worker's share is {size(most)}{share.among()}"
    )


def _refuse(clip_s: float, needs: Needs, later: int, share: Share) -> None:
    """Raises TooLittleMemory where one clip did not fit, and names other programs where it would fit without them."""
    needed, fits = needs.told(later), needs.one + later <= share.most
    if needs.is_full and fits and share.bytes < OTHERS * share.most:
        taken = f"one clip of {clip_s:.1f} s needs {needed} of memory, but other programs hold it"
        left = f"{size(share.bytes)}{share.among()}"
        raise TooLittleMemory(f"{taken}: this worker's share of what they leave is {left}", remedy=REMEDY)
    if needs.is_full or not fits:
        raise TooLittleMemory(_too_large(clip_s, needed, share.most, share), remedy=REMEDY)


def _suit(device: torch.device, layout: BatchLayout) -> BatchLayout:
    is_cpu, few_shapes = device.type == "cpu", devices.compiles_shapes(device)
    if is_cpu and not few_shapes:
        layout = replace(layout, is_padded=False, few_lengths=False)
    else:
        grid = LABEL_GRID if few_shapes else 1
        layout = replace(layout, few_lengths=few_shapes, label_grid=grid, fixed_cost=FIXED_COST)
    # Validation sums rightly, being without gradients, but no array of Metal's may have 4 GiB (pytorch 149261).
    most = devices.most_terms(device) or NO_LIMIT
    return layout.within(min(most, CPU_POSITIONS if is_cpu else POSITIONS))


@contextmanager
def out_of_memory_told(remedy: str = RAN_OUT_REMEDY, *, loading: bool = False) -> Iterator[None]:
    """Raise TooLittleMemory for an allocator's error: other programs may have taken the memory since it was shared."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        what = devices.told_out_of_memory(error)
        if loading:
            raise TooLittleMemory(f"memory ran out while the model was loaded: {what}", remedy=remedy) from error
        raise TooLittleMemory(f"memory ran out while training: {what}", remedy=remedy) from error


def share_of_memory(spec: RunSpec, device: str | None) -> Share:
    """Compute what this worker may hold of the memory of the device that it trains on."""
    chosen = devices.choose(device, local_rank=spec.rank)
    own = devices.own_memory(chosen)
    held = devices.memory_in_use(chosen)
    workers = spec.machine_workers if own is None else devices.sharers(chosen, spec.machine_workers)
    limits = []  # of what there is now, and of all
    if own:
        free, total = own
        reserve = RESERVE * total
        if chosen.type == "cuda":
            reserve = max(min(reserve, CARD_RESERVE), 1.5 * workers * CUDA_CONTEXT)  # and gaps in what each holds
        now = min((free + workers * held) // workers, total // workers)
        limits.append((now - int(reserve / workers), total // workers - int(reserve / workers)))
    if chosen.type != "cuda":  # on a Mac the GPU has no memory of its own
        elsewhere = held - devices.memory_in_use(torch.device("cpu"))
        available, whole = _of_machine(spec)
        limits.append((available + elsewhere, whole + elsewhere))
    now, most = (max(0, min(each)) for each in zip(*limits, strict=True))
    return Share(device=chosen, bytes=now, most=most, workers=workers)


def _of_machine(spec: RunSpec) -> tuple[int, int]:
    """Compute the bytes for this process, of those available and of all.

    What only the run's workers on this machine hold, this one included, is shared among them too.
    """
    held = 0
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        line, its = process.info["cmdline"] or (), process.info["memory_info"]
        if its and (process.pid == os.getpid() or (spec.run_id in line and WORKERS & set(line))):
            held += its.rss - getattr(its, "shared", 0)
    memory = machine_memory()
    reserve = RESERVE * memory["total"]
    ours = min(memory["available"] + held, memory["total"])
    return int(ours - reserve) // spec.machine_workers, int(memory["total"] - reserve) // spec.machine_workers
