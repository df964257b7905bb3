"""The project folder: which files are missing here, and what has arrived is put at its place; whose it is, and where.

Parts in transit, and an index of hashes, lie in the folder `.sync` of the project folder. The index also has the names
that a sync manages: 1 for a file that was sent, 0 for one that was there already. Several senders may be at
work at once, with the same content too: each has its own parts, named SHA256.PID.part, and takes over what an earlier
one has left.

A folder works for one master at a time, as each sends files of its own. To see which folders are the same, each host
makes marks, empty files, and looks for those of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from whisper_tuner.files import sync, sync_folder, write_atomically

PRIVATE = ".sync"
RECORD, IN_USE = "master", "in-use"  # in there: id and name, touched when files are sent; a lock
STARTS_S = 120.0  # from the last file that is sent to the processes that work with it
MARK = ".multimac-mark-"
CHECKOUT = "cli_typer.py"  # is only where somebody has cloned the project
BLOCK = 1 << 18
WORTH_KEEPING = 1 << 20  # bytes of a part: less than that is soon sent anew
LEFT_S = 60.0  # without a change: nobody writes to it any more
PART_KEPT_S = 3 * 24 * 3600.0


def check(root: str, files: list, prune: list, master: list) -> dict:
    """Compare [name, size, sha256, keep] with what lies under `root`.

    Answers with `missing` ([position, bytes of it that arrived earlier]), `stale` (files that were sent below the
    folders `prune`, and are not in the list), `foreign` (files that are in the way and that no sync put there),
    `free` (bytes of disk), and `taken` (the name of another master than `master`, [id, name], that works here now).
    Code that is equal to a checkout's own stays the checkout's: no later sync replaces or removes it.
    """
    base = Path(root).expanduser()
    private = base / PRIVATE
    missing, foreign = [], []
    with open_index(private) as index:
        other, is_busy = other_master(private, master)
        if is_busy:
            return {"missing": [], "stale": [], "foreign": [], "free": 0, "taken": other}
        claim(private, master)
        is_checkout = (base / CHECKOUT).exists() and CHECKOUT not in index["managed"]
        drop_parts(private, "*.part", PART_KEPT_S)
        for position, (name, size, digest, keep) in enumerate(files):
            path = base / name
            if current(path, name, size, index) != digest:
                if keep and path.exists() and name not in index["managed"]:
                    foreign.append(name)
                missing.append([position, left_part(private, digest, size)[0]])
            elif not (keep and is_checkout):
                index["managed"].setdefault(name, 0)
        wanted = {entry[0] for entry in files}
        sent = [name for name, was_sent in index["managed"].items() if was_sent]
        places = [folder.rstrip("/") for folder in prune]
        pruned = [name for name in sent if any(name == place or name.startswith(place + "/") for place in places)]
    return {
        "missing": missing,
        "stale": [name for name in pruned if name not in wanted and (base / name).exists()],
        "foreign": foreign,
        "free": shutil.disk_usage(str(base)).free,
        "taken": "",
    }


def lacking(root: str, files: list) -> dict:
    """Answer with the `missing` of `check`, of [name, size, sha256]. Nothing is changed here, and no folder made."""
    base = Path(root).expanduser()
    private = base / PRIVATE
    index = load_index(private)
    differ = [
        [position, left_part(private, digest, size)[0]]
        for position, (name, size, digest) in enumerate(files)
        if current(base / name, name, size, index) != digest
    ]
    return {"missing": differ}


def commit(root: str, files: list, stale: list, parts: list) -> dict:
    """Take the parts that follow on stdin; move whole ones to their names, [name, size, sha256]; remove `stale`.

    parts: [sha256, offset, bytes to come], one after the other. Answers with the `damaged` names.
    """
    base = Path(root).expanduser()
    private = base / PRIVATE
    own = f".{os.getpid()}.part"
    make_folder(private)
    hold(base)
    all(receive(private, private / (digest + own), offset, size) for digest, offset, size in parts)
    wanted: dict = {}  # by content: the names
    damaged = []
    for name, size, digest in files:
        wanted.setdefault((digest, size), {})[name] = True  # a name may come twice
    with open_index(private) as index:
        for (digest, size), names in wanted.items():
            part, lacking = private / (digest + own), []
            if is_whole(part, digest, size):
                for count, name in enumerate(names, 1):
                    place(part, base / name, last=count == len(names))
                    stat = (base / name).stat()
                    index["hashes"][name] = [stat.st_size, stat.st_mtime_ns, digest]
                    index["managed"][name] = 1
            else:  # another sender may have brought it
                lacking = [name for name in names if current(base / name, name, size, index) != digest]
            damaged += lacking
            if not lacking:
                part.unlink(missing_ok=True)
                drop_parts(private, f"{digest}*.part", LEFT_S)
            elif part.exists() and part.stat().st_size < WORTH_KEEPING:
                part.unlink()
        for name in stale:
            forget(base, name, index)
        for folder in {(base / name).parent for name, _, _ in files}:
            sync_folder(folder, flush=False)
    with contextlib.suppress(OSError):
        os.utime(str(private / RECORD))
    return {"damaged": damaged}


def receive(private: Path, part: Path, offset: int, size: int) -> bool:
    """Write what comes from `offset` on; False if the link was cut before its end."""
    digest = part.name.split(".")[0]
    _, earlier = left_part(private, digest, offset + size)
    if offset and earlier:
        with contextlib.suppress(FileNotFoundError):  # somebody else took it: then this part comes to be damaged
            earlier.replace(part)
    part.touch(mode=0o600)
    with part.open("r+b") as target:
        target.truncate(offset)
        target.seek(offset)
        while size:
            block = sys.stdin.buffer.read(min(size, BLOCK))
            if not block:
                return False
            target.write(block)
            target.flush()
            size -= len(block)
    return True


def is_whole(part: Path, digest: str, size: int) -> bool:
    """Check a part: one that is shorter waits for the rest, one that is wrong is thrown away."""
    if not part.exists() or part.stat().st_size < size:
        return False
    if part.stat().st_size == size and sha256(part) == digest:
        return True
    part.unlink()
    return False


def place(part: Path, target: Path, *, last: bool) -> None:
    """Put a verified part at its name in one step; it is copied first if another name needs it too."""
    make_folder(target.parent)
    if not last:
        copy = part.with_suffix(".copy")
        shutil.copyfile(str(part), str(copy))
        part = copy
    part.chmod(0o600)
    sync(part, flush=False)  # the index, written last, empties the drive's own memory for all files and folders
    part.replace(target)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each readable by its owner only."""
    for path in [*reversed(folder.parents), folder]:
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def forget(base: Path, name: str, index: dict) -> None:
    path = base / name
    if path.exists():
        path.unlink()
    index["managed"].pop(name, None)
    index["hashes"].pop(name, None)
    for folder in path.parents:
        if folder == base:
            break
        shutil.rmtree(str(folder / "__pycache__"), ignore_errors=True)
        try:
            folder.rmdir()
        except OSError:
            break


