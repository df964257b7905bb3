"""Launch: all that a launcher needs to know, as it stands in a run's run.json; and the environment of its processes."""

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


def environment(project: str | Path) -> dict[str, str]:
    """Variables of each process of a run, whose code is in the folder `project`."""
    return {
        "PYTHONPATH": f"{project}/gym:{project}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of every address without a name
        # Linux alone: tensors of 2 MB and more in large pages, which take a fourth of the time to get.
        "THP_MEM_ALLOC_ENABLE": "1",
        # Of what Metal recommends, about 70 % of a Mac's memory. Past the high one torch raises an error; its own, 1.7,
        # is more than the Mac has, and it swaps instead. Past the low one it gives back what it only caches; torch
        # refuses one above the high one ("invalid low watermark ratio"), as its own would be: 1.4 (MPSAllocator.mm).
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.0",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.9",
        # Macs alone: the GPU's driver waits longer for a command. Some Macs restart under a long load (mlx 3267).
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
