"""Which files are sent to a host: the code that a worker runs, and folders such as a base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.errors import DataError

from .paths import PROJECT

# Package: its folder in the project. What a person sees (multimac/, cli_typer.py, wizard.py) is not sent.
PACKAGES = {"distributed": "distributed", "whisper_tuner": "whisper_tuner", "exogym": "gym/exogym"}
# Here a sync removes what an earlier one has sent and this one does not: all code, also what version 0.1 sent of it.
PRUNED = (*PACKAGES.values(), "multimac", "cli_typer.py", "wizard.py", "pyproject.toml")


@dataclass(frozen=True, kw_only=True)
class SyncItem:
    """A local file and its name on the host, relative to the project folder.

    refuse_foreign: raise an error if the host has another file of that name which no sync has put there.
    """

    local: Path
    remote: str
    refuse_foreign: bool = False


def code_items(project: Path = PROJECT) -> list[SyncItem]:
    """All source files of PACKAGES."""
    found = [path for folder in PACKAGES.values() for path in sorted((project / folder).rglob("*")) if is_source(path)]
    return [SyncItem(local=path, remote=path.relative_to(project).as_posix(), refuse_foreign=True) for path in found]


def is_source(path: Path) -> bool:
    # A shell script is read on the master only.
    hidden = "__pycache__" in path.parts or path.name.startswith(".")
    return path.is_file() and not hidden and path.suffix not in {".pyc", ".part", ".sh"}


def folder_items(folder: Path, remote: str) -> list[SyncItem]:
    """Every file below `folder`, for example a base model, as `remote`/...; hidden files are left out."""
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder", remedy="Is base_model right in config.ini?")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [(path, path.relative_to(folder)) for path in paths]
    return [
        SyncItem(local=path, remote=f"{remote}/{name.as_posix()}")
        for path, name in names
        if not any(part.startswith(".") for part in name.parts)
    ]
