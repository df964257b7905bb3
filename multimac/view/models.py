"""What a user calls a model: a folder, a run by its folder, its id or `last`, or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed.run_dir.find import find_run, run_dirs
from exogym.config import nearest
from whisper_tuner.errors import ConfigError
from whisper_tuner.hub import ADAPTER_CONFIG, HUB_ID
from whisper_tuner.paths import expanded, shown

FINAL = "final"
REMEDY = "Name a run (see `multimac runs list`), a model's folder, or a hub id such as openai/whisper-small."


def model_named(name: str, runs: Callable[[], Sequence[Path]]) -> str:
    """A folder of a model, or a hub id. runs: gives the folders of runs. Raises ConfigError."""
    path = expanded(name)
    if path.is_dir():
        if any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return name
        return _final_of(path, name)
    if path.exists():
        raise ConfigError(f"{name} is a file, not a model's folder", remedy=REMEDY)
    if "/" in name:
        if re.fullmatch(HUB_ID, name) and not path.parent.is_dir():
            return name
        raise ConfigError(f"there is no folder {name}{_beside(path)}", remedy=REMEDY)
    return _final_of(find_run(name, runs()), name)


def _final_of(folder: Path, name: str) -> str:
    """Of a run's folder. Raises ConfigError if it has no model."""
    final = folder / FINAL
    if final.is_dir() and any(final.iterdir()):
        return str(shown(final.absolute()))
    if folder in run_dirs([folder.parent]):
        raise ConfigError(f"run {folder.name} has no model yet", remedy=f"See: multimac runs show {folder.name}")
    what = f"{name} is no model's folder, which has a config.json or an {ADAPTER_CONFIG}{_beside(folder / FINAL)}"
    raise ConfigError(what, remedy=REMEDY)


def _beside(path: Path) -> str:
    """`: did you mean ...?`, if a folder beside it has a similar name, or there is a model in it."""
    try:
        names = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
    except OSError:
        return ""
    return nearest(path.name, names)
