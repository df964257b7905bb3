"""Which runs may be removed: those without a model, and checkpoints that nobody will resume from."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.errors import ConfigError, RunError

from .folder import disk_use, only_one
from .summary import FAILED, FINISHED, INTERRUPTED, RUNNING, RunSummary

UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
JUST_NOW_S = 600.0  # a run that looks as if it had been killed may be starting right now


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One folder that may be removed, and why."""

    run: RunSummary
    path: Path
    reason: str
    size: int


def age(text: str) -> float:
    """Seconds of '30m', '12h', '7d' or '2w'. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if not match:
        raise ConfigError(f"--older-than {text}: not an age", remedy="For example 12h, 7d or 2w.")
    return int(match[1]) * UNITS[match[2]]


def removals(runs: Sequence[RunSummary], *, keep: int = 0, older_than: float | None = None) -> list[Removal]:
    """`runs` are newest first; the first `keep` stay. A resumable run is removed only if `older_than` says so."""
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
    """Whole runs that the user named. Raises ConfigError for one that is running or lies elsewhere."""
    inside = {folder.resolve() for folder in folders}
    for run in runs:
        if run.state == RUNNING:
            raise ConfigError(f"{run.id} is running", remedy=f"Stop it first: multimac runs stop {run.id}")
        if run.path.is_symlink() or run.path.parent.resolve() not in inside:
            where = ", ".join(map(str, folders))
            raise ConfigError(f"{run.path} is not in {where}", remedy="Name its folder with --runs-dir.")
    reasons = {FINISHED: "named; finished, with its model"}
    return [
        Removal(run=run, path=run.path, reason=reasons.get(run.state, f"named; {run.state}"), size=run.size)
        for run in runs
    ]


def remove(removal: Removal) -> None:
    """Raises RunError if the run was resumed in the meantime, or if the folder cannot be removed."""
    with only_one(removal.run.path):
        try:
            shutil.rmtree(removal.path)
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}", remedy="Look at its permissions.") from None
