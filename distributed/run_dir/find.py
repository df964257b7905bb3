"""Finds runs: all of them, one by name, how much faster they are than on one host, and which may be removed.

Of no use any more are those without a model, and checkpoints that nobody will resume from.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exogym.config import nearest
from whisper_tuner.errors import ConfigError, RunError
from whisper_tuner.files import expanded

from .folder import as_typed, date_in, disk_use, only_one
from .summary import FAILED, FINISHED, INTERRUPTED, RUNNING, RunSummary, read_run

SHOWN = 10
UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
JUST_NOW_S = 600.0  # a run that looks as if it had been killed may be starting right now


def run_dirs(folders: Iterable[Path]) -> list[Path]:
    """Return the runs in these folders, newest first; links are not followed. Raises ConfigError."""
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


def find_run(name: str, folders: Sequence[Path], *, others: Sequence[str] = (), remedy: str = "") -> Path:
    """Find a run by path, or as `meant` does. Raises ConfigError.

    others: names that may be meant, too; remedy: how to write them.
    """
    runs = run_dirs(folders)
    names = [run.name for run in runs]
    path = expanded(name).absolute()
    if name not in names and ("/" in name or not runs) and path.is_dir() and _is_run(path):
        return path
    where = ", ".join(str(folder if runs else folder.absolute()) for folder in folders)
    return runs[names.index(meant(name, names, where, others=others, remedy=remedy))]


def meant(
    name: str, runs: Sequence[str], where: str, *, shown: int = SHOWN, others: Sequence[str] = (), remedy: str = ""
) -> str:
    """Return the run that is named by its id, an unambiguous beginning of it, or `last`. Raises ConfigError.

    runs: newest first. shown: how many an error names. others, remedy: as for `find_run`.
    """
    if name in runs:
        return name
    begins = runs[:1] if name == "last" else [run for run in runs if name and run.startswith(name)]
    if len(begins) == 1:
        return begins[0]
    names = list(begins or runs)
    if len(names) > shown:
        names[shown:] = [f"and {len(names) - shown} more: multimac runs list --all"]
    known = f"Runs in {where}:\n    " + "\n    ".join(names) if names else f"There is no run in {where}."
    if begins:
        raise ConfigError(f"{len(begins)} runs begin with {name!r}", remedy=known)
    near = "" if name == "last" else nearest(name, [*runs, *others])
    what = f"there is no run {name!r}{near}"
    raise ConfigError(what, remedy=f"{remedy}\n  {known}" if remedy else known)


def speed_ups(runs: Sequence[RunSummary]) -> list[float | None]:
    """Divide each run's clips/s by those of the fastest finished run of one rank with the same work in the same folder.

    Returns None where there is nothing to compare.
    """
    keys = [(run.path.parent, run.kind_of_work) if len(run.hosts) > 1 and run.base_model else None for run in runs]
    fastest: dict[tuple | None, float] = {}
    for path in run_dirs({key[0] for key in keys if key}):
        asked = read_run(path, only_asked=True)  # first, because most runs are of other work
        key = path.parent, asked.kind_of_work
        if len(asked.hosts) == 1 and key in keys and (alone := read_run(path)).state == FINISHED:
            if len(alone.per_host) > 1:  # it was begun on several
                continue
            fastest[key] = max(fastest.get(key, 0.0), alone.clips_per_s or 0.0)
    speeds = [(run.clips_per_s, fastest.get(key)) for run, key in zip(runs, keys, strict=True)]
    return [mine / alone if mine and alone else None for mine, alone in speeds]


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One folder that may be removed, and why."""

    run: RunSummary
    path: Path
    reason: str
    size: int


def age(text: str) -> float:
    """Return the seconds of '30m', '12h', '7d' or '2w'. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if not match:
        raise ConfigError(f"--older-than {text}: not an age", remedy="For example 12h, 7d or 2w.")
    return int(match[1]) * UNITS[match[2]]


def removals(runs: Sequence[RunSummary], *, keep: int = 0, older_than: float | None = None) -> list[Removal]:
    """Find what may be removed of `runs`, which are newest first; the first `keep` stay.

    A resumable run is removed only if `older_than` says so.
    """
    found, now = [], time.time()
    for run in runs[keep:]:
        idle = now - run.changed
        wanted = run.resumable if older_than is None else idle < older_than
        may_be_starting = run.state == FAILED and idle < JUST_NOW_S
        if run.state not in (FINISHED, FAILED, INTERRUPTED) or wanted:
            continue
        if run.model:
            folder = run.path / "checkpoints"
            if run.checkpoints and not folder.is_symlink():
                which = "a finished" if run.state == FINISHED else "an old"
                reason = f"{len(run.checkpoints)} checkpoints of {which} run"
                found.append(Removal(run=run, path=folder, reason=reason, size=disk_use(folder)[0]))
        elif run.state != FINISHED and not may_be_starting:
            at = "" if run.checkpoint_step is None else f" at step {run.checkpoint_step}"
            reason = f"{run.state}, no model{f', resumable{at}' if run.resumable else ''}"
            found.append(Removal(run=run, path=run.path, reason=reason, size=run.size))
    return found


def named_removals(runs: Sequence[RunSummary], folders: Sequence[Path]) -> list[Removal]:
    """Return whole runs that the user named. Raises ConfigError for one that is running or lies elsewhere."""
    inside = {folder.resolve() for folder in folders}
    for run in runs:
        if run.state == RUNNING:
            raise ConfigError(f"{run.id} is running", remedy=f"Stop it first: multimac runs stop {as_typed(run.path)}")
        if run.path.is_symlink() or run.path.parent.resolve() not in inside:
            where = ", ".join(map(str, folders))
            raise ConfigError(f"{run.path} is not in {where}", remedy="Name its folder with --runs-dir.")
    reasons = {FINISHED: "named; finished, with its model"}
    return [
        Removal(run=run, path=run.path, reason=reasons.get(run.state, f"named; {run.state}"), size=run.size)
        for run in runs
    ]


def remove(removal: Removal) -> None:
    """Remove it. Raises RunError if the run was resumed in the meantime, or if the folder cannot be removed."""
    with only_one(removal.run.path):
        remove_folder(removal.path)


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it. Raises RunError."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        # Its filename is the last part of the path alone.
        raise RunError(f"{folder} cannot be removed: {error.strerror}", remedy="Look at its permissions.") from None
