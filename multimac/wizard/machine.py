"""What this machine is, found out without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from multimac.doctor.macos import output_of
from whisper_tuner.model.machine_memory import machine_memory


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """`memory`: bytes that a model may take; a card's own memory where it has its own."""

    name: str
    device: str
    cores: int
    memory: int


@cache
def this_machine() -> ThisMachine:
    device, memory = _cuda() or ("", 0)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        device = "Apple GPU (mps)"
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    return ThisMachine(
        name=f"{platform.node()}, {system} on {_chip()}",
        device=device or "CPU",
        cores=os.cpu_count() or 1,
        memory=memory or machine_memory()["total"],  # other programs can give back what they hold now
    )


def _chip() -> str:
    if platform.system() == "Darwin":
        return output_of(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or platform.machine()
    return platform.machine()


def _cuda() -> tuple[str, int] | None:
    """Name and memory of the first card, if this torch can use it."""
    if not shutil.which("nvidia-smi") or metadata.version("torch").endswith("+cpu"):
        return None
    line = output_of(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]).split("\n")[0]
    name, _, memory = line.rpartition(", ")
    return (f"{name} (cuda)", int(memory) << 20) if memory.isdigit() else None
