"""What this machine trains on, and how much memory that has, found out without importing torch."""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from importlib import metadata

from distributed.plan.automatic import Measured
from whisper_tuner.model.machine_memory import machine_memory
from whisper_tuner.model.memory import MPS_SHARE, RESERVE
from whisper_tuner.text import size

from .programs import is_macos, output_of


def described() -> str:
    system, chip = platform.system(), platform.machine()
    name = {"cuda": f"{_card()[0]} (cuda)", "mps": "Apple GPU (mps)"}.get(device_here(), "CPU")
    if is_macos():
        system = f"macOS {platform.mac_ver()[0]}"
        chip = output_of(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]).strip() or chip
    memory = f"{os.cpu_count() or 1} cores, {size(machine_memory()['total'])} of memory"
    return f"{platform.node()}, {system} on {chip}: {memory}, trains on {name}"


def device_here() -> str:
    if _card()[1]:
        return "cuda"
    return "mps" if is_macos() and platform.machine() == "arm64" else "cpu"


@cache
def memory_here() -> int:
    """Return the bytes that a model may take: a card's own memory, or what Metal recommends on a Mac."""
    return _card()[1] or int(machine_memory()["total"] * (MPS_SHARE if device_here() == "mps" else 1))


def one_machine() -> Measured:
    """Describe training on this machine alone: nothing travels."""
    room, memory = float(memory_here()), machine_memory()
    if device_here() != "cuda" and memory["available"] is not None:
        room = min(room, memory["available"] - RESERVE * memory["total"])
    return Measured(bytes_s=math.inf, device=device_here(), room_bytes=room)


@cache
def _card() -> tuple[str, int]:
    """Return name and memory of the first CUDA card, if this torch can use it; else "" and 0."""
    if metadata.version("torch").endswith("+cpu"):
        return "", 0
    line = output_of(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]).split("\n")[0]
    name, _, memory = line.rpartition(", ")
    return (name, int(memory) << 20) if memory.isdigit() else ("", 0)
