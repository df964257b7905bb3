"""Brings files to the hosts by content hash: only what differs travels, resumed where it was cut off.

It travels as `.sync/<sha256>.part` in the host's project folder; the host checks the hash and renames it into place.
Small files travel many at once: each by itself takes several answers of the host, so as many as it is away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from distributed.ssh.connection import Append, Remote
from whisper_tuner.errors import DataError, HostError
from whisper_tuner.files import write_atomically
from whisper_tuner.json_text import parse_json

from .agent_call import agent_call
from .code import SyncItem
from .each import on_each
from .paths import PROJECT

INDEX = PROJECT / ".cache" / "sync-index.json"
SPARE_BYTES = 64 << 20
FULL_BYTES = 1 << 20
SMALL_BYTES, BUNDLE_BYTES = 1 << 20, 2 << 20  # of a file, and of several that are sent at once
LOOK_S = 5.0  # for a host that may not answer any more
ATTEMPTS = 2  # a second one for a part that was damaged, or that changed while it was sent

Progress = Callable[[str, int, int, str], None]  # host, bytes done, bytes to send, file


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one host needed."""

    host: str
    files: int
    bytes: int
    removed: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _File:
    item: SyncItem
    size: int
    sha256: str


def no_progress(host: str, done: int, total: int, file: str) -> None:
    """The progress callback that shows nothing."""


def sync(
    remotes: Iterable[Remote],
    items_by_host: Mapping[str, Sequence[SyncItem]],
    progress: Progress = no_progress,
    *,
    prune: Sequence[str] = (),
) -> list[SyncReport]:
    """Bring each host's items (by the host's address) to its project folder, all hosts at once.

    prune: folders in which files of earlier syncs are removed once they are not among the items. Raises DataError for
    a local file or name, HostError for a host; every host is finished before an error is raised.
    """
    remotes = list(remotes)
    hashes = LocalHashes(INDEX)
    files = {remote.name: [hashes.file(item) for item in checked(items_by_host[remote.name])] for remote in remotes}
    hashes.save()
    return on_each(remotes, lambda remote: _HostSync(remote, files[remote.name], progress, list(prune)).run())


def drop_parts(remote: Remote, items: Iterable[SyncItem]) -> None:
    """Remove from a host what an interrupted sync has left of these files. Raises HostError."""
    folder = f"{remote.expand(remote.host.project_path)}/.sync"
    listed = remote.run(["ls", "-1", folder], timeout=LOOK_S).stdout.split()
    if not (parts := {name for name in listed if name.endswith(".part")}):
        return
    hashes = LocalHashes(INDEX)
    ours = set()
    for item in items:
        with contextlib.suppress(DataError):  # what is gone here was not being sent
            ours.add(f"{hashes.file(item).sha256}.part")
    if left := sorted(parts & ours):
        remote.run(["rm", "-f", *(f"{folder}/{name}" for name in left)], timeout=LOOK_S)


def checked(items: Sequence[SyncItem]) -> Sequence[SyncItem]:
    """Refuse names that would leave the project folder, and two files of one name."""
    names: dict[str, Path] = {}
    for item in items:
        parts = item.remote.split("/")
        if "\0" in item.remote or parts[0] in {"", ".sync"} or {"", ".", ".."} & set(parts):
            raise DataError(f"{item.remote!r} is not a name below the project folder")
        if names.setdefault(item.remote, item.local) != item.local:
            raise DataError(f"two files for {item.remote!r}: {names[item.remote]} and {item.local}")
    return items


class LocalHashes:
    """SHA-256 of local files, remembered by size and modification time."""

    def __init__(self, index: Path):
        self.index = index
        try:
            self.known: dict[str, list] = dict(parse_json(index.read_text()))
        except (OSError, ValueError, TypeError):
            self.known = {}
        self.changed = False

    def file(self, item: SyncItem) -> _File:
        path = item.local.resolve()
        try:
            stat = path.stat()
            match self.known.get(str(path)):
                case [stat.st_size, stat.st_mtime_ns, str(digest)] if re.fullmatch("[0-9a-f]{64}", digest):
                    pass
                case _:
                    with path.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    self.known[str(path)] = [stat.st_size, stat.st_mtime_ns, digest]
                    self.changed = True
        except OSError as error:
            raise _unreadable(item, error) from error
        return _File(item=item, size=stat.st_size, sha256=digest)

    def save(self) -> None:
        """A full disk here keeps no host away: then files are hashed again the next time."""
        if not self.changed:
            return
        with contextlib.suppress(OSError):
            self.index.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.index, json.dumps(self.known), durable=False)


def _unreadable(item: SyncItem, error: OSError) -> DataError:
    remedy = "Look at its permissions, or whether it was moved."
    return DataError(f"{item.local}: cannot be read: {error.strerror}", remedy=remedy)


def _bundles(files: Iterable[_File]) -> Iterator[list[_File]]:
    bundle: list[_File] = []
    size = 0
    for file in files:
        if bundle and size + file.size > BUNDLE_BYTES:
            yield bundle
            bundle, size = [], 0
        bundle.append(file)
        size += file.size
    if bundle:
        yield bundle


