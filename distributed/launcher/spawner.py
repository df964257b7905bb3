"""Workers: how one is started, here or over SSH, and how one on a host is reached while connections come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from distributed.control.messages import split_line
from distributed.control.supervisor import EXIT, WHOLE, KeptLines
from distributed.control.timeouts import Timeouts
from distributed.hosts.host_process import HostProcess
from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import sync
from distributed.plan.launch import Rank, load_audio, load_items
from distributed.plan.run_spec import CHECKPOINTS, SPEC, Rendezvous, RunSpec
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.machine import MOST_BYTES, LocalMachine, Machine, Process
from distributed.ssh.process import if_late
from whisper_tuner.errors import HostError, RunError
from whisper_tuner.files import atomic_folder, below
from whisper_tuner.text import parse_json

WORKER = "distributed.worker.main"
RELAY = "distributed.control.relay"
GROUP_FILES, GROUP_BYTES = 64, 8 << 20  # of the audio that is compared at once: a step may wait for that
MOST_FILES = 1000  # of a folder that is fetched; a model has about ten
LEAVE_S = 4.0  # for the removal of what a run leaves; a host that sleeps keeps it
# What one rank has written below a run's folder, $0. $1: its name as files have it (see Checkpoints), $2: its number.
DROP_SOCKET = f'c="$0/{CHECKPOINTS}"; rm -f "$c/$2.sock"'  # a supervisor that was killed has left it
DROP_OWN = f"""{DROP_SOCKET} "$c/$1{SPEC}" "$c/.$1{SPEC}".*
rm -f "$c"/*/"$1".json "$c"/*/"$1".json.part "$c"/*/"$1".safetensors "$c"/*/"$1".safetensors.part
rm -rf "$0/final-$1" "$0/final-$1.part" "$0/final-$1.old"
rmdir "$c"/* "$c" "$0"
"""


class WorkerProcess(Protocol):
    """A worker that runs. On another host it outlives the connections to it."""

    def write(self, data: bytes) -> None:
        """Send a line. Raises HostError if it cannot be written now."""

    def lines(self) -> Iterator[str | None]:
        """Yield what it writes, until it has ended. None: its connection is gone, and it may live."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status, below 0 or from 128 on after a signal; None if not known in `timeout` seconds."""

    def kill(self) -> None:
        """Kill it and all that it has started."""


class Spawner(Protocol):
    """How to get a worker on one host. Each method may block, and is called from a thread of its own.

    `start` and `reconnect` are never called at once. host: None on this machine.
    """

    name: str
    rank: int

    @property
    def host(self) -> Host | None: ...

    @property
    def own_address(self) -> str | None:
        """The launcher's own IPv4 address on its newest connection to the host; None if there is no plain one."""

    def start(self, *, again: bool) -> WorkerProcess:
        """Connect, end a worker that may still be there, start one, and hand over its RunSpec.

        again: in place of one that was lost, so files may have to be sent again. Raises HostError, DataError.
        """

    def reconnect(self) -> bool:
        """Reach the host over a new connection. Raises HostError if it cannot be reached.

        False if no worker is there any more. True if one is; if it answers, it is then reached over this connection.
        """

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        """Bring files of the run to the host, a few at a time, in this order and as long as they are wanted.

        Yields how many are done with each time, and which of these cannot be sent. Raises HostError, RunError.
        """

    def fetch(self, folder: str) -> None:
        """Copy the model that its worker has saved to this folder of the run's folder here. Raises HostError."""

    def leave(self, *, finished: bool) -> None:
        """Remove what the worker leaves there, after it. finished: also its checkpoints, of no use any more."""


class LocalSpawner:
    """Workers on the launcher's own machine: its children, which end with it."""

    host: Host | None = None
    own_address: str | None = None

    def __init__(self, rank: Rank, rendezvous: Rendezvous | None, *, resume: bool):
        self.name, self.rank = rank.label, rank.spec.rank
        self._spec = dataclasses.replace(rank.spec, rendezvous=rendezvous, resume=resume)
        self._process: Process | None = None

    def start(self, *, again: bool) -> Process:
        if self._process:
            self._process.kill()
        spec = dataclasses.replace(self._spec, resume=self._spec.resume or again)
        worker = HostProcess(LocalMachine(self.name), WORKER, spec.run_id)
        self._process = worker.process
        with contextlib.suppress(HostError):  # it has ended already: what it said tells why
            worker.write(spec.to_json())
        return worker.process

    def reconnect(self) -> bool:
        """Tell whether it runs: there is no connection that could be lost."""
        return self._process is not None and self._process.poll() is None

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        """Send nothing: what is not on this machine cannot be sent to it."""
        yield len(files), list(files)

    def fetch(self, folder: str) -> None:
        """Copy nothing: it is here already."""

    def leave(self, *, finished: bool) -> None:
        with contextlib.suppress(HostError):
            LocalMachine(self.name).run(drop_own(self._spec, finished=finished), cwd=str(PROJECT))


class NoAnswer(HostError):
    """A worker is there, and frozen."""


class HostSpawner:
    """Workers on a host that is reached over SSH. They outlive the connections to it."""

    def __init__(self, rank: Rank, host: Host, run_dir: Path, rendezvous: Rendezvous | None, *, resume: bool):
        self.name, self.rank = rank.label, rank.spec.rank
        self.host, self._run_dir, self._timeouts = host, run_dir, Timeouts()
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
        assert link is not None  # a worker is connected to again only after it has been started
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
        """Connect the link to its worker, through a relay, which starts the worker if there is a command.

        False if nobody is there. After so many seconds the connection is closed. Raises NoAnswer, HostError.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            remote.close()

        with if_late(seconds, expire):
            try:  # its supervisor listens at this path in the project, where a worker runs
                relay = HostProcess(remote, RELAY, f"{self._spec.run_dir}/{CHECKPOINTS}/{self.rank}.sock")
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
            group, size = [], 0
            for number, name in enumerate(files, start=1):
                group.append(name)
                with contextlib.suppress(KeyError, OSError):
                    size += known[name].local.stat().st_size
                if len(group) == GROUP_FILES or size >= GROUP_BYTES or number == len(files):
                    items = [known[name] for name in group if name in known]
                    [report] = sync([remote], {remote.name: items}, go_on, may_lack=known)
                    yield len(group), [name for name in group if name in report.unread or name not in known]
                    group, size = [], 0

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


class WorkerLink:
    """A WorkerProcess on another host, over one connection after another. `connect` makes the first one, too.

    No line is lost and none comes twice, see supervisor.py. One thread reads `lines`; any thread may call the rest.
    """

    def __init__(self, name: str):
        self.name = name
        self._changed = threading.Condition()  # holds for all that follows
        self._kept = KeptLines()
        self._relay: Process | None = None
        self._pid = 0  # the process group of the supervisor and its worker
        self._arrived = 0
        self._status: int | None = None
        self._closed = False

    def connect(self, relay: Process) -> bool:
        """Go on over this session with a relay; False if no worker is there, or it lacks lines. Raises HostError.

        May block until the relay has said its first word. The caller closes the connection before.
        """
        said, hello = [], None
        for line in relay.lines():
            if hello := _hello(line):
                break
            said.append(line)  # of a shell, or an error
        if hello is None:
            relay.kill()
            if words := "\n".join(said).strip():
                raise HostError(self.name, f"its worker cannot be reached: {words}")
            return False
        pid, first = hello
        with self._changed:
            try:
                missing = self._kept.since(first)
            except ValueError:
                relay.kill()
                return False
            self._relay, self._pid = relay, pid
            relay.write(f'{{"arrived": {self._arrived}, "first": {first}}}\n'.encode())
            for kept in missing:
                relay.write(kept)
            self._changed.notify_all()
        return True

    def write(self, data: bytes) -> None:
        """Send a line; it is kept for the next connection. Raises HostError if this one is gone."""
        with self._changed:
            self._kept.append(data)
            if self._relay:
                self._relay.write(data)

    def lines(self) -> Iterator[str | None]:
        """Yield until the worker has ended, or this end is closed. None: its connection is gone, it may live."""
        relay: Process | None = None
        while True:
            with self._changed:
                while not self._closed and self._relay is relay:
                    self._changed.wait()
                if self._closed or self._relay is None:
                    return
                relay = self._relay
            for said in relay.lines():
                if not said.endswith(WHOLE):
                    continue
                line = said.removesuffix(WHOLE).rstrip("\r")
                with self._changed:
                    if relay is not self._relay:  # it will come again, over the other connection
                        break
                    self._arrived += 1
                    event = split_line(line)[1]
                    if event and event["type"] == EXIT:
                        self._status = event["status"]
                        self._changed.notify_all()
                        return
                yield line
            with self._changed:
                is_cut_off = relay is self._relay and not self._closed
            if is_cut_off:
                yield None

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit status; None if `lines` has not seen it within `timeout` seconds, or is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._status is not None, timeout)
            return self._status

    def kill(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            relay = self._relay
            if relay and self._status is None:
                relay.pid = self._pid  # that is whom to kill over this session
        if relay:
            relay.kill()


def _hello(line: str) -> tuple[int, int] | None:
    """Read (pid, heard) of a supervisor's first word. A process group below 2 means more than one, to `kill`."""
    try:
        hello = parse_json(line)
        pid, heard = hello["pid"], hello["heard"]
    except (ValueError, TypeError, KeyError):
        return None
    return (pid, heard) if type(pid) is type(heard) is int and pid > 1 else None


def drop_own(spec: RunSpec, *, finished: bool) -> list[str]:
    """Make the command that does what Spawner's `leave` says, from the project folder.

    Others may use that folder too: files go by the rank's own name, folders once they are empty.
    """
    script = DROP_OWN if finished else DROP_SOCKET
    return ["/bin/sh", "-c", script, spec.run_dir, quote(spec.name, safe=""), str(spec.rank)]


def fetch_folder(machine: Machine, there: str, here: Path) -> None:
    """Copy the files of a folder there; `here` appears whole or not at all. Raises HostError."""
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
