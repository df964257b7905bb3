"""Joins whisper_tuner and exogym: the same job on one process, on N processes, on N machines."""

import importlib
from typing import Any

_MODULE_OF = {"NetworkTrainer": "distributed.fit", "WhisperModelWrapper": "distributed.worker.whisper_wrapper"}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    return importlib.import_module("exogym.strategy.upstream").of_upstream(__name__, name)
