"""Brings files to the hosts by content hash: only what differs travels, resumed where it was cut off.

A file travels as `.sync/<sha256>.part` in the host's project folder. The host checks the hash and renames it into
place. Small files are sent in batches: one by one, each would cost several round trips.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from distributed.ssh.connection import Append, Remote
from whisper_tuner.errors import DataError, HostError

from .agent_call import agent_call
from .code import SyncItem
from .each import on_each
from .local_hashes import HashedFile, LocalHashes, unreadable
from .paths import PROJECT

INDEX = PROJECT / ".cache" / "sync-index.json"
SPARE_BYTES = 64 << 20  # must stay free on a host's disk
FULL_BYTES = 1 << 20  # with less than this free, a write has failed because the disk is full
SMALL_BYTES, BATCH_BYTES = 1 << 20, 2 << 20  # a file up to this size is sent with others, up to so many bytes
LOOK_S = 5.0  # a host that is being left may not answer any more
ATTEMPTS = 2  # the second is for a file that arrived damaged, or that changed while it was sent

Progress = Callable[[str, int, int, str], None]  # host, bytes done, bytes to send, file


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one host needed."""

    host: str
    files: int
    bytes: int
    removed: int
    seconds: float


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

    prune: files and folders there. What an earlier sync put at or below one of them is removed, unless it is among the
    items. Raises DataError for a local file or name, HostError for a host; every host is finished before that.
    """
    remotes = list(remotes)
    hashes = LocalHashes(INDEX)
    files = {remote.name: [hashes.file(item) for item in checked(items_by_host[remote.name])] for remote in remotes}
    hashes.save()
    return on_each(remotes, lambda remote: _HostSync(remote, files[remote.name], progress, list(prune)).run())


def drop_parts(remote: Remote, items: Iterable[SyncItem]) -> None:
    """Remove the parts of these files that an interrupted sync has left on a host. Raises HostError."""
    folder = f"{remote.expand(remote.host.project_path)}/.sync"
    listed = remote.run(["ls", "-1", folder], timeout=LOOK_S).stdout.split()
    if not (parts := {name for name in listed if name.endswith(".part")}):
        return
    hashes = LocalHashes(INDEX)
    ours = set()
    for item in items:
        with contextlib.suppress(DataError):  # a file that is gone from here was not being sent
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


def _batches(files: Iterable[HashedFile]) -> Iterator[list[HashedFile]]:
    batch: list[HashedFile] = []
    size = 0
    for file in files:
        if batch and size + file.size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


def _content(file: HashedFile) -> bytes:
    """As many bytes as it had when it was hashed. If they have changed since, the host refuses them."""
    try:
        return file.item.local.read_bytes()[: file.size].ljust(file.size, b"\0")
    except OSError as error:
        raise unreadable(file.item, error) from error


class _HostSync:
    """The sync of one host."""

    def __init__(self, remote: Remote, files: list[HashedFile], progress: Progress, prune: list[str]):
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
        if need and need + SPARE_BYTES > state["free"]:  # a host that needs nothing may have a full disk
            raise HostError(
                self.remote.name,
                f"{need >> 20} MB to send, but only {state['free'] >> 20} MB are free for {self.root}",
                remedy='Free some space there, or set "project_path" to another disk.',
            )
        self.total = self.done + need
        self.sent_files += len(parts)
        small = {digest: file for digest, (file, have) in parts.items() if have == 0 and file.size <= SMALL_BYTES}
        damaged: list[str] = []
        for batch in _batches(small.values()):
            damaged += self.send_batch(batch, missing)
        large = [part for digest, part in parts.items() if digest not in small]
        if large:
            with self.remote.appending() as append:
                for file, have in sorted(large, key=lambda part: part[0].size):
                    self.send_one(append, file, have)
        arrived = [file for file in missing if file.sha256 not in small]
        return damaged + self.commit(arrived, state["stale"]) if arrived or state["stale"] else damaged

    def send_batch(self, batch: list[HashedFile], missing: list[HashedFile]) -> list[str]:
        self.progress(self.remote.name, self.done, self.total, batch[0].item.remote)
        contents = [_content(file) for file in batch]
        parts = [[file.sha256, file.size] for file in batch]
        digests = {file.sha256 for file in batch}
        damaged = self.commit([file for file in missing if file.sha256 in digests], [], parts, contents)
        self.done += sum(file.size for file in batch)
        self.progress(self.remote.name, self.done, self.total, batch[-1].item.remote)
        return damaged

    def send_one(self, append: Append, file: HashedFile, have: int) -> None:
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
                raise unreadable(file.item, error) from error

    def explain(self, error: HostError, name: str) -> NoReturn:
        """Raise a full disk in place of `error`: SFTP only says 'Failure' of it."""
        state = agent_call(self.remote, "check", root=self.root, files=[], prune=[])
        if state["free"] > FULL_BYTES:
            raise error
        raise HostError(
            self.remote.name,
            f"the disk is full: {name} did not fit into {self.root}",
            remedy='Free some space there, or set "project_path" to another disk. The next sync goes on from here.',
        ) from error

    def commit(
        self, arrived: list[HashedFile], stale: list[str], parts: Sequence[list] = (), payload: Sequence[bytes] = ()
    ) -> list[str]:
        """Let the host rename what has arrived, and remove `stale`. Returns what arrived damaged."""
        files = [[file.item.remote, file.size, file.sha256] for file in arrived]
        request = {"root": self.root, "files": files, "stale": stale, "bundle": list(parts)}
        return agent_call(self.remote, "commit", payload=payload, **request)["damaged"]

    def file_named(self, name: str) -> HashedFile:
        return next(file for file in self.files if file.item.remote == name)
