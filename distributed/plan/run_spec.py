"""RunSpec: one rank's part of a run as JSON. It is all that a worker is told, and nothing in it is executable."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from pathlib import Path

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
    """`profile` holds the fields of Profile as JSON values; a run of a user's own model has a `bundle` instead.

    hosts: the names of all ranks, as the run begins. machine_workers: how many of them share this rank's machine.
    """

    run_id: str
    run_dir: str
    cache_dir: str
    rank: int = 0
    world_size: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    machine_workers: int = 1
    strategy: str = "diloco"
    strategy_settings: dict = dataclasses.field(default_factory=dict)
    profile: dict | None = None
    bundle: Bundle | None = None
    rendezvous: Rendezvous | None = None
    interface: str = ""
    shares: str = "fixed"
    checkpoint_interval: int = 0
    keep_checkpoints: int = 2
    resume: bool = False

    def __post_init__(self) -> None:
        if self.machine_workers < 1:
            raise ValueError(f"machine_workers = {self.machine_workers}")

    @property
    def name(self) -> str:
        return self.hosts[self.rank]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Raises ConfigError naming the key that is missing, unknown or of the wrong type."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"run spec: not JSON: {error}") from None
        return build(cls, data, "run spec")


def profile_to_json(profile: Profile) -> dict:
    """The fields as they come back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(profile), default=str))


def profile_from_json(data: dict) -> Profile:
    return build(Profile, data, "run spec: profile")


def build(cls, data, where: str):
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - set(fields)):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    hints = typing.get_type_hints(cls)
    values = {key: _value(hints[key], item, f"{where}: {key}") for key, item in data.items()}
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: no {missing[0]!r}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(hint, item, where: str):
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, type(int | None)) else (hint,)
    if item is None and type(None) in options:
        return None
    hint = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(hint):
        return build(hint, item, where)
    if typing.get_origin(hint) is tuple and isinstance(item, list):
        return tuple(_value(typing.get_args(hint)[0], part, where) for part in item)
    if hint is Path and isinstance(item, str):
        return Path(item)
    if hint is float and isinstance(item, int) and not isinstance(item, bool):
        if abs(item) > sys.float_info.max:
            raise ConfigError(f"{where}: a number of {len(str(abs(item)))} digits")
        return float(item)
    if typing.get_origin(hint) is None and isinstance(item, hint) and not (hint is int and isinstance(item, bool)):
        return item
    raise ConfigError(f"{where}: expected {getattr(hint, '__name__', hint)}, found {type(item).__name__}")
