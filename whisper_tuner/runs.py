"""A run's folder: run.json (what was asked), events.jsonl (what happened), final/ (the model)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import RunError
from .event_fields import makes_sense
from .json_text import parse_json

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
DISK_REMEDY = "Free some space, or choose another folder with runs_dir."


@contextlib.contextmanager
def new_run(runs_dir: Path, name: str, *, keep: bool = True) -> Iterator[Path]:
    """A new folder runs_dir/<date>-<time>-<name>, removed again if preparing it fails, or if it is not to be kept."""
    path, above = _create(runs_dir, name)
    try:
        yield path
    except BaseException as error:
        keep = False
        if isinstance(error, OSError) and error.errno in DISK:
            raise RunError(f"{error.filename or path}: {error.strerror}", remedy=DISK_REMEDY) from None
        raise
    finally:
        if not keep:
            shutil.rmtree(path)
            with contextlib.suppress(OSError):  # not empty: somebody else's run
                for folder in above:
                    folder.rmdir()


def _create(runs_dir: Path, name: str) -> tuple[Path, list[Path]]:
    """The new folder, and those above it that there were not."""
    stem = time.strftime("%Y%m%d-%H%M%S-") + re.sub(r"[^\w.-]+", "-", name)
    for suffix in ["", *(f"-{n}" for n in range(2, 100))]:
        path = runs_dir / (stem + suffix)
        try:
            above = [folder for folder in path.parents if not folder.exists()]
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            remedy = DISK_REMEDY if error.errno in DISK else "Choose another folder with runs_dir."
            raise RunError(f"{path}: {error.strerror}", remedy=remedy) from None
        return path, above
    raise RunError(f"{runs_dir}: no free name for {stem}")


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, also after a power cut."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_shared(path: Path, text: str) -> None:
    """The same for a file that others may read: with the mode that it has; what a link points to, not the link."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    write_atomically(path, text)
    path.chmod(mode)


class EventLog:
    """Appends one JSON object a line; every event gets a `time` (Unix seconds).

    What a full disk does not take waits for the next event: a run does not end for its log.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._end_a_cut_line(path)

    def __call__(self, event: dict) -> None:
        self._waiting += (json.dumps({"time": round(time.time(), 3), **event}) + "\n").encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in DISK:
                raise

    def close(self) -> None:
        self._file.close()

    def _end_a_cut_line(self, path: Path) -> None:
        """What a killed launcher left half written must not swallow the first event of the next."""
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                self._waiting = b"\n"


def read_events(path: Path, start: int = 0) -> tuple[list[dict], int]:
    """Whole lines from byte `start` on, and where to go on from. A half-written last line is left for the next call."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    whole = data[: data.rfind(b"\n") + 1]
    return list(_decode(whole)), start + len(whole)


def _decode(data: bytes) -> Iterator[dict]:
    for line in data.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            continue  # a line cut short by a crash
        if makes_sense(event):
            yield event


@contextlib.contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Hold run_dir/lock, which tells others that the run is going on. Raises RunError if somebody holds it."""
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
                time.sleep(0.1)  # is_running() holds it for a moment
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def is_running(run_dir: Path) -> bool:
    """Whether a launcher lives: it holds an exclusive lock on run_dir/lock until it ends, however it ends."""
    try:
        handle = os.open(run_dir / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def launcher_pid(run_dir: Path) -> int | None:
    """The process that holds the lock; None if the run is not going on."""
    try:
        pid = int((run_dir / "lock").read_text())
    except (OSError, ValueError):
        return None
    # Others are signals to groups of processes, or to all: a damaged file must not send one.
    return pid if 1 < pid < 2**31 and is_running(run_dir) else None


def disk_use(folder: Path) -> tuple[int, float]:
    """Bytes and newest change of all files below; links are counted themselves, not followed."""
    size, changed, folders = 0, folder.stat().st_mtime, [str(folder)]
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name != "lock":
                    facts = entry.stat(follow_symlinks=False)
                    size, changed = size + facts.st_size, max(changed, facts.st_mtime)
    return size, changed
