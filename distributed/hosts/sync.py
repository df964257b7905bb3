"""Brings files to the hosts by content hash: only what differs travels, resumed where it was cut off. And removes them.

Files travel one after the other to the agent's stdin, which writes each to `.sync/<sha256>.<pid>.part` in the host's
project folder. At the end the host checks the hashes and renames the files into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from distributed.ssh.connection import Remote
from distributed.ssh.machine import on_each
from whisper_tuner.errors import DataError, HostError
from whisper_tuner.files import is_below, write_atomically
from whisper_tuner.text import counted, parse_json

from .agent_call import agent_call
from .paths import MADE_BY, PROJECT, REMOTE_LISTS, REMOTE_WHEELS, STORE, SyncItem

INDEX = PROJECT / ".cache" / "sync-index.json"
MASTER = PROJECT / ".cache" / "master-id"
SPARE_BYTES = 64 << 20  # must stay free on a host's disk
BLOCK = 1 << 18
SLOWEST = 50_000  # bytes a second: over a link that is slower, a base model would take days
ATTEMPTS = 2  # the second is for a file that arrived damaged, or that changed while it was sent
AUDIO = "audio"
RUN = f"runs/{'[0-9]' * 8}-{'[0-9]' * 6}-*"
# By kind, in the order of removal: names below the project folder that only we use. The records of what was sent, by
# which a removal that broke off goes on, come last.
KINDS = {
    AUDIO: [f"{STORE}/data", f"{STORE}/bundles", f"{STORE}/cache", ".sync/*.part", ".sync/*.copy"],
    "models": [f"{STORE}/models", f"{STORE}/evaluated"],
    "runs": [f"{RUN}/checkpoints", f"{RUN}/final", f"{RUN}/final[-.]*"],
    "environment": [],  # by a mark, see the agent
    "packages": [REMOTE_WHEELS, REMOTE_LISTS],
    "code": [],  # by the record
    "records": [".selftest-*", ".multimac-mark-*", f"{STORE}/*", ".sync/*"],
}

Progress = Callable[[str, int, int | None, str], None]  # host, bytes done, bytes to send (None: unknown), file


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The work of a sync for one host. unread: names of files that could not be read here, and need not come."""

    host: str
    files: int
    bytes: int
    removed: int
    seconds: float
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """A file to send, as it was when it was hashed."""

    item: SyncItem
    size: int
    sha256: str


class Unreadable(DataError):
    """A local file that cannot be read."""


def no_progress(host: str, done: int, total: int | None, file: str) -> None:
    """Show nothing."""


def sync(
    remotes: Iterable[Remote],
    items_by_host: Mapping[str, Sequence[SyncItem]],
    progress: Progress = no_progress,
    *,
    prune: Sequence[str] = (),
    may_lack: Container[str] = (),
) -> list[SyncReport]:
    """Bring each host's items (by the host's address) to its project folder, all hosts at once.

    prune: files and folders there. What an earlier sync put at or below one of them is removed, unless it is among the
    items. may_lack: names of items that keep no other one if they cannot be read here. Raises DataError for a local
    file or name, HostError for a host; every host is finished before that. An error that `progress` raises ends the
    sync of its host.
    """
    work = [
        _HostSync(
            remote=remote,
            names={item.remote for item in items_by_host[remote.name]},
            files=hashed_files(checked(items_by_host[remote.name]), INDEX, may_lack),
            progress=progress,
            prune=list(prune),
            may_lack=may_lack,
        )
        for remote in remotes
    ]
    return on_each(work, _HostSync.run)


def this_master() -> list[str]:
    """Return the id of this checkout and the name of this machine, by which hosts know whom they work for."""
    number = str(PROJECT)  # where nothing can be written
    with contextlib.suppress(OSError):
        if not MASTER.exists():
            MASTER.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(MASTER, secrets.token_hex(16))
        number = MASTER.read_text() or number
    return [number, socket.gethostname()]


def taken(host: str, master: str, folder: str) -> HostError:
    wait = "Wait until its run has ended, or two minutes if none begins."
    is_here = master == socket.gethostname()
    here = f"another checkout on this machine, or another machine called {master},"
    who = here if is_here else f"{master}, another master,"
    what = f"{who} is working in {folder}"
    return HostError(host, what, remedy=f'{wait} Or give this host another "project_path" in the hosts file.')


