"""What must stay as it was when a run is resumed. Epochs, hosts and devices may change."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from exogym.errors import CheckpointError
from exogym.fixed_sampler import Sampler
from exogym.strategy.strategy import Strategy


def fixed_settings(strategy: Strategy, sampler: Sampler) -> dict[str, Any]:
    """By name, as a checkpoint gives them back. Looks at the data."""
    parameters = strategy.parameters
    values = {f.name: _plain(getattr(strategy.config, f.name)) for f in dataclasses.fields(strategy.config)}
    model = {"trained parameters": parameters.layout(), "frozen weights": parameters.frozen_digest()}
    settings = {"strategy": type(strategy).__name__, **values, **model, **sampler.fixed_settings()}
    return json.loads(json.dumps(settings, default=str))


def check_settings(were: dict[str, Any], are: dict[str, Any], where: object) -> None:
    """Raises CheckpointError that names the differences."""
    other = [name for name in {**were, **are} if json.dumps(were.get(name)) != json.dumps(are.get(name))]
    if other:
        told = "; ".join(_change(name, were.get(name), are.get(name)) for name in other)
        raise CheckpointError(
            f"{where} is of a run with other settings: {told}. "
            "Set them as they were, or begin a new run in another folder"
        )


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it: of a class or function its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        return [_plain(value.func), repr(value.args), repr(sorted(value.keywords.items()))]
    if callable(value):
        named = hasattr(value, "__qualname__")
        return f"{value.__module__}.{value.__qualname__}" if named else type(value).__qualname__
    return value


def _change(name: str, was: Any, now: Any) -> str:
    if isinstance(was, int) and isinstance(now, int) and max(abs(was), abs(now)) > 2**31:  # hashes
        return f"its {name} were others"
    return f"{name} was {was}, and is {now}"
