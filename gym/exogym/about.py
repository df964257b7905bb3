"""What this machine and this installation have, for a report or before a run."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from exogym import device as devices
from exogym.strategy import STRATEGIES

SOURCE = Path(__file__).parent
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


class Info(dict[str, Any]):
    """As text, a line for each of its values."""

    def __str__(self) -> str:
        lines = []
        for name, value in self.items():
            if name == "devices":
                lines += [(f"device {device['name']}", _of_device(device)) for device in value]
            elif isinstance(value, dict):
                lines.append((name, ", ".join(f"{key} {item}" for key, item in value.items())))
            else:
                lines.append((name, ", ".join(value) if isinstance(value, list) else str(value)))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def info() -> Info:
    """Versions, platform, cores, devices with their memory in bytes, backends of torch.distributed, and strategies."""
    cores = {"physical": psutil.cpu_count(logical=False), "logical": os.cpu_count()}
    return Info(
        exogym={"source": source_hash(), "in": str(SOURCE)},
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        cores={**cores, "used by torch": torch.get_num_threads()},
        devices=_devices(),
        backends=[name for name in BACKENDS if dist.is_available() and dist.is_backend_available(name)],
        strategies=sorted(STRATEGIES),
    )


def source_hash() -> str:
    """Changes with any of exogym's source files: machines that train together should have the same."""
    hasher = hashlib.blake2b(digest_size=4)
    for path in sorted(SOURCE.rglob("*.py")):
        hasher.update(f"{path.relative_to(SOURCE).as_posix()}\n".encode() + path.read_bytes())
    return hasher.hexdigest()


def _devices() -> list[dict[str, Any]]:
    memory = psutil.virtual_memory()
    found = [{"name": "cpu", "kind": platform.machine(), "memory": memory.total, "free": memory.available}]
    accelerators = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        accelerators.append(torch.device("mps"))
    for device in accelerators:
        free, total = devices.own_memory(device)
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "Metal"
        found.append({"name": str(device), "kind": kind, "memory": total, "free": free})
    return found


def _of_device(device: dict[str, Any]) -> str:
    return f"{device['kind']}, {device['memory'] / 1e9:.1f} GB, {device['free'] / 1e9:.1f} GB free"