def lacking(remotes: Iterable[Remote], items_by_host: Mapping[str, Sequence[SyncItem]]) -> dict[str, tuple[int, int]]:
    """Count the files and bytes that `sync` would send to each host, and change nothing. Raises as `sync` does."""
    remotes = list(remotes)
    files = {remote.name: hashed_files(checked(items_by_host[remote.name]), INDEX) for remote in remotes}

    def ask(remote: Remote) -> tuple[str, tuple[int, int]]:
        wanted = [[file.item.remote, file.size, file.sha256] for file in files[remote.name]]
        answer = agent_call(remote, "lacking", root=remote.project, files=wanted)
        parts = distinct(files[remote.name], answer["missing"])
        return remote.name, (len(parts), sum(file.size - have for file, have in parts))

    return dict(on_each(remotes, ask))


def distinct(files: Sequence[HashedFile], missing: Sequence[tuple[int, int]]) -> list[tuple[HashedFile, int]]:
    """Take each content once, the smallest first, with the bytes that arrived earlier. missing: as the host says."""
    parts = {files[position].sha256: (files[position], have) for position, have in missing}
    return sorted(parts.values(), key=lambda part: part[0].size)


def checked(items: Sequence[SyncItem]) -> Sequence[SyncItem]:
    """Refuse names that would leave the project folder, and two files of one name."""
    names: dict[str, Path] = {}
    for item in items:
        if not is_below(item.remote) or item.remote.split("/")[0] == ".sync":
            raise DataError(f"{item.remote!r} is not a name below the project folder")
        if names.setdefault(item.remote, item.local) != item.local:
            raise DataError(f"two files for {item.remote!r}: {names[item.remote]} and {item.local}")
    return items


