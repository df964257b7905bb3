"""RunSpec: one rank's part of a run as JSON. It is all that a worker is told, and nothing in it is executable."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

from exogym.config import STRATEGIES, StrategyConfig
from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json

CHECKPOINTS = "checkpoints"  # in the run's folder on each host
# In final/ of a run of a user's own model.
RESULT, WEIGHTS = "result.json", "model.safetensors"
SPEC = ".spec.json"  # after a rank's name, in there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: the launcher's TCPStore. `prefix` is random, and each generation adds another."""

    address: str
    port: int
    prefix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A user's own model and data sets, sent as a file; unpickled only if its SHA-256 is this one."""

    path: str
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run of a user's own model has a `bundle`, in place of a profile and of a strategy with its settings.

    hosts: the names of all ranks, as the run begins. machine_workers: how many of them share this rank's machine.
    interface, device: what the hosts file says of this host, or "".
    """

    run_id: str
    run_dir: str
    cache_dir: str
    rank: int = 0
    world_size: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    machine_workers: int = 1
    strategy: str = "diloco"
    strategy_settings: StrategyConfig | None = None
    profile: Profile | None = None
    bundle: Bundle | None = None
    rendezvous: Rendezvous | None = None
    interface: str = ""
    device: str = ""
    shares: str = "fixed"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.machine_workers < 1:
            raise ValueError(f"machine_workers = {self.machine_workers}")

    @property
    def name(self) -> str:
        return self.hosts[self.rank]

    @property
    def wanted_device(self) -> str | None:
        """Where the hosts file or else the profile wants this rank to train; None: on the machine's best device."""
        wanted = self.device or (self.profile.device if self.profile else "auto")
        return None if wanted == "auto" else wanted

    def to_json(self) -> str:
        return json_of(self)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Raises ConfigError naming the key that is missing, unknown or of the wrong type."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"run spec: not JSON: {error}") from None
        return build(cls, data, "run spec")


def json_of(instance: Any, **options: Any) -> str:
    """A dataclass and all that is in it as JSON. `build` is the way back."""
    return json.dumps(dataclasses.asdict(instance), default=os.fspath, **options)


def build(hint: Any, data: Any, where: str) -> Any:
    """`data`, as it comes from JSON, as what a field annotated `hint` holds. No value is converted to another type.

    Raises ConfigError naming the place of what is missing, unknown, of the wrong type or out of range.
    """
    if isinstance(hint, types.UnionType):
        if data is None and types.NoneType in typing.get_args(hint):
            return None
        hint = typing.get_args(hint)[0]
    if dataclasses.is_dataclass(hint):
        return _object(hint, _exactly(dict, data, where), where)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(build(item, part, f"{where}[{n}]") for n, part in enumerate(_exactly(list, data, where)))
    if hint is Path:
        return Path(_exactly(str, data, where))
    if hint is float and type(data) is int:
        return _float(data, where)
    return _exactly(hint, data, where)


def _object(cls: type, data: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    if cls is RunSpec:
        data = _of_today(data)
        hints["strategy_settings"] = _settings_class(data, where) | None
        for key in () if data.get("bundle") else ("profile", "strategy_settings"):
            if data.get(key) is None:
                raise ConfigError(f"{where}: no {key!r}, and no 'bundle'")
    for key in sorted(set(data) - set(hints)):
        raise ConfigError(f"{where}: unknown key {key!r}")
    for field in dataclasses.fields(cls):
        if field.name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: no {field.name!r}")
    values = {key: build(hints[key], item, f"{where}: {key}") for key, item in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _exactly(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ConfigError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def _float(number: int, where: str) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ConfigError(f"{where}: a number of {len(str(abs(number)))} digits") from None


def _settings_class(spec: dict[str, Any], where: str) -> type[StrategyConfig]:
    name = spec.get("strategy", "diloco")
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigError(f"{where}: unknown strategy {name!r}")
    return STRATEGIES[name][0]


def _of_today(spec: dict[str, Any]) -> dict[str, Any]:
    """Version 0.1 wrote these two beside the profile, where an interval of 0 had been replaced by one that fits."""
    moved = {key: spec[key] for key in ("checkpoint_interval", "keep_checkpoints") if key in spec}
    if not moved:
        return spec
    profile = spec.get("profile")
    kept = {key: value for key, value in spec.items() if key not in moved}
    return kept | ({"profile": profile | moved} if isinstance(profile, dict) else {})
