"""The project folder's files: which ones are missing here, and what has arrived is put at its place.

Parts in transit, and an index of hashes, lie in the folder `.sync` of the project folder. Several senders may be at
work at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from whisper_tuner.files import sync_folder, write_atomically

PRIVATE = ".sync"


def check(root: str, files: list, prune: list) -> dict:
    """Compare [name, size, sha256, keep] with what lies under `root`.

    Answers with `missing` ([position, bytes of it that arrived earlier]), `stale` (files an earlier sync put below the
    folders `prune`, that are not in the list), `foreign` (files that are in the way and that no sync put there),
    and `free` (bytes of disk).
    """
    base = Path(root).expanduser()
    private = base / PRIVATE
    missing, foreign = [], []
    with open_index(private) as index:
        for position, (name, size, digest, keep) in enumerate(files):
            path = base / name
            if current(path, name, size, index) != digest:
                if keep and path.exists() and name not in index["managed"]:
                    foreign.append(name)
                missing.append([position, part_size(private, digest, size)])
            else:
                index["managed"][name] = 1
        wanted = {entry[0] for entry in files}
        old = [name for name in index["managed"] if name not in wanted and below(name, prune)]
    return {
        "missing": missing,
        "stale": [name for name in old if (base / name).exists()],
        "foreign": foreign,
        "free": shutil.disk_usage(str(base)).free,
    }


def commit(root: str, files: list, stale: list, bundle: list, payload: bytes = b"") -> dict:
    """Move arrived parts to their names, [name, size, sha256]; remove `stale`. Answers with the `damaged` names.

    bundle: [sha256, size] of the parts in `payload`, one after the other.
    """
    base = Path(root).expanduser()
    private = base / PRIVATE
    uses, damaged, folders = {}, [], set()
    for _, _, digest in files:
        uses[digest] = uses.get(digest, 0) + 1
    with open_index(private) as index:
        unpack(private, bundle, payload)
        for name, size, digest in files:
            part = private / (digest + ".part")
            uses[digest] -= 1
            if not part.exists() or part.stat().st_size != size or sha256(part) != digest:
                damaged.append(name)
                if part.exists() and not uses[digest]:
                    part.unlink()
                continue
            place(part, base / name, last=not uses[digest])
            remember(base / name, name, digest, index)
            folders.add((base / name).parent)
        for name in stale:
            forget(base, name, index)
        for folder in filter(Path.exists, folders):
            sync_folder(folder)
    return {"damaged": damaged}


def unpack(private: Path, bundle: list, payload: bytes) -> None:
    begin = 0
    for digest, size in bundle:
        part = private / (digest + ".part")
        part.touch(mode=0o600)
        part.write_bytes(payload[begin : begin + size])
        begin += size


def place(part: Path, target: Path, last: bool) -> None:
    """Put a verified part at its name in one step; it is copied first if another name needs it too."""
    make_folder(target.parent)
    if not last:
        copy = part.with_suffix(".copy")
        shutil.copyfile(str(part), str(copy))
        part = copy
    part.chmod(0o600)
    with part.open("rb") as stream:
        os.fsync(stream.fileno())  # the index, written last, empties the drive's own cache for all of them
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


def remember(path: Path, name: str, digest: str, index: dict) -> None:
    stat = path.stat()
    index["hashes"][name] = [stat.st_size, stat.st_mtime_ns, digest]
    index["managed"][name] = 1


def part_size(private: Path, digest: str, size: int) -> int:
    part = private / (digest + ".part")
    found = part.stat().st_size if part.exists() else 0
    return found if found <= size else 0


def below(name: str, folders: list) -> bool:
    return any(name == folder or name.startswith(folder.rstrip("/") + "/") for folder in folders)


@contextlib.contextmanager
def open_index(private: Path) -> Iterator:
    """What is known of the files here, saved at the end, also of what was done before an error; other senders wait."""
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
    """A damaged index is as good as none, and so is a damaged entry."""
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
