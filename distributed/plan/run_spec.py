"""RunSpec: one rank's part of a run as JSON. It is all that a worker is told, and nothing in it is executable."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from urllib.parse import quote

from exogym.strategy import STRATEGIES, StrategyConfig
from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json

from .json_fields import build, build_object, json_of

CHECKPOINTS = "checkpoints"  # in the run's folder on each host
# In final/ of a run of a user's own model.
RESULT, WEIGHTS = "result.json", "model.safetensors"
SPEC = ".spec.json"  # after a rank's name, in there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The launcher's address, towards which ranks listen, and the run's key in hexadecimal digits.

    By the key ranks know each other: it is in no file, log or list of processes.
    """

    address: str
    key: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A user's own model and data sets, sent as a file; unpickled only if its SHA-256 is this one."""

    path: str
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run of a user's own model has a `bundle`, in place of a profile and of a strategy with its settings.

    hosts: the names of all ranks, as the run begins. machine_workers: how many of them share this rank's machine.
    interface, device: what the hosts file says of this host, or "". shares: "fixed" where ranks share a machine,
    unless the profile says otherwise. shares_open: it does not, and other hosts may change that.
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
    shares_open: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if self.machine_workers < 1:
            raise ValueError(f"machine_workers = {self.machine_workers}")

    @property
    def name(self) -> str:
        return self.hosts[self.rank]

    @property
    def final(self) -> str:
        """The folder of the trained model below run_dir. On a host, where run_dir is relative, it has the rank's name:
        so it can never be another's, in whatever folder the host works."""
        return "final" if Path(self.run_dir).is_absolute() else f"final-{quote(self.name, safe='')}"

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

    @classmethod
    def read(cls, data: dict[str, Any], where: str) -> RunSpec:
        """From the fields as JSON has them, see json_fields. The class of `strategy_settings` goes by `strategy`."""
        for key in () if data.get("bundle") else ("profile", "strategy_settings"):
            if data.get(key) is None:
                raise ConfigError(f"{where}: no {key!r}, and no 'bundle'")
        return build_object(cls, data, where, strategy_settings=_class_of_settings(data, where) | None)


def _class_of_settings(spec: dict[str, Any], where: str) -> type[StrategyConfig]:
    name = spec.get("strategy", "diloco")
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ConfigError(f"{where}: unknown strategy {name!r}")
    return STRATEGIES[name][0]
