"""Where things are: this project here, what of it is sent to a host, and its names below a host's project folder."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.errors import DataError

PROJECT = Path(__file__).resolve().parents[2]
STORE = ".multimac"  # below the project folder on a host: models, audio, bundles, caches
CHECKS = "checks"  # the folder of `data check`'s reports, below the store of this machine
REMOTE_LISTS, REMOTE_WHEELS = ".setup", ".wheelhouse"  # also there: what `hosts setup` sends
MADE_BY = "multimac hosts setup"  # the prompt of the environments that it makes: others are never removed
# Package: its folder in the project. What a person sees (multimac/, cli_typer.py, wizard.py) is not sent.
PACKAGES = {"distributed": "distributed", "whisper_tuner": "whisper_tuner", "exogym": "gym/exogym"}
# Here a sync removes what an earlier one has sent and this one does not: all code, also what version 0.1 sent of it.
PRUNED = (*PACKAGES.values(), "multimac", "cli_typer.py", "wizard.py", "pyproject.toml")
# With these transformers' Trainer would go on: beside a base model they are twice as large as it.
TRAINERS = re.compile(r"checkpoint-\d+|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth|training_args\.bin")


@dataclass(frozen=True, kw_only=True)
class SyncItem:
    """A local file and its name on the host, relative to the project folder.

    refuse_foreign: raise an error if the host has another file of that name which no sync has put there.
    """

    local: Path
    remote: str
    refuse_foreign: bool = False


def project_settings(project: Path = PROJECT) -> dict:
    """Read the table `project` of pyproject.toml."""
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def code_items(project: Path = PROJECT) -> list[SyncItem]:
    """List all source files of PACKAGES; a shell script is read on the master only."""
    items = []
    for path in (path for folder in PACKAGES.values() for path in sorted((project / folder).rglob("*"))):
        hidden = "__pycache__" in path.parts or path.name.startswith(".")
        if path.is_file() and not hidden and path.suffix not in {".pyc", ".part", ".sh"}:
            items.append(SyncItem(local=path, remote=path.relative_to(project).as_posix(), refuse_foreign=True))
    return items


def folder_items(folder: Path, remote: str) -> list[SyncItem]:
    """List the files below `folder`, such as a model, as `remote`/..., without hidden ones and what TRAINERS names."""
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder", remedy="Is base_model right in config.ini?")
    items = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") or TRAINERS.fullmatch(part) for part in name.parts):
            items.append(SyncItem(local=path, remote=f"{remote}/{name.as_posix()}"))
    return items