def current(path: Path, name: str, size: int, index: dict) -> str | None:
    """SHA-256 of a file, from the index if its size and time are unchanged; None if it cannot be the one wanted."""
    try:
        stat = path.stat()
    except OSError:
        return None
    if stat.st_size != size or not path.is_file():
        return None
    known = index["hashes"].get(name)
    if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
        return known[2]
    digest = sha256(path)
    index["hashes"][name] = [stat.st_size, stat.st_mtime_ns, digest]
    return digest


def left_part(private: Path, digest: str, size: int) -> tuple:
    """Find what an earlier sender has left, the largest if there are several: its bytes, and itself; (0, None) if none.

    What is larger than the file is none, and nothing of a sender that is still at work.
    """
    found: list = [(0, None)]
    for part in private.glob(digest + "*.part"):
        with contextlib.suppress(FileNotFoundError):
            if not is_alive(part.name.split(".")[1]) and part.stat().st_size <= size:
                found.append((part.stat().st_size, part))
    return max(found, key=lambda each: each[0])


def is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:  # somebody else's
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True


def drop_parts(private: Path, pattern: str, seconds: float) -> None:
    """Remove what earlier processes have left so long ago, of a file that is here, or that nobody went on sending.

    One that is written to may be that of another machine, which has this folder on a network disk.
    """
    for part in private.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            if not is_alive(part.name.split(".")[1]) and time.time() - part.stat().st_mtime > seconds:
                part.unlink()


