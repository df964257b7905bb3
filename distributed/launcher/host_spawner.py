"""Workers on another host, and what else the launcher does there: files, the model, the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from distributed.control.timeouts import Timeouts
from distributed.hosts.code import SyncItem
from distributed.hosts.host_process import HostProcess
from distributed.hosts.sync import sync
from distributed.plan.launch import Rank, load_audio, load_items
from distributed.plan.run_spec import CHECKPOINTS, Rendezvous
from distributed.ssh.connection import Remote
from distributed.ssh.machine import MOST_BYTES, Machine
from distributed.ssh.process import if_late
from whisper_tuner.errors import HostError, RunError
from whisper_tuner.files import atomic_folder
from whisper_tuner.paths import below

from .spawner import WORKER, drop_own
from .worker_link import WorkerLink

RELAY = "distributed.control.relay"
GROUP_FILES, GROUP_BYTES = 64, 8 << 20  # of the audio that is compared at once: a step may wait for that
MOST_FILES = 1000  # of a folder that is fetched; a model has about ten
LEAVE_S = 4.0  # for the removal of what a run leaves; a host that sleeps keeps it


class NoAnswer(HostError):
    """A worker is there, and frozen."""


class HostSpawner:
    """Workers on a host that is reached over SSH. They outlive the connections to it."""

    def __init__(self, rank: Rank, run_dir: Path, rendezvous: Rendezvous | None, *, resume: bool):
        self.name, self.rank = rank.label, rank.spec.rank
        self.host, self._run_dir, self._timeouts = rank.host, run_dir, Timeouts()
        self._spec = dataclasses.replace(rank.spec, rendezvous=rendezvous, resume=resume)
        self._lock = threading.Lock()  # holds for the two below
        self._remote: Remote | None = None
        self._link: WorkerLink | None = None

    @property
    def own_address(self) -> str | None:
        remote = self._remote
        return remote.local_address if remote else None

    def start(self, *, again: bool) -> WorkerLink:
        """Do as Spawner says. A worker that is still there, frozen or cut off, is killed first."""
        link = WorkerLink(self.name)
        with contextlib.ExitStack() as on_error:
            connect_timeout = self._timeouts.connect_timeout_s if again else None
            remote = on_error.enter_context(Remote.connect(self.host, connect_timeout=connect_timeout))
            if again:  # files that have changed or are gone; code stays as it was
                with contextlib.suppress(RunError):  # started with --no-sync
                    items = load_items(self._run_dir)[self.host.address]
                    # A clip that is gone here need not be gone there: it keeps no host away.
                    sync([remote], {self.host.address: items}, may_lack=load_audio(self._run_dir))
            spec = dataclasses.replace(self._spec, resume=self._spec.resume or again)
            link.write(spec.to_json().encode() + b"\n")
            command = [remote.python, "-m", WORKER, spec.run_id]
            if not self._join(link, remote, command, self._timeouts.start_s):
                raise HostError(self.name, "its worker could not be started")
            on_error.pop_all()
        self._replace(remote, link)
        return link

    def reconnect(self) -> bool:
        with self._lock:
            link = self._link
        with contextlib.ExitStack() as unused:
            connect_timeout = self._timeouts.connect_timeout_s
            remote = unused.enter_context(Remote.connect(self.host, connect_timeout=connect_timeout))
            try:
                if not self._join(link, remote, [], self._timeouts.handshake_s):
                    return False
            except NoAnswer:
                return True
            unused.pop_all()
        self._replace(remote, link)
        return True

    def _join(self, link: WorkerLink, remote: Remote, command: Sequence[str], seconds: float) -> bool:
        """The link to its worker, through a relay, which starts the worker if there is a command.

        False if nobody is there. After so many seconds the connection is closed. Raises NoAnswer, HostError.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            remote.close()

        with if_late(seconds, expire):
            try:
                relay = HostProcess(remote, RELAY, self._socket)
                relay.write(json.dumps(command))
                is_there = link.connect(relay.process)
            except HostError:
                if not expired.is_set():
                    raise
                is_there = False
        if expired.is_set() and not is_there:
            raise NoAnswer(self.name, f"its worker does not answer within {seconds:.0f} s")
        if not is_there and not remote.is_open:
            raise HostError(self.name, "the connection was lost")
        return is_there

    def _replace(self, remote: Remote, link: WorkerLink) -> None:
        with self._lock:
            before, self._remote, self._link = self._remote, remote, link
        if before:
            before.close()

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        def go_on(*_progress) -> None:
            if not wanted():
                raise HostError(self.name, "nobody waits for its audio any more")

        known = load_audio(self._run_dir)
        with Remote.connect(self.host) as remote:
            for names in _groups(files, known):
                items = [known[name] for name in names if name in known]
                [report] = sync([remote], {remote.name: items}, go_on, may_lack=known)
                yield len(names), [name for name in names if name in report.unread or name not in known]

    def fetch(self, folder: str) -> None:
        remote = self._connection()
        fetch_folder(remote, f"{remote.project}/{self._spec.run_dir}/{self._spec.final}", self._run_dir / folder)

    def leave(self, *, finished: bool) -> None:
        with contextlib.suppress(HostError, RunError), self._connection() as remote, if_late(LEAVE_S, remote.close):
            remote.run(drop_own(self._spec, finished=finished), cwd=remote.project)

    def _connection(self) -> Remote:
        with self._lock:
            if self._remote is None:
                raise HostError(self.name, "it was never reached")
            return self._remote

    @property
    def _socket(self) -> str:
        """The path at which its supervisor listens: in the project, where a worker runs."""
        return f"{self._spec.run_dir}/{CHECKPOINTS}/{self.rank}.sock"


def _groups(files: Sequence[str], known: Mapping[str, SyncItem]) -> Iterator[list[str]]:
    group, size = [], 0
    for name in files:
        group.append(name)
        with contextlib.suppress(KeyError, OSError):
            size += known[name].local.stat().st_size
        if len(group) == GROUP_FILES or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def fetch_folder(machine: Machine, there: str, here: Path) -> None:
    """The files of a folder there; `here` appears whole or not at all. Raises HostError."""
    left = MOST_BYTES
    try:
        with atomic_folder(here) as part:
            names = machine.run(["ls", "-1", there], check=True, timeout=30).stdout.splitlines()
            if len(names) > MOST_FILES:
                raise ValueError(f"it holds {len(names):,} files, more than {MOST_FILES:,}")
            for name in names:
                file = below(part, name)
                machine.get(f"{there}/{name}", file, most=left)
                left -= file.stat().st_size
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HostError(machine.name, f"{there} cannot be copied to {here}: {reason}") from error
