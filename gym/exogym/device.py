"""The one place that knows about kinds of accelerator."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from exogym.errors import SettingError

PRECISIONS = ("float32", "bf16")


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
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "cuda":
        torch.cuda.empty_cache()


def memory_in_use(device: torch.device) -> int:
    """Bytes that the driver holds for this process on the accelerator; 0 on the cpu."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return 0
