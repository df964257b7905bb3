"""Training on N ranks that talk little: trainers, strategies, and what they stand on.

Names load on first use: `import exogym`, `import exogym.config` and `import exogym.strategy` do not import torch.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_HOME = {
    "exogym.comm.comm": ("Comm", "SingleComm", "ThreadComm"),
    "exogym.comm.process_group": ("ProcessGroupComm",),
    "exogym.errors": (
        *("CheckpointError", "ExogymError", "NodeFailed", "NotFinite", "OutOfMemory", "PeerLost", "RanksDiverged"),
        "SettingError",
        "UnknownSetting",
    ),
    "exogym.flat": ("FlatParameters", "digest"),
    "exogym.info": ("check_communication", "info"),
    "exogym.logger": (
        *("CSVLogger", "ConsoleLogger", "Logger", "NullLogger"),
        *("TensorBoardLogger", "WandbLogger"),
    ),
    "exogym.pipeline": ("LaunchedPipelineTrainer", "PipelineTrainer", "split"),
    "exogym.samplers.batches": ("BatchSource", "DatasetBatches"),
    "exogym.samplers.elastic": ("ElasticSampler", "SharedSampler"),
    "exogym.settings": ("FitSettings", "LoopSettings"),
    "exogym.state.checkpoint": ("Checkpoints",),
    "exogym.train_node": ("TrainNode", "TrainResult"),
    "exogym.trainer": ("LaunchedTrainer", "LocalTrainer", "Trainer"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    strategies = importlib.import_module("exogym.strategy")
    if name == "__all__":
        return sorted({*_MODULE_OF, *strategies.__all__})
    if name in strategies.__all__:
        return getattr(strategies, name)
    return importlib.import_module("exogym.strategy.upstream").of_upstream(__name__, name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))


class _OnlyUpstream(ModuleType):
    """A module that only upstream exogym has. It has all names of this package, so its own ones, too."""

    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return __getattr__(name)


for _name in (
    *("aux", "aux.checkpointing", "aux.correlation", "aux.logger", "aux.utils", "common", "minibatch_probe", "utils"),
    *(f"strategy.{name}" for name in ("communicate_optimize_strategy", "demo_impl", "demo_impl.demo", "sparta_diloco")),
):
    sys.modules[f"{__name__}.{_name}"] = _OnlyUpstream(f"{__name__}.{_name}")
