"""One rank's place in a run: how the launcher gets a worker there, and what else it does on that machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from distributed.hosts.code import SyncItem
from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import Progress, drop_parts, sync
from distributed.plan.launch import Rank
from distributed.plan.launch_env import environment
from distributed.plan.run_spec import CHECKPOINTS, Rendezvous, RunSpec
from distributed.ssh.connection import Remote
from distributed.ssh.machine import LocalMachine, Machine, Process
from whisper_tuner.errors import DataError, HostError, RunError
from whisper_tuner.files import atomic_folder

from .reattach import WorkerProcess

WORKER, RELAY = "distributed.worker.main", "distributed.control.relay"
KNOCK_S = 2.0  # for TCP to a lost host: by itself it knocks after 0, 1, 3, 7 s; with new tries, once a second
ANSWER_S = 8.0  # for a worker that is there already, with the start of a relay to it
GROUP_FILES, GROUP_BYTES = 64, 8 << 20  # of the audio that is compared at once: a step may wait for that
LEAVE_S = 10.0  # for the removal of what a run leaves; a host that sleeps keeps it
# The number of a process may long be another's when the host has been restarted.
IS_WORKER = f'case "$(ps -o args= -p "$0")" in *{WORKER}*) ;; *) exit 1;; esac'
KILL_WORKER = f'{IS_WORKER}; kill -9 "-$0"'


class HostPost:
    """A Post of the Crew, see worker.py."""

    def __init__(self, rank: Rank, run_dir: Path, rendezvous: Rendezvous | None, *, resume: bool):
        self.name, self.rank = rank.label, rank.spec.rank
        self.host, self._run_dir = rank.host, run_dir
        self._spec = dataclasses.replace(rank.spec, rendezvous=rendezvous, resume=resume)
        self._machine: Machine | None = None
        self._process: Process | None = None

    def start(self, *, again: bool, may_replace: Callable[[bool], bool] = lambda _: True) -> Process:
        """See Post in worker.py."""
        spec = dataclasses.replace(self._spec, resume=self._spec.resume or again)
        machine = self._connect(KNOCK_S if again else None)
        attached = False
        try:
            if again:
                is_there = self._is_there(machine)
                attached = is_there and self._attach(machine)
                if not may_replace(is_there):
                    raise HostError(self.name, "its worker is there, and has not answered yet")
                self._make_way(machine)
            process = self._start(machine, spec)
        except BaseException:
            if not attached:
                machine.close()
            raise
        old, self._machine, self._process = self._machine, machine, process
        if old and old is not machine:
            old.close()
        return process

    def _start(self, machine: Machine, spec: RunSpec) -> Process:
        project = self._project(machine)
        door = [self._door] if self.host else []
        command = [self._python(machine), "-m", WORKER, spec.run_id, *door]
        process = machine.start(command, env=environment(project), cwd=project)
        process.write(spec.to_json().encode() + b"\n")
        return WorkerProcess(process) if self.host else process

    def _is_there(self, machine: Machine) -> bool:
        if not self._process:
            return False
        return machine.run(["/bin/sh", "-c", IS_WORKER, str(self._process.pid)], timeout=10).returncode == 0

    def _attach(self, machine: Machine) -> bool:
        """Go on with the worker that is there, if it is, over this connection instead of the one before."""
        if not isinstance(self._process, WorkerProcess) or self._process.poll() is not None:
            return False

        def start_relay(arrived: int) -> Process:
            project = self._project(machine)
            command = [self._python(machine), "-m", RELAY, self._door, str(arrived)]
            return machine.start(command, env=environment(project), cwd=project)

        too_long = threading.Timer(ANSWER_S, machine.close)  # it may be cut off again at any moment
        too_long.start()
        try:
            attached = self._process.attach(start_relay)
        finally:
            too_long.cancel()
        if attached:
            old, self._machine = self._machine, machine
            old.close()
        return attached

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        """Bring audio of the run to the host, in this order and a few files at a time, each usable at once.

        Yields after each time how many files are done with, and which of these cannot be brought. Raises RunError, and
        HostError, also as soon as it is not `wanted` any more.
        """
        if not self.host:
            yield len(files), list(files)
            return
        from distributed.plan.files import load_audio

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
        """Copy a folder of the run's folder there to the one here. Raises HostError."""
        if not self.host:
            return
        fetch_folder(
            self._machine, f"{self._project(self._machine)}/{self._spec.run_dir}/{folder}", self._run_dir / folder
        )

    def drop_checkpoints(self) -> None:
        """They are as large as the weights and the optimizers, and of no use after the end."""
        if not self._machine:
            return
        project = self._project(self._machine)
        with contextlib.suppress(HostError):
            self._machine.run(["rm", "-rf", f"{self._spec.run_dir}/{CHECKPOINTS}"], cwd=project, timeout=LEAVE_S)
            if self.host:
                self._machine.run(["rm", "-rf", f"{self._spec.run_dir}/final"], cwd=project, timeout=LEAVE_S)
                self._machine.run(["rmdir", self._spec.run_dir], cwd=project, timeout=LEAVE_S)

    def leave(self) -> None:
        """No part stays of clips whose sending has broken off, in this process or in the one that it resumes."""
        if not self._machine:
            return
        if self.host:
            from distributed.plan.files import load_audio

            with contextlib.suppress(HostError, RunError):
                # A worker that was killed has not shut it.
                self._machine.run(["rm", "-f", self._door], cwd=self._project(self._machine), timeout=LEAVE_S)
                drop_parts(self._machine, load_audio(self._run_dir).values())
        self._machine.close()

    @property
    def _door(self) -> str:
        """Short, for the path of a Unix socket has 104 letters at most; where the worker runs, in its project."""
        return f"{self._spec.run_dir}/{CHECKPOINTS}/{self.rank}.door"

    def _connect(self, knock: float | None) -> Machine:
        return Remote.connect(self.host, connect_timeout=knock) if self.host else LocalMachine(self.name)

    def _project(self, machine: Machine) -> str:
        return machine.expand(self.host.project_path) if self.host else str(PROJECT)

    def _python(self, machine: Machine) -> str:
        return machine.expand(self.host.python) if self.host else sys.executable

    def _make_way(self, machine: Machine) -> None:
        """The worker before may still be there, frozen or cut off; and files may be gone. Code stays as it was."""
        if self._process:
            machine.run(["/bin/sh", "-c", KILL_WORKER, str(self._process.pid)], timeout=10)
        if self.host:
            from distributed.plan.files import load_audio, load_items

            with contextlib.suppress(RunError):  # started with --no-sync
                audio = load_audio(self._run_dir)
                items = load_items(self._run_dir)[self.host.address]
                # A clip that is gone here need not be gone there: it keeps no host away.
                sync([machine], {self.host.address: [i for i in items if i.remote not in audio or _readable(i)]})


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
