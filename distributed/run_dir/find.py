"""Finds runs: all of them, one by name, and the one-host run that another is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from whisper_tuner.errors import ConfigError
from whisper_tuner.paths import expanded
from whisper_tuner.settings import nearest

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
    """By id, by an unambiguous beginning of it, by path, or the newest as `last`. Raises ConfigError."""
    runs = run_dirs(folders)
    if name == "last" and runs:
        return runs[0]
    if exact := [path for path in runs if path.name == name]:
        return exact[0]
    path = expanded(name).absolute()
    if ("/" in name or not runs) and path.is_dir() and _is_run(path):
        return path
    begins = [path for path in runs if name and path.name.startswith(name)]
    if len(begins) == 1:
        return begins[0]
    names = [path.name for path in begins or runs]
    where = ", ".join(map(str, folders))
    remedy = f"Runs in {where}:\n    " + "\n    ".join(names[:SHOWN]) if names else f"There is no run in {where}."
    if len(names) > SHOWN:
        remedy += f"\n    and {len(names) - SHOWN} more: multimac runs list --all"
    if begins:
        raise ConfigError(f"{len(begins)} runs begin with {name!r}", remedy=remedy)
    raise ConfigError(f"there is no run {name!r}{nearest(name, names)}", remedy=remedy)


class OneHost:
    """How fast a single rank did the same work, in the same runs folder."""

    def __init__(self) -> None:
        self._alone: dict[Path, list[RunSummary]] = {}
        self._fastest: dict[tuple, float | None] = {}

    def speed_up(self, run: RunSummary) -> float | None:
        """clips/s of `run` over that of the fastest finished run of one rank; None if there is none to compare with."""
        if len(run.hosts) < 2 or not run.clips_per_s or not run.base_model:
            return None
        folder, key = run.path.parent, run.kind_of_work
        if (folder, key) not in self._fastest:
            alike = [read_run(other.path) for other in self._of_one_rank(folder) if other.kind_of_work == key]
            speeds = [other.clips_per_s for other in alike if other.state == FINISHED and other.clips_per_s]
            self._fastest[folder, key] = max(speeds, default=None)
        fastest = self._fastest[folder, key]
        return run.clips_per_s / fastest if fastest else None

    def _of_one_rank(self, folder: Path) -> list[RunSummary]:
        if folder not in self._alone:
            runs = (read_run(path, only_asked=True) for path in run_dirs([folder]))
            self._alone[folder] = [run for run in runs if len(run.hosts) == 1]
        return self._alone[folder]
