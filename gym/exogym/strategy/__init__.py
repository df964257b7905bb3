"""Strategies: when ranks talk, and what they make of what they hear.

Each strategy is two files: X_settings.py has its settings, imports no torch and registers it by name; X.py has the
strategy itself, which is imported when it is first used.
"""

import importlib
import pkgutil
from typing import Any

from exogym.strategy.strategy_settings import (
    STRATEGIES,
    OptimSpec,
    ScheduleSpec,
    StrategyConfig,
    build_strategy,
    strategy_config,
    strategy_of,
)

for _found in pkgutil.iter_modules(__path__):
    if _found.name.endswith("_settings"):
        importlib.import_module(f"{__name__}.{_found.name}")

_MODULE_OF = {
    "CommunicateOptimizeStrategy": "exogym.strategy.communicate_optimize",
    "CommunicationModule": "exogym.strategy.communicate_optimize",
    "SimpleReduceStrategy": "exogym.strategy.all_reduce",
    "StepResult": "exogym.strategy.strategy",
    "Strategy": "exogym.strategy.strategy",
}
for _config, _place in STRATEGIES.values():
    globals()[_config.__name__] = _config
    _module, _, _class = _place.partition(":")
    _MODULE_OF[_class] = _module

__all__ = [
    "STRATEGIES",
    "OptimSpec",
    "ScheduleSpec",
    "StrategyConfig",
    "build_strategy",
    "strategy_config",
    "strategy_of",
    *(config.__name__ for config, _ in STRATEGIES.values()),
    *_MODULE_OF,
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        return importlib.import_module(f"{__name__}.upstream").of_upstream(__name__, name)
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
