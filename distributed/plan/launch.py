"""Launch: all that a launcher needs to know, as it stands in a run's run.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from distributed.hosts.paths import PROJECT
from distributed.ssh.host import Host
from whisper_tuner.errors import ConfigError, RunError
from whisper_tuner.files import write_atomically
from whisper_tuner.json_text import parse_json

from .json_fields import build, json_of
from .run_spec import RunSpec

UNUSABLE = "This run cannot be used any more: start a new one."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One worker to start. `host` is None on this machine; `label` stands before each of its lines."""

    label: str
    spec: RunSpec
    host: Host | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What run.json holds. `address` is this machine's own, where the ranks meet."""

    run_id: str
    name: str
    ranks: tuple[Rank, ...]
    address: str = "127.0.0.1"
    timeout_s: float = 120.0
    min_hosts: int = 1
    manifests: dict = dataclasses.field(default_factory=dict)  # kind: the user's own file
    evaluate: bool = True
    test: str | None = None
    master: Host | None = None
    created: float = 0.0
    versions: dict = dataclasses.field(default_factory=dict)

    def save(self, run_dir: Path) -> None:
        write_atomically(run_dir / "run.json", json_of(self, indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> Launch:
        """Raises RunError for a folder that holds no run, or a damaged one."""
        path = run_dir / "run.json"
        try:
            launch = build(cls, parse_json(path.read_text(encoding="utf-8")), str(path))
            if not launch.ranks:
                raise ConfigError(f"{path}: 'ranks' is empty")
            return launch
        except ConfigError as error:  # it names the place in the file
            raise RunError(str(error), remedy=UNUSABLE) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: {error}", remedy=UNUSABLE) from None

    def resume_command(self, run_dir: Path) -> str:
        command = "distributed-train" if any(rank.host for rank in self.ranks) else "finetune"
        run = self.run_id if run_dir.parent == PROJECT / "runs" else run_dir
        return f"multimac {command} --resume {run}"