@contextlib.contextmanager
def open_index(private: Path) -> Iterator:
    """Open what is known of the files here. It is saved at the end, also after an error; other senders wait."""
    make_folder(private)
    with (private / "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a network disk may have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        index = load_index(private)
        before = json.dumps(index)
        try:
            yield index
        finally:
            if (after := json.dumps(index)) != before:
                write_atomically(private / "index.json", after)


def load_index(private: Path) -> dict:
    """Read the index: a damaged one is as good as none, and so is a damaged entry."""
    try:
        index = json.loads((private / "index.json").read_text())
        entries = index["hashes"].items()
        hashes = {name: entry for name, entry in entries if [type(part) for part in entry] == [int, int, str]}
        return {"hashes": hashes, "managed": dict(index["managed"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"hashes": {}, "managed": {}}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def other_master(private: Path, master: list) -> tuple:
    """Tell the name of another one than `master`, [id, name], whose files these are, and whether it works here now."""
    record = private / RECORD
    with contextlib.suppress(OSError, ValueError):
        number, name = record.read_text(encoding="utf-8").split("\n")
        if number != master[0]:
            return name, abs(time.time() - record.stat().st_mtime) < STARTS_S or in_use(private)
    return "", False


def in_use(private: Path) -> bool:
    with contextlib.suppress(OSError), (private / IN_USE).open("r+") as lock:  # NFS locks no file opened for reading
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def claim(private: Path, master: list) -> None:
    with contextlib.suppress(OSError):  # a host that needs nothing may have a full disk
        (private / RECORD).write_text("\n".join(master), encoding="utf-8")


def hold(project: Path) -> None:
    """Show other masters, until this process ends, that it works in the folder; only where a sync has been."""
    with contextlib.suppress(OSError):
        lock = os.open(str(project / PRIVATE / IN_USE), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)


class Folders:
    """The marks that this host has made. They go when the agent ends."""

    def __init__(self) -> None:
        self._marks: list = []

    def mark(self, folders: list, master: list) -> dict:
        """Mark each folder, or the nearest one above that exists.

        Answers with `marks` ([its name, names that lead from it to the folder]), and another master of the first folder
        (`master`), which works in it now (`busy`).
        """
        marks = []
        for folder in map(resolved, folders):
            there = next(path for path in (folder, *folder.parents) if os.path.isdir(str(path)))  # noqa: PTH112 - Path.is_dir raises for what may not be looked into
            path = there / f"{MARK}{os.urandom(8).hex()}"
            self._marks.append(path)
            with contextlib.suppress(OSError):  # who cannot write there replaces and removes nothing
                path.touch(mode=0o600)
            marks.append([path.name, list(folder.parts[len(there.parts) :])])
        other, busy = other_master(resolved(folders[0]) / PRIVATE, master)
        return {"marks": marks, "master": other, "busy": busy}

    def seen(self, folders: list, marks: list) -> dict:
        """Tell which marks are in a folder or above it, each with the names that lead from it to the folder."""
        found = []
        for folder in map(resolved, folders):
            for place in (folder, *folder.parents):
                names = list(folder.parts[len(place.parts) :])
                found += [[mark, names] for mark in marks if os.path.lexists(str(place / mark))]
        return {"seen": found}

    def remove_marks(self) -> None:
        for path in self._marks:
            with contextlib.suppress(OSError):
                path.unlink()


def resolved(folder: str) -> Path:
    return Path(folder).expanduser().resolve()
