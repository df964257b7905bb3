"""What of the runs may go: whole runs that left nothing of use, and checkpoints that nobody will go on from."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, RunError
from .run_summary import BROKEN, FAILED, FINISHED, INTERRUPTED, RUNNING, RunSummary
from .runs import disk_use

UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
JUST_NOW_S = 600.0  # a run without a last word may be one that is just starting


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One folder that may go, and why."""

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
    """`runs` are newest first; the first `keep` stay. What can be resumed goes only if it is older than asked for."""
    found, now = [], time.time()
    for run in runs[keep:]:
        idle = now - run.changed
        if older_than is not None and idle < older_than:
            continue
        if run.state == FINISHED and run.model and run.checkpoints:
            folder = run.path / "checkpoints"
            if not folder.is_symlink():
                reason = f"{len(run.checkpoints)} checkpoints of a finished run"
                found.append(Removal(run=run, path=folder, reason=reason, size=disk_use(folder)[0]))
        elif run.state in (FAILED, INTERRUPTED) and not run.model and idle > JUST_NOW_S * (run.state == FAILED):
            if run.resumable and older_than is None:
                continue
            at = f", resumable at step {run.checkpoint_step}" if run.checkpoint_step is not None else ", resumable"
            reason = f"{run.state}, no model{at if run.resumable else ''}"
            found.append(Removal(run=run, path=run.path, reason=reason, size=run.size))
    return found


def named_removals(runs: Sequence[RunSummary], folders: Sequence[Path]) -> list[Removal]:
    """Whole runs, as asked for by name. Raises ConfigError for one that runs, or lies elsewhere."""
    inside = {folder.resolve() for folder in folders}
    for run in runs:
        if run.state == RUNNING:
            raise ConfigError(f"{run.id} is running", remedy="Stop it first: Ctrl-C where it was started.")
        if run.path.is_symlink() or run.path.parent.resolve() not in inside:
            where = ", ".join(map(str, folders))
            raise ConfigError(f"{run.path} is not in {where}", remedy="Name its folder with --runs-dir.")
    kinds = {FINISHED: "finished, with its model", BROKEN: "broken"}
    return [
        Removal(run=run, path=run.path, reason=f"named; {kinds.get(run.state, run.state)}", size=run.size)
        for run in runs
    ]


def remove(removal: Removal) -> None:
    """Raises RunError if a launcher has taken the run up in the meantime, or the folder cannot be removed."""
    with _locked(removal.run.path):
        try:
            shutil.rmtree(removal.path)
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}", remedy="Look at its permissions.") from None


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock that a launcher would hold."""
    busy = RunError(f"{run_dir.name} is running", remedy="It was left as it is.")
    try:
        handle = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RunError(f"{run_dir / 'lock'}: {error.strerror}", remedy="Look at its permissions.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    else:
        yield
    finally:
        os.close(handle)
