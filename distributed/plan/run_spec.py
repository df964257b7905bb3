"""What a worker is told, as JSON; nothing in it is executable.

RunSpec: one rank's part of a run. DecodeSpec: how clips are transcribed, here and by hosts that do a part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from distributed.ssh.host import Host
from exogym.strategy import STRATEGIES, StrategyConfig
from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError, RunError

from .json_fields import build_from_text, build_object, json_of

if TYPE_CHECKING:  # a host watches its stdin before it loads torch
    from torch import nn
    from transformers import WhisperProcessor

    from whisper_tuner.eval.evaluation import Transcript

PIPELINE = "pipeline"  # the strategy that gives each of two ranks a half of the model
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
    yield_when: tuple[str, ...] = ()
    resume: bool = False

    def __post_init__(self) -> None:
        if self.machine_workers < 1:
            raise ValueError(f"machine_workers = {self.machine_workers}")

    @property
    def name(self) -> str:
        return self.hosts[self.rank]

    @property
    def is_pipeline(self) -> bool:
        return self.strategy == PIPELINE

    @property
    def known_profile(self) -> Profile:
        """The profile. Raises RunError for a run of a user's own model, which has none."""
        if self.profile is None:
            again = "Call fit again with save_dir and resume=True."
            raise RunError(f"run {self.run_id} trains a model of your own", remedy=again)
        return self.profile

    def on(self, host: Host) -> RunSpec:
        """Return the spec with what the hosts file says of a host that its worker has to know."""
        return dataclasses.replace(self, interface=host.interface or "", device=host.device or "")

    @property
    def final(self) -> str:
        """The folder of the trained model below run_dir. On a host, where run_dir is relative, it has the rank's name:
        so it can never be another's, in whatever folder the host works."""
        return "final" if Path(self.run_dir).is_absolute() else f"final-{quote(self.name, safe='')}"

    @property
    def wanted_device(self) -> str | None:
        """Return the device that the hosts file, or else the profile, wants for this rank; None: the machine's best."""
        wanted = self.device or (self.profile.device if self.profile else "auto")
        return None if wanted == "auto" else wanted

    def to_json(self) -> str:
        return json_of(self)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Raises ConfigError naming the key that is missing, unknown or of the wrong type."""
        return build_from_text(cls, text, "run spec")

    @classmethod
    def read(cls, data: dict[str, Any], where: str) -> RunSpec:
        """Build it from the fields as JSON has them, see json_fields. `strategy_settings` has the strategy's class."""
        for key in () if data.get("bundle") else ("profile", "strategy_settings"):
            if data.get(key) is None:
                raise ConfigError(f"{where}: no {key!r}, and no 'bundle'")
        name = data.get("strategy", "diloco")
        if not isinstance(name, str) or name not in STRATEGIES:
            raise ConfigError(f"{where}: unknown strategy {name!r}")
        return build_object(cls, data, where, strategy_settings=STRATEGIES[name][0] | None)


BEFORE, AFTER = "before", "after"  # training: the two models of an evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Paths start at the host's project folder. A model is there before the first clips that it is to transcribe.

    after: an adapter is added to `before`. greedy: no text is decoded again.
    """

    before: str
    after: str = ""
    device: str | None = None
    language: str | None = None
    task: str | None = None
    greedy: bool = False
    batch_size: int = 8
    num_threads: int = 0

    def transcribe(
        self,
        model: nn.Module,
        processor: WhisperProcessor,
        clips: Sequence[Path],
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Transcript]:
        """Return what a loaded model writes for each audio file, in order."""
        from whisper_tuner.eval import evaluation

        return evaluation.transcribe(
            model,
            processor,
            clips,
            language=self.language,
            task=self.task,
            temperatures=evaluation.GREEDY if self.greedy else evaluation.FALLBACK,
            batch_size=self.batch_size,
            progress=progress,
        )

    def to_json(self) -> str:
        return json_of(self)

    @classmethod
    def from_json(cls, text: str) -> DecodeSpec:
        """Raises ConfigError."""
        return build_from_text(cls, text, "decode spec")