def _content(file: _File) -> bytes:
    """As long as it was when it was hashed; if it has changed since, the host finds that out."""
    try:
        return file.item.local.read_bytes()[: file.size].ljust(file.size, b"\0")
    except OSError as error:
        raise _unreadable(file.item, error) from error


class _HostSync:
    def __init__(self, remote: Remote, files: list[_File], progress: Progress, prune: list[str]):
        self.remote, self.files, self.progress, self.prune = remote, files, progress, prune
        self.root = remote.expand(remote.host.project_path)
        self.done = self.total = self.sent_files = 0

    def run(self) -> SyncReport:
        begin = time.monotonic()
        removed = 0
        for attempt in range(ATTEMPTS):
            state = self.check()
            if not state["missing"] and not state["stale"]:
                break
            damaged = self.send(state)
            removed += len(state["stale"])
            if damaged and attempt == ATTEMPTS - 1:
                name = self.file_named(damaged[0]).item.local
                raise HostError(
                    self.remote.name, f"{name} arrived damaged twice", remedy="Is it being changed just now?"
                )
            if not damaged:
                break
        return SyncReport(
            host=self.remote.name,
            files=self.sent_files,
            bytes=self.done,
            removed=removed,
            seconds=time.monotonic() - begin,
        )

    def check(self) -> dict:
        wanted = [[file.item.remote, file.size, file.sha256, file.item.refuse_foreign] for file in self.files]
        state = agent_call(self.remote, "check", root=self.root, files=wanted, prune=self.prune)
        if state["foreign"]:
            names = ", ".join(state["foreign"][:3])
            raise HostError(
                self.remote.name,
                f"{self.root} holds {len(state['foreign'])} files that no sync put there, and that differ: {names}",
                remedy='Move that folder away, or give this host another "project_path" in the hosts file.',
            )
        return state

    def send(self, state: dict) -> list[str]:
        """Send each distinct content once, from where an earlier attempt stopped. Returns what arrived damaged."""
        missing = [self.files[position] for position, _ in state["missing"]]
        parts = {self.files[position].sha256: (self.files[position], have) for position, have in state["missing"]}
        need = sum(file.size - have for file, have in parts.values())
        if need and need + SPARE_BYTES > state["free"]:  # a full disk keeps no host away that lacks nothing
            raise HostError(
                self.remote.name,
                f"{need >> 20} MB to send, but only {state['free'] >> 20} MB are free for {self.root}",
                remedy='Free some space there, or set "project_path" to another disk.',
            )
        self.total = self.done + need
        self.sent_files += len(parts)
        small = {digest: file for digest, (file, have) in parts.items() if have == 0 and file.size <= SMALL_BYTES}
        damaged: list[str] = []
        for bundle in _bundles(small.values()):
            damaged += self.send_bundle(bundle, missing)
        large = [part for digest, part in parts.items() if digest not in small]
        if large:
            with self.remote.appending() as append:
                for file, have in sorted(large, key=lambda part: part[0].size):
                    self.send_one(append, file, have)
        arrived = [file for file in missing if file.sha256 not in small]
        return damaged + self.commit(arrived, state["stale"]) if arrived or state["stale"] else damaged

    def send_bundle(self, bundle: list[_File], missing: list[_File]) -> list[str]:
        self.progress(self.remote.name, self.done, self.total, bundle[0].item.remote)
        contents = [_content(file) for file in bundle]
        parts = [[file.sha256, file.size] for file in bundle]
        digests = {file.sha256 for file in bundle}
        damaged = self.commit([file for file in missing if file.sha256 in digests], [], parts, contents)
        self.done += sum(file.size for file in bundle)
        self.progress(self.remote.name, self.done, self.total, bundle[-1].item.remote)
        return damaged

    def send_one(self, append: Append, file: _File, have: int) -> None:
        name = file.item.remote

        def sent(count: int) -> None:
            self.done += count
            self.progress(self.remote.name, self.done, self.total, name)

        target = str(PurePosixPath(self.root, ".sync", f"{file.sha256}.part"))
        if have < file.size:
            try:
                append(file.item.local, target, have, sent)
            except HostError as error:
                self.explain(error, name)
            except OSError as error:
                raise _unreadable(file.item, error) from error

    def explain(self, error: HostError, name: str) -> NoReturn:
        """SFTP says no more than 'Failure' when a disk is full: look, if the host still answers."""
        state = agent_call(self.remote, "check", root=self.root, files=[], prune=[])
        if state["free"] > FULL_BYTES:
            raise error
        raise HostError(
            self.remote.name,
            f"the disk is full: {name} did not fit into {self.root}",
            remedy='Free some space there, or set "project_path" to another disk. The next sync goes on from here.',
        ) from error

    def commit(
        self, arrived: list[_File], stale: list[str], bundle: Sequence[list] = (), payload: Sequence[bytes] = ()
    ) -> list[str]:
        files = [[file.item.remote, file.size, file.sha256] for file in arrived]
        request = {"root": self.root, "files": files, "stale": stale, "bundle": list(bundle)}
        return agent_call(self.remote, "commit", payload=payload, **request)["damaged"]

    def file_named(self, name: str) -> _File:
        return next(file for file in self.files if file.item.remote == name)
