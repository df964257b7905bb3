"""Strategies: when ranks talk, and what they make of what they hear. Names load on first use."""

import importlib

_MODULE_OF = {
    "AllReduceStrategy": "all_reduce",
    "DiLoCoStrategy": "diloco",
    "SimpleReduceStrategy": "all_reduce",
    "StepResult": "strategy",
    "Strategy": "strategy",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
