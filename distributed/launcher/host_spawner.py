"""Workers on another host, and what else the launcher does there: files, the model, the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path

from distributed.control.timeouts import Timeouts
from distributed.hosts.code import SyncItem
from distributed.hosts.sync import Progress, sync
from distributed.plan.files import load_audio, load_items
from distributed.plan.launch import Rank
from distributed.plan.launch_env import environment
from distributed.plan.run_spec import CHECKPOINTS, Rendezvous
from distributed.ssh.connection import Remote
from distributed.ssh.machine import Machine, Process
from whisper_tuner.errors import DataError, HostError, RunError
from whisper_tuner.files import atomic_folder

from .worker_link import WorkerLink

WORKER, RELAY = "distributed.worker.main", "distributed.control.relay"
GROUP_FILES, GROUP_BYTES = 64, 8 << 20  # of the audio that is compared at once: a step may wait for that
LEAVE_S = 10.0  # for the removal of what a run leaves; a host that sleeps keeps it


class Answer(Enum):
    CONNECTED = auto()
    NOBODY_THERE = auto()
    NO_ANSWER = auto()  # it is there, and frozen


class HostSpawner:
    """A Spawner, see worker.py. `start` and `reconnect` are never called at once for one host."""

    def __init__(
        self,
        rank: Rank,
        run_dir: Path,
        rendezvous: Rendezvous | None,
        *,
        resume: bool,
        timeouts: Timeouts | None = None,
    ):
        self.name, self.rank = rank.label, rank.spec.rank
        self.host, self._run_dir, self._timeouts = rank.host, run_dir, timeouts or Timeouts()
        self._spec = dataclasses.replace(rank.spec, rendezvous=rendezvous, resume=resume)
        self._lock = threading.Lock()  # holds for the two below
        self._remote: Remote | None = None
        self._link: WorkerLink | None = None

    def start(self, *, again: bool) -> WorkerLink:
        """See Spawner. A worker that is still there, frozen or cut off, is killed first."""
        remote = Remote.connect(self.host, connect_timeout=self._timeouts.connect_timeout_s if again else None)
        try:
            if again:
                self._send_what_is_gone(remote)
            spec = dataclasses.replace(self._spec, resume=self._spec.resume or again)
            link = WorkerLink(self.name)
            link.write(spec.to_json().encode() + b"\n")
            command = [remote.expand(self.host.python), "-m", WORKER, spec.run_id]
            if self._connect(link, remote, command, self._timeouts.start_s) is not Answer.CONNECTED:
                raise HostError(self.name, "its worker could not be started")
        except BaseException:
            remote.close()
            raise
        self._replace(remote, link)
        return link

    def reconnect(self) -> bool:
        """See Spawner."""
        with self._lock:
            link = self._link
        remote = Remote.connect(self.host, connect_timeout=self._timeouts.connect_timeout_s)
        try:
            answer = self._connect(link, remote, [], self._timeouts.handshake_s)
        except BaseException:
            remote.close()
            raise
        if answer is Answer.CONNECTED:
            self._replace(remote, link)
        else:
            remote.close()
        return answer is not Answer.NOBODY_THERE

    def _connect(self, link: WorkerLink, remote: Remote, command: Sequence[str], seconds: float) -> Answer:
        """Join the link to its worker through a relay, which starts the worker if there is a command.

        After so many seconds the connection is closed. Raises HostError.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            remote.close()

        too_long = threading.Timer(seconds, expire)
        too_long.start()
        try:
            if link.connect(self._start_relay(remote, command)):
                return Answer.CONNECTED
            if not expired.is_set() and not remote.is_open:
                raise HostError(self.name, "the connection was lost")
        except HostError:
            if not expired.is_set():
                raise
        finally:
            too_long.cancel()
        return Answer.NO_ANSWER if expired.is_set() else Answer.NOBODY_THERE

    def _start_relay(self, remote: Remote, command: Sequence[str]) -> Process:
        project = remote.expand(self.host.project_path)
        relay = [remote.expand(self.host.python), "-m", RELAY, self._socket]
        process = remote.start(relay, env=environment(project), cwd=project)
        process.write(json.dumps(command).encode() + b"\n")
        return process

    def _replace(self, remote: Remote, link: WorkerLink) -> None:
        with self._lock:
            before, self._remote, self._link = self._remote, remote, link
        if before:
            before.close()

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        """See Spawner; each file is usable at once."""

        def go_on(*_progress) -> None:
            if not wanted():
                raise HostError(self.name, "nobody waits for its audio any more")

        known = load_audio(self._run_dir)
        remote = Remote.connect(self.host)
        try:
            for names in _groups(files, known):
                items = [known[name] for name in names if name in known]
                unsent = _bring(remote, items, go_on)
                yield len(names), [name for name in names if name in unsent or name not in known]
        finally:
            remote.close()

    def fetch(self, folder: str) -> None:
        """See Spawner."""
        remote = self._connection()
        there = f"{remote.expand(self.host.project_path)}/{self._spec.run_dir}/{folder}"
        fetch_folder(remote, there, self._run_dir / folder)

    def drop_checkpoints(self) -> None:
        """They are as large as the weights and the optimizers, and of no use after the end."""
        run_dir = self._spec.run_dir
        self._run_there(["rm", "-rf", f"{run_dir}/{CHECKPOINTS}", f"{run_dir}/final"])
        self._run_there(["rmdir", run_dir])

    def leave(self) -> None:
        self._run_there(["rm", "-f", self._socket])  # a supervisor that was killed has not done it
        with self._lock:
            remote = self._remote
        if remote:
            remote.close()

    def _run_there(self, command: Sequence[str]) -> None:
        """In the project's folder, if the host can be reached."""
        with contextlib.suppress(HostError):
            remote = self._connection()
            remote.run(command, cwd=remote.expand(self.host.project_path), timeout=LEAVE_S)

    def _connection(self) -> Remote:
        with self._lock:
            if self._remote is None:
                raise HostError(self.name, "it was never reached")
            return self._remote

    @property
    def _socket(self) -> str:
        """Where its supervisor listens: in the project, where a worker runs."""
        return f"{self._spec.run_dir}/{CHECKPOINTS}/{self.rank}.sock"

    def _send_what_is_gone(self, remote: Remote) -> None:
        """The host's files, where they changed. Code stays as it was."""
        with contextlib.suppress(RunError):  # started with --no-sync
            audio = load_audio(self._run_dir)
            items = load_items(self._run_dir)[self.host.address]
            # A clip that is gone here need not be gone there: it keeps no host away.
            sync([remote], {self.host.address: [i for i in items if i.remote not in audio or _readable(i)]})


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


def _bring(remote: Remote, items: Sequence[SyncItem], progress: Progress) -> list[str]:
    """Returns those that cannot be read here: they do not keep the others. Raises HostError."""
    try:
        sync([remote], {remote.name: items}, progress)
    except DataError:
        if len(items) == 1:
            return [items[0].remote]
        return [name for item in items for name in _bring(remote, [item], progress)]
    return []


def _readable(item: SyncItem) -> bool:
    return os.access(item.local, os.R_OK) and item.local.is_file()


def fetch_folder(machine: Machine, there: str, here: Path) -> None:
    """The files of a folder there; `here` appears whole or not at all. Raises HostError."""
    try:
        with atomic_folder(here) as part:
            for name in machine.run(["ls", "-1", there], check=True, timeout=30).stdout.splitlines():
                machine.get(f"{there}/{name}", part / name)
    except OSError as error:
        raise HostError(machine.name, f"{there} cannot be copied to {here}: {error.strerror}") from error
