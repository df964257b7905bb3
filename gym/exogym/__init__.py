"""Training on N ranks that talk little: trainers, strategies, and what they stand on.

Names load on first use: `import exogym` and `import exogym.config` do not import torch.
"""

import importlib

_HOME = {
    "exogym.comm.comm": ("Comm", "SingleComm"),
    "exogym.comm.process_group": ("ProcessGroupComm",),
    "exogym.comm.threads": ("ThreadComm",),
    "exogym.config": (
        *("AllReduceConfig", "DeMoConfig", "DiLoCoConfig", "FedAvgConfig", "ParameterServerConfig", "SPARTAConfig"),
        *("SPARTADiLoCoConfig", "OptimSpec", "ScheduleSpec", "StrategyConfig"),
        *("build_strategy", "strategy_config"),
    ),
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
    "exogym.samplers.batches": ("BatchSource", "DatasetBatches"),
    "exogym.samplers.elastic": ("ElasticSampler",),
    "exogym.settings": ("FitSettings", "LoopSettings"),
    "exogym.state.checkpoint": ("Checkpoints",),
    "exogym.strategy": (
        *("AllReduceStrategy", "CommunicateOptimizeStrategy", "CommunicationModule", "DiLoCoStrategy"),
        *("DeMoStrategy", "FedAvgStrategy", "ParameterServerStrategy", "SPARTAStrategy", "SPARTADiLoCoStrategy"),
        *("SimpleReduceStrategy", "StepResult", "Strategy"),
    ),
    "exogym.train_node": ("TrainNode", "TrainResult"),
    "exogym.trainer": ("LaunchedTrainer", "LocalTrainer", "Trainer"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
