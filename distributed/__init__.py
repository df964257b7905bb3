"""Joins whisper_tuner and exogym: the same job on one process, on N processes, on N machines."""

import importlib
from typing import Any

_MODULE_OF = {"NetworkTrainer": "distributed.fit", "WhisperModelWrapper": "distributed.worker.whisper_wrapper"}


def __getattr__(name: str) -> Any:
    """Load what it gives on first use: hosts import parts of this package before they have torch."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in ("DistributedLauncher", "launch_distributed_training"):
        return importlib.import_module("exogym.strategy.upstream").of_upstream(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
