"""How a worker is started: what the launcher asks of each host, and the way on its own machine. See host_spawner.py."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol
from urllib.parse import quote

from distributed.hosts.host_process import HostProcess
from distributed.hosts.paths import PROJECT
from distributed.plan.launch import Rank
from distributed.plan.run_spec import CHECKPOINTS, SPEC, Rendezvous, RunSpec
from distributed.ssh.machine import LocalMachine, LocalProcess
from whisper_tuner.errors import HostError

WORKER = "distributed.worker.main"
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

    `start` and `reconnect` are never called at once.
    """

    name: str
    rank: int

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

    host = own_address = None

    def __init__(self, rank: Rank, rendezvous: Rendezvous | None, *, resume: bool):
        self.name, self.rank = rank.label, rank.spec.rank
        self._spec = dataclasses.replace(rank.spec, rendezvous=rendezvous, resume=resume)
        self._process: LocalProcess | None = None

    def start(self, *, again: bool) -> LocalProcess:
        if self._process:
            self._process.kill()
        spec = dataclasses.replace(self._spec, resume=self._spec.resume or again)
        worker = HostProcess(LocalMachine(self.name), WORKER, spec.run_id)
        self._process = worker.process
        with contextlib.suppress(HostError):  # it has ended already: what it said tells why
            worker.write(spec.to_json())
        return self._process

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


def drop_own(spec: RunSpec, *, finished: bool) -> list[str]:
    """The command that does what Spawner's `leave` says, from the project folder.

    Others may use that folder too: files go by the rank's own name, folders once they are empty.
    """
    script = DROP_OWN if finished else DROP_SOCKET
    return ["/bin/sh", "-c", script, spec.run_dir, quote(spec.name, safe=""), str(spec.rank)]
