"""Finds runs: all of them, one by name, and how much faster they are than on one host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from exogym.config import nearest
from whisper_tuner.errors import ConfigError
from whisper_tuner.paths import expanded

from .folder import date_in
from .summary import FINISHED, RunSummary, read_run

SHOWN = 10


def run_dirs(folders: Iterable[Path]) -> list[Path]:
    """The runs in these folders, newest first; links are not followed. Raises ConfigError."""
    found = []
    for folder in folders:
        try:
            found += [path for path in folder.iterdir() if _is_run(path)]
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}", remedy="Name the runs folder with --runs-dir.") from None
    return sorted(found, key=lambda path: (date_in(path.name) or path.stat().st_mtime, path.name), reverse=True)


def _is_run(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir() or path.name.startswith("."):
        return False
    return date_in(path.name) is not None or any((path / name).exists() for name in ("run.json", "events.jsonl"))


def find_run(name: str, folders: Sequence[Path]) -> Path:
    """As `meant`, or by path. Raises ConfigError."""
    runs = run_dirs(folders)
    names = [run.name for run in runs]
    path = expanded(name).absolute()
    if name not in names and ("/" in name or not runs) and path.is_dir() and _is_run(path):
        return path
    return runs[names.index(meant(name, names, ", ".join(map(str, folders))))]


def meant(name: str, runs: Sequence[str], where: str, *, shown: int = SHOWN) -> str:
    """Of these, newest first: by id, by an unambiguous beginning of it, or the newest as `last`. Raises ConfigError.

    shown: how many an error names.
    """
    if name in runs:
        return name
    begins = runs[:1] if name == "last" else [run for run in runs if name and run.startswith(name)]
    if len(begins) == 1:
        return begins[0]
    names = list(begins or runs)
    if len(names) > shown:
        names[shown:] = [f"and {len(names) - shown} more: multimac runs list --all"]
    remedy = f"Runs in {where}:\n    " + "\n    ".join(names) if names else f"There is no run in {where}."
    if begins:
        raise ConfigError(f"{len(begins)} runs begin with {name!r}", remedy=remedy)
    raise ConfigError(f"there is no run {name!r}{nearest(name, runs)}", remedy=remedy)


def speed_ups(runs: Sequence[RunSummary]) -> list[float | None]:
    """clips/s of each run over those of the fastest finished run of one rank that did the same work in the same folder.

    None where there is nothing to compare.
    """
    keys = [(run.path.parent, run.kind_of_work) if len(run.hosts) > 1 and run.base_model else None for run in runs]
    fastest: dict[tuple | None, float] = {}
    for path in run_dirs({key[0] for key in keys if key}):
        asked = read_run(path, only_asked=True)  # first, because most runs are of other work
        key = path.parent, asked.kind_of_work
        if len(asked.hosts) == 1 and key in keys and (alone := read_run(path)).state == FINISHED:
            fastest[key] = max(fastest.get(key, 0.0), alone.clips_per_s or 0.0)
    speeds = [(run.clips_per_s, fastest.get(key)) for run, key in zip(runs, keys, strict=True)]
    return [mine / alone if mine and alone else None for mine, alone in speeds]
