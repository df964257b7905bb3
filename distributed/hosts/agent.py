"""Runs on a host, sent there as text: needs Python >= 3.9 and nothing else. One line of JSON in, one JSON answer out.

Nothing of this project is imported here, and this module is not imported there.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

PRIVATE = ".sync"  # in the project folder: parts in transit, and the index of hashes
PYTHONS = (
    "python3.14 python3.13 python3.12 python3.11 python3",
    "/opt/homebrew/bin /usr/local/bin /usr/bin /opt/local/bin ~/.local/bin ~/.pyenv/versions/*/bin"
    " ~/.local/share/uv/python/*/bin /Library/Frameworks/Python.framework/Versions/*/bin",
)
PROBE = """
import importlib.util, json, sys, sysconfig
venv = all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip"))
print(json.dumps([list(sys.version_info[:3]), sysconfig.get_platform(), venv, sys.prefix != sys.base_prefix]))
"""


def answer(request: dict) -> dict:
    operations = {"facts": facts, "check": check, "commit": commit}
    return operations[request.pop("op")](**request)


def facts() -> dict:
    """What this host is, and which pythons it has."""
    return {
        "system": platform.system(),
        "release": platform.mac_ver()[0] or platform.release(),
        "machine": platform.machine(),
        "libc": platform.libc_ver()[1],
        "cpus": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "clock": time.time(),
        "hostname": platform.node(),
        "pythons": pythons(),
    }


def pythons() -> list:
    """Each distinct interpreter: path, version, platform, whether it can make a virtual environment."""
    found = {}
    for path in candidates():
        real = os.path.realpath(path)
        if real not in found:
            found[real] = probe(path)
    return [entry for entry in found.values() if entry]


def candidates() -> list:
    names, folders = PYTHONS
    places = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    for pattern in folders.split():
        place = Path(pattern).expanduser()
        if "*" in str(place):
            anchor, _, rest = str(place).partition("*")
            places += sorted(Path(anchor).glob("*" + rest))
        else:
            places.append(place)
    paths = [place / name for place in places for name in names.split()]
    return [str(path) for path in dict.fromkeys(paths) if os.access(str(path), os.X_OK) and not stub(path)]


def stub(path: Path) -> bool:
    """macOS ships a /usr/bin/python3 that only opens a dialogue until the command line tools are installed."""
    if platform.system() != "Darwin" or path.parent != Path("/usr/bin"):
        return False
    return subprocess.run(["xcode-select", "-p"], capture_output=True).returncode != 0


def probe(path: str) -> dict | None:
    try:
        done = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, timeout=20)
        version, tag, venv, is_venv = json.loads(done.stdout)
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return None
    return None if is_venv else {"path": path, "version": version, "platform": tag, "venv": venv}


def check(root: str, files: list, prune: list) -> dict:
    """Compare [name, size, sha256, keep] with what lies under `root`.

    Answers with `missing` ([position, bytes of it that arrived earlier]), `stale` (files an earlier sync put at or
    below `prune`, that are not in the list), `foreign` (files that are in the way and that no sync put there),
    and `free` (bytes of disk).
    """
    base = Path(root).expanduser()
    private = base / PRIVATE
    make_folder(private)
    index = load_index(private)
    missing, foreign = [], []
    for position, (name, size, digest, keep) in enumerate(files):
        path = base / name
        if current(path, name, size, index) != digest:
            if keep and path.exists() and name not in index["managed"]:
                foreign.append(name)
            missing.append([position, part_size(private, digest, size)])
        else:
            index["managed"][name] = 1
    wanted = {entry[0] for entry in files}
    stale = [name for name in index["managed"] if name not in wanted and below(name, prune) and (base / name).exists()]
    save_index(private, index)
    return {
        "missing": missing,
        "stale": stale,
        "foreign": foreign,
        "free": shutil.disk_usage(str(base)).free,
        "root": str(base),
    }


def commit(root: str, files: list, stale: list, bundle: list) -> dict:
    """Move arrived parts to their names, [name, size, sha256]; remove `stale`. Answers with the `damaged` names.

    bundle: [sha256, size] of parts that follow the request, one after the other.
    """
    base = Path(root).expanduser()
    private = base / PRIVATE
    for digest, size in bundle:
        part = private / (digest + ".part")
        part.touch(mode=0o600)
        part.write_bytes(sys.stdin.buffer.read(size))
    index = load_index(private)
    uses = {}
    for _, _, digest in files:
        uses[digest] = uses.get(digest, 0) + 1
    damaged = []
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
    for name in stale:
        forget(base, name, index)
    save_index(private, index)
    return {"damaged": damaged}


def place(part: Path, target: Path, last: bool) -> None:
    """Put a verified part at its name in one step; it is copied first if another name needs it too."""
    make_folder(target.parent)
    if not last:
        copy = part.with_suffix(".copy")
        shutil.copyfile(str(part), str(copy))
        part = copy
    part.chmod(0o600)
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(target)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each readable by its owner only."""
    for path in [*reversed(folder.parents), folder]:
        if not path.exists():
            path.mkdir(mode=0o700)


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
    if not part.exists():
        return 0
    found = part.stat().st_size
    return found if found <= size else 0


def below(name: str, folders: list) -> bool:
    return any(name == folder or name.startswith(folder.rstrip("/") + "/") for folder in folders)


def load_index(private: Path) -> dict:
    """What is known of the files here; a damaged index is as good as none, and so is a damaged entry."""
    try:
        index = json.loads((private / "index.json").read_text())
        entries = index["hashes"].items()
        hashes = {name: entry for name, entry in entries if [type(part) for part in entry] == [int, int, str]}
        return {"hashes": hashes, "managed": dict(index["managed"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"hashes": {}, "managed": {}}


def save_index(private: Path, index: dict) -> None:
    text = json.dumps(index)
    target = private / "index.json"
    if target.exists() and target.read_bytes() == text.encode():
        return
    temporary = private / "index.new"
    temporary.write_text(text)
    temporary.replace(target)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while True:
            block = stream.read(1 << 20)
            if not block:
                return digest.hexdigest()
            digest.update(block)


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    try:
        reply = {**answer(request), "python": sys.executable}
    except OSError as error:
        where = error.filename or request["root"]  # a write names no file
        reply = {"error": f"{where}: {error.strerror}", "errno": error.errno}
    sys.stdout.write(json.dumps(reply))


if __name__ == "__main__":
    main()