def hashed_files(items: Iterable[SyncItem], index: Path, may_lack: Container[str] = ()) -> list[HashedFile]:
    """Hash the files, but for those of the names `may_lack` that cannot be read. Raises DataError for another one.

    index: hashes by path, size and modification time, so that a large file is not read at every sync. It is safe to
    lose: a damaged one is made anew, and where it cannot be saved, on a full disk for example, the files are hashed
    again the next time.
    """
    try:
        known = dict(parse_json(index.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    before = dict(known)
    files = []
    for item in items:
        path = item.local.resolve()
        try:
            stat = path.stat()
            match known.get(str(path)):
                case [stat.st_size, stat.st_mtime_ns, str(digest)] if re.fullmatch("[0-9a-f]{64}", digest):
                    pass
                case _:
                    with path.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    known[str(path)] = [stat.st_size, stat.st_mtime_ns, digest]
            files.append(HashedFile(item=item, size=stat.st_size, sha256=digest))
        except OSError as error:
            if item.remote not in may_lack:
                raise unreadable(item, error) from error
    if known != before:
        with contextlib.suppress(OSError):
            index.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(index, json.dumps(known), durable=False)
    return files


def unreadable(item: SyncItem, error: OSError) -> Unreadable:
    remedy = "Check its permissions, and whether it was moved."
    return Unreadable(f"{item.local}: cannot be read: {error.strerror}", remedy=remedy)


@dataclass(kw_only=True)
class _HostSync:
    """The sync of one host. names: of all that it is to have; files: those that could be read here."""

    remote: Remote
    names: set[str]
    files: list[HashedFile]
    progress: Progress
    prune: list[str]
    may_lack: Container[str]
    done: int = 0  # bytes
    total: int = 0
    sent_files: int = 0
    removed: int = 0

    def run(self) -> SyncReport:
        begin = time.monotonic()
        for _ in range(ATTEMPTS):
            damaged = self.attempt()
            if not damaged:
                break
        else:
            local = next(file.item.local for file in self.files if file.item.remote == damaged[0])
            remedy = "Is something changing the file? Start again once that has finished."
            raise HostError(self.remote.name, f"{local} arrived damaged twice", remedy=remedy)
        return SyncReport(
            host=self.remote.name,
            files=self.sent_files,
            bytes=self.done,
            removed=self.removed,
            seconds=time.monotonic() - begin,
            unread=frozenset(self.names - {file.item.remote for file in self.files}),
        )

    def attempt(self) -> list[str]:
        """Send what the host lacks, without files that need not come and turn out to be unreadable on the way."""
        while True:
            before = self.files
            try:
                return self.send(self.check())
            except Unreadable:
                if self.files is before:
                    raise

    def check(self) -> dict:
        wanted = [[file.item.remote, file.size, file.sha256, file.item.refuse_foreign] for file in self.files]
        state = agent_call(
            self.remote, "check", root=self.remote.project, files=wanted, prune=self.prune, master=this_master()
        )
        root = self.remote.project
        if state["taken"]:
            raise taken(self.remote.name, state["taken"], root)
        if state["foreign"]:
            files, names = counted(len(state["foreign"]), "file"), ", ".join(state["foreign"][:3])
            raise HostError(
                self.remote.name,
                f"{root} holds {files} that no sync put there, and that differ: {names}",
                remedy='Move that folder away, or give this host another "project_path" in the hosts file.',
            )
        return state

    def send(self, state: dict) -> list[str]:
        """Send each distinct content once, from where an earlier attempt stopped. Returns what arrived damaged."""
        if not state["missing"] and not state["stale"]:
            return []
        missing = [self.files[position] for position, _ in state["missing"]]
        parts = distinct(self.files, state["missing"])
        need, root = sum(file.size - have for file, have in parts), self.remote.project
        if need and need + SPARE_BYTES > state["free"]:  # a host that needs nothing may have a full disk
            raise HostError(
                self.remote.name,
                f"{need >> 20} MB to send, but only {state['free'] >> 20} MB are free for {root}",
                remedy='Free some space there, or set "project_path" to another disk.',
            )
        self.total = self.done + need
        answer = agent_call(
            self.remote,
            "commit",
            payload=self.contents(parts),
            sending=need / SLOWEST,
            root=root,
            files=[[file.item.remote, file.size, file.sha256] for file in missing],
            stale=state["stale"],
            parts=[[file.sha256, have, file.size - have] for file, have in parts],
        )
        self.sent_files += len(parts)
        self.removed += len(state["stale"])
        return answer["damaged"]

    def contents(self, parts: Sequence[tuple[HashedFile, int]]) -> Iterator[bytes]:
        for file, have in parts:
            self.progress(self.remote.name, self.done, self.total, file.item.remote)
            try:
                for block in blocks(file, have):
                    yield block
                    self.done += len(block)
                    self.progress(self.remote.name, self.done, self.total, file.item.remote)
            except Unreadable:
                if file.item.remote in self.may_lack:
                    self.files = [other for other in self.files if other is not file]
                raise


def blocks(file: HashedFile, start: int) -> Iterator[bytes]:
    """Read as many bytes as the file had when it was hashed. If it has changed since, the host refuses it."""
    try:
        with file.item.local.open("rb") as stream:
            stream.seek(start)
            for left in range(file.size - start, 0, -BLOCK):
                size = min(left, BLOCK)
                yield stream.read(size).ljust(size, b"\0")
    except OSError as error:
        raise unreadable(file.item, error) from error


def holdings(remote: Remote, kinds: Sequence[str], *, remove: bool = False) -> dict[str, Any]:
    """List what a host holds of these kinds, and what of others lies in the folder `root`; `remove`: remove it then.

    Raises HostError, also for a host that is at work, and for a project folder that no sync has made.
    """
    root = remote.project
    environments = {f"{root}/.venv", str(PurePosixPath(remote.python).parent.parent)}
    found = agent_call(
        remote,
        "holdings",
        root=root,
        unwanted=list(kinds) if remove else [],
        kinds=list(KINDS.items()),
        environments=sorted(environments),
        made_by=MADE_BY,
    )
    if found["checkout"]:
        what = f"{root} is a checkout of this project, this machine's own or another: it has a cli_typer.py"
        remedy = f"What a sync has put there is in {root}/{STORE}: look at it there."
        raise HostError(remote.name, what, remedy=remedy)
    if found["in_use"]:
        what = f"{found['in_use']} is in progress in {root}"
        raise HostError(remote.name, what, remedy="Wait for its end, or on its master: multimac runs stop RUN")
    held = [row for row in found["held"] if row["kind"] in kinds]
    return {"host": remote.name, "root": root, "held": held, "others": found["others"], "named": found["named"]}
