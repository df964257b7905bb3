"""A run's folder: run.json (what was asked), events.jsonl (what happened), final/ (the model)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from whisper_tuner.errors import RunError
from whisper_tuner.files import DISK

STAMP = "%Y%m%d-%H%M%S"  # how the name of a run begins


@contextlib.contextmanager
def new_run(runs_dir: Path, name: str, *, keep: bool = True) -> Iterator[Path]:
    """Make a folder runs_dir/<date>-<time>-<name>; it is removed if preparing it fails.

    One that is not to be kept is no run, so it is made elsewhere, and removed in any case.
    """
    if not keep:
        with tempfile.TemporaryDirectory(prefix="multimac-") as scratch:
            yield _create(Path(scratch), name)
        return
    runs_dir = runs_dir.absolute()
    folders = (runs_dir, *runs_dir.parents)
    there = next(folder for folder in folders if os.path.exists(folder))  # noqa: PTH110 - Path.exists raises for a long name
    path = _create(runs_dir, name)
    try:
        yield path
    except BaseException as error:
        shutil.rmtree(path)
        with contextlib.suppress(OSError):  # of the folders that were made for it, those that nobody else uses
            for folder in folders[: folders.index(there)]:
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in DISK:
            raise RunError(f"{error.filename or path}: {error.strerror}", remedy=_remedy(error)) from None
        raise


def _remedy(error: OSError) -> str:
    is_full = error.errno in DISK - {errno.EROFS}
    return "Free some space, or choose another folder with runs_dir." if is_full else "Set runs_dir to another folder."


def as_typed(run_dir: Path) -> str:
    """Return how a command names a run: by its path where a command would not look by itself."""
    path = run_dir.absolute()
    return path.name if path.parent == Path.cwd() / "runs" else str(path)


def as_file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def runs_named(runs_dir: Path, name: str) -> list[Path]:
    """Return the folders that were made for runs of this name, the oldest first."""
    ending = f"-{as_file_name(name)}"
    begun = (path.parent for path in runs_dir.glob("*/run.json"))
    return sorted(path for path in begun if path.name[15:] == ending and date_in(path.name))


def _create(runs_dir: Path, name: str) -> Path:
    stem = time.strftime(f"{STAMP}-") + as_file_name(name)
    for suffix in ["", *(f"-{n}" for n in range(2, 100))]:  # of runs that begin in the same second
        path = runs_dir / (stem + suffix)
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}", remedy=_remedy(error)) from None
        return path
    raise RunError(f"{runs_dir}: no free name for {stem}")


def date_in(name: str) -> float | None:
    """Return when a run of this name was made."""
    try:
        return time.mktime(time.strptime(name[:15], STAMP))
    except (ValueError, OverflowError):
        return None


@contextlib.contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Hold run_dir/lock, which tells others that the run is running. Raises RunError if another process holds it."""
    try:
        handle = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RunError(f"{run_dir / 'lock'}: {error.strerror}", remedy="Look at its permissions.") from None
    try:
        for attempt in range(10, -1, -1):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not attempt:
                    raise RunError(f"{run_dir.name} is running", remedy="It was left as it is.") from None
                time.sleep(0.1)  # is_running() of another process holds it for a moment
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def is_running(run_dir: Path) -> bool:
    """Tell whether the launcher is alive: it holds an exclusive lock on run_dir/lock until its process ends."""
    try:
        handle = os.open(run_dir / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


def launcher_pid(run_dir: Path) -> int | None:
    """Return the process that holds the lock; None if it is not running."""
    try:
        pid = int((run_dir / "lock").read_text())
    except (OSError, ValueError):
        return None
    # To kill(), other numbers mean a group of processes, or all: a damaged file must not lead to that.
    return pid if 1 < pid < 2**31 and is_running(run_dir) else None


def disk_use(folder: Path) -> tuple[int, float]:
    """Return the bytes of all files below, and when the newest changed; links are not followed."""
    size, changed = 0, folder.stat().st_mtime
    for place, folders, files in os.walk(folder):  # a running run removes folders; those are left out
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                facts = Path(place, name).lstat()
                if name != "lock" and not stat.S_ISDIR(facts.st_mode):
                    size, changed = size + facts.st_size, max(changed, facts.st_mtime)
    return size, changed
