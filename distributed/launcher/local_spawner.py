"""Workers on the launcher's own machine: its children, which end with it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distributed.hosts.paths import PROJECT
from distributed.plan.launch import Rank, environment
from distributed.plan.run_spec import CHECKPOINTS, Rendezvous
from distributed.ssh.machine import LocalMachine, LocalProcess

from .host_spawner import WORKER


class LocalSpawner:
    """A Spawner, see worker.py."""

    host = None

    def __init__(self, rank: Rank, run_dir: Path, rendezvous: Rendezvous | None, *, resume: bool):
        self.name, self.rank = rank.label, rank.spec.rank
        self._run_dir = run_dir
        self._spec = dataclasses.replace(rank.spec, rendezvous=rendezvous, resume=resume)
        self._lock = threading.Lock()
        self._process: LocalProcess | None = None

    def start(self, *, again: bool) -> LocalProcess:
        """See Spawner."""
        with self._lock:
            before = self._process
        if before:
            before.kill()
        spec = dataclasses.replace(self._spec, resume=self._spec.resume or again)
        command = [sys.executable, "-m", WORKER, spec.run_id]
        process = LocalMachine(self.name).start(command, env=environment(PROJECT), cwd=str(PROJECT))
        process.write(spec.to_json().encode() + b"\n")
        with self._lock:
            self._process = process
        return process

    def reconnect(self) -> bool:
        """See Spawner. There is no connection that could be lost."""
        with self._lock:
            return self._process is not None and self._process.poll() is None

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        """See Spawner. What is not on this machine cannot be sent to it."""
        yield len(files), list(files)

    def fetch(self, folder: str) -> None:
        """See Spawner: it is here already."""

    def drop_checkpoints(self) -> None:
        """They are as large as the weights and the optimizers, and of no use after the end."""
        with contextlib.suppress(OSError):
            shutil.rmtree(PROJECT / self._spec.run_dir / CHECKPOINTS)

    def leave(self) -> None:
        """Nothing is left here."""
