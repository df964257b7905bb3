"""The names that upstream exogym (github.com/exo-explore/gym, c8012ac to 9fa323c) has for what is here, in one place.

Each means here what it means there, or is refused with what to write instead. Imports no torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from exogym.config import check_keys, check_whole, refuse
from exogym.errors import SettingError
from exogym.strategy.strategy_settings import BY_NAME, OPTIMIZERS, OptimSpec

LOGGED = "a run's settings go to the logger: see Logger.started"
NAMES = {  # the module that has it here, or what to write instead
    "CheckpointMixin": "give fit save_dir and checkpoint_interval, and resume=True to go on",
    "CorrelationMixin": "give fit log_correlation",
    "DeMo": "DeMoStrategy is the whole method",
    "DiLoCoCommunicator": "exogym.strategy.diloco",
    "DistributedLauncher": "write NetworkTrainer(hosts_file, model, data).fit(strategy)",
    "SimpleReduceStrategy": "exogym.strategy.all_reduce",
    "SparseCommunicator": "exogym.strategy.sparta",
    "ensure_optim_spec": "exogym.strategy.upstream",
    "find_minibatch_size_isolated": "leave minibatch_size out of fit: each node measures what fits",
    "get_device": "exogym.strategy.upstream",
    "init_process_group_portsafe": "write exogym.launch.init()",
    "launch_distributed_training": "write exogym.launch.launch(function, [arguments], nproc_per_node=N)",
    "TrainConfig": "the arguments of fit are the settings",
    **dict.fromkeys(("LogModule", "create_config", "extract_config", "log_model_summary", "safe_log_dict"), LOGGED),
}


def of_upstream(module: str, name: str) -> Any:
    """Return what is called so at upstream, for the `__getattr__` of `module`. Raises ImportError with the remedy."""
    if found := sys.modules.get(f"{module}.{name}"):
        return found
    if name not in NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if " " in NAMES[name]:  # no AttributeError: `from ... import` would hide the text
        raise ImportError(f"{name} of upstream exogym is not here: {NAMES[name]}")
    return getattr(importlib.import_module(NAMES[name]), name)


# Settings of a strategy.

ALIASES = {
    **{"inner_lr": "lr", "lr_scheduler": "schedule", "outer_optim_spec": "outer_optim"},
    **{"optim_spec": "inner_optim", "inner_optim_spec": "inner_optim"},
}
UNUSED = ("H", "p", "async_sparta_delay")  # upstream's examples give them to strategies that do not use them


def strategy_settings(who: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the settings of strategy `who` by the names that they have here. Raises SettingError."""
    unused = [key for key in UNUSED if given.get(key) and key not in known]
    if unused:
        warnings.warn(f"{who}: {', '.join(unused)} has no effect, as at upstream", stacklevel=3)
    settings = {key: value for key, value in given.items() if key in known or key not in UNUSED}
    numbers = settings.pop("lr_scheduler_kwargs", None)
    for alias, name in ALIASES.items():
        if alias in settings and name in settings:
            raise SettingError(f"{alias} is another name of {name}: give one of them")
        value = settings.pop(alias, None)
        if value is not None and alias.endswith("optim_spec") and "compression_topk" in known:  # DeMo has no optimizer
            found = {"lr": value.lr} if isinstance(value, OptimSpec) else dict(getattr(value, "keywords", {}))
            warnings.warn(f"{who}: of {alias} it takes {', '.join(found) or 'nothing'}", stacklevel=3)
            settings = found | settings
        elif value is not None:
            settings[name] = value
    for key, value in settings.items():
        if key.endswith("_optim") and isinstance(value, str) and value not in OPTIMIZERS and value.lower() in BY_NAME:
            name = value.lower()
            settings[key] = name if name in OPTIMIZERS else OptimSpec.from_string(name)
    if settings.get("schedule") != "lambda_cosine":
        refuse('without lr_scheduler="lambda_cosine"', lr_scheduler_kwargs=numbers or None)
        return settings
    refuse("lr_scheduler_kwargs has it", warmup_steps=settings.get("warmup_steps"))
    check_keys("lr_scheduler_kwargs", numbers or {}, ["warmup_steps", "cosine_anneal"])
    warmup, falls = ((numbers or {}).get(key, 0) for key in ("warmup_steps", "cosine_anneal"))
    curve = {"schedule": "cosine", "min_lr_ratio": 0.1} if falls else {"schedule": "constant"}
    return settings | {"warmup_steps": warmup, **curve}


def ensure_optim_spec(optim: Any, default: Any = None, **numbers: Any) -> Any:
    """Return an OptimSpec for a name or None; one that is given gets the numbers, too."""
    if optim is None or isinstance(optim, str):
        return default if default and optim is None else OptimSpec.from_string(optim or "adamw", **numbers)
    return replace(optim, **numbers) if isinstance(optim, OptimSpec) else partial(optim, **numbers)


def get_device() -> str:
    """Return the kind of the best device: mps, cuda or cpu."""
    return str(importlib.import_module("exogym.device").choose().type)


# Arguments of `fit`.

LOADER = ("num_workers", "persistent_workers", "pin_memory", "pin_memory_device", "prefetch_factor")


def fit_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` by the names and values that they have here. Raises SettingError."""
    settings = {key: value for key, value in given.items() if key != "checkpoint_interval" or value is not None}
    if loader := settings.pop("dataloader_kwargs", None):
        check_keys("dataloader_kwargs", loader, LOADER)
        warnings.warn("dataloader_kwargs has no effect: each node reads its samples itself", stacklevel=4)
    if interval := settings.pop("correlation_interval", None):
        check_whole("correlation_interval", interval, 1)
        rounds = getattr(settings.get("strategy"), "config", None)
        settings.setdefault("log_correlation", max(1, interval // getattr(rounds, "steps_in_round", 1)))
    if settings.get("max_steps") is not None:
        if settings.get("num_epochs") is not None:
            warnings.warn("num_epochs has no effect beside max_steps, as at upstream", stacklevel=4)
        settings["num_epochs"] = None
    return settings
