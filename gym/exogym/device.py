"""The one place that knows about kinds of accelerator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import psutil
import torch

from exogym.errors import SettingError

PRECISIONS = ("float32", "bf16")
SAMPLE_S = 0.005


def choose(name: str | torch.device | None = None, local_rank: int = 0) -> torch.device:
    """`name`, or the best of mps, cuda and cpu. A bare `cuda` is spread over the cards by `local_rank`."""
    if name is None or name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingError("device mps: this torch has no Metal support here; use device cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SettingError("device cuda: no CUDA device is visible; use device cpu")
        if device.index is None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """bf16 where asked for. fp16 is not offered: with a GradScaler it zeroed gradients on mps (pytorch 184286)."""
    if precision not in PRECISIONS:
        raise SettingError(f"unknown precision {precision!r} (known: {', '.join(PRECISIONS)})")
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def synchronize(device: torch.device) -> None:
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back what is held without need."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim:
            trim(0)


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process holds: of the accelerator's memory, by its driver; on the cpu the resident ones."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return _process(os.getpid()).memory_info().rss


def own_memory(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes that an accelerator has for programs; None for the cpu."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def sharers(device: torch.device, processes: int) -> int:
    """How many of this machine's `processes`, spread by `choose`, have the same accelerator as this one."""
    return -(-processes // torch.cuda.device_count()) if device.type == "cuda" else processes


class PeakMemory:
    """As a context: `bytes` is the most that this process held meanwhile, of what `memory_in_use` counts.

    Of resident memory Linux keeps the highest value itself. Elsewhere it is sampled, and a machine that is busy with
    other things may see less.
    """

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        empty_cache(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.device.type == "cpu":
            self._is_kept = _forget_highest_resident()
            self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self.device.type == "cpu":
            self._sampler.join()
        synchronize(self.device)
        # Of what mps has taken nothing is given back before the cache is emptied.
        now = memory_in_use(self.device) if self.device.type != "cuda" else torch.cuda.max_memory_allocated(self.device)
        highest = _highest_resident() if self.device.type == "cpu" and self._is_kept else 0
        self.bytes = max(self.bytes, now, highest)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, memory_in_use(self.device))


def _forget_highest_resident() -> bool:
    """False where the system does not keep it: see proc(5), clear_refs and VmHWM."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _highest_resident() > 0
    except OSError:
        return False


def _highest_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def is_out_of_memory(error: BaseException) -> bool:
    """mps raises a plain RuntimeError; the cpu's allocator too."""
    told = isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate" in str(error))
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@cache
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)
