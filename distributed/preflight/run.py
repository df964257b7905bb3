"""The preflight: all hosts looked at side by side, every problem of every host reported at once, in under 15 s.

    with preflight(job, hosts) as report:   # the SSH connections live as long as the context
        report.raise_if_errors()
        train_with(report.remotes)

A host that fails does not keep the others from being checked to the end. Nothing is changed on any host; the master
remembers the audio headers that it read. The agents end with their stdin, or on an alarm of their own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distributed.hosts.code import code_items
from distributed.hosts.environment import own_pins
from distributed.hosts.interfaces import route_to
from distributed.hosts.paths import PROJECT
from distributed.plan.job import Job
from distributed.plan.rendezvous import check_is_this_machine, meeting_address
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from distributed.ssh.machine import LocalMachine
from whisper_tuner.data.audio_check import Stopped
from whisper_tuner.errors import ConfigError, TunerError

from .checks import Checks
from .links import Links, Node
from .look import Look, Questions
from .needs import needs_of, read_own_files
from .report import HostFacts, Problem, Report
from .session import NotInTime, Session

# Seconds from the beginning. Links are measured once torch's import no longer takes the hosts' CPU.
CONNECT_S = 5.0
FACTS_BY, TORCH_BY, LINKS_BY = 8.0, 8.5, 13.0


def preflight(job: Job | None, hosts: Hosts, *, sync: bool = True, hosts_file: Path | None = None) -> Report:
    """Look at all hosts. job None: without what depends on a run; hosts_file: for the commands in remedies.

    Raises ConfigError if this machine lacks a package. Everything else is in the report.
    """
    return _Preflight(job, hosts, sync, hosts_file).run()


class _Preflight:
    def __init__(self, job: Job | None, hosts: Hosts, sync: bool, hosts_file: Path | None):
        self.job, self.hosts, self.sync = job, hosts, sync
        named = hosts_file or (job and job.distribution.hosts_config)
        self.setup = f"multimac hosts setup --hosts {named}" if named else "multimac hosts setup"
        self.begin = time.monotonic()
        self.looks = [Look(number, HostFacts(host=host)) for number, host in enumerate(hosts.all)]
        self.lock = threading.Lock()
        self.over = False
        self.files: tuple[list, list[Problem]] | None = None
        self.stop_reading = threading.Event()
        self.defects: list[Exception] = []

    def run(self) -> Report:
        self.pins = own_pins()
        self.code = [[item.remote, hashlib.sha256(item.local.read_bytes()).hexdigest()] for item in code_items()]
        report = Report(hosts=[look.facts for look in self.looks])
        keep = False
        try:
            self._look_at_all()
            self._await_torch(TORCH_BY)
            pairs, link_problems = self._links()
            self._await_torch(LINKS_BY, last=True)
            report.pairs = pairs
            report.problems = [*self._judge(report), *link_problems]
            keep = True
        finally:
            report.connected = self._end(keep)
        report.seconds = time.monotonic() - self.begin
        return report

    def at(self, seconds: float) -> float:
        return self.begin + seconds

    def _look_at_all(self) -> None:
        work: list[tuple[Callable[[], None], threading.Event]] = []
        for look in self.looks:
            work.append((functools.partial(self._look, look), look.done))
        if self.job:
            work.append((self._read_files, threading.Event()))
        for function, done in work:
            # Daemons: a name server or a disk that hangs must not hold up the end.
            threading.Thread(target=self._do, args=(function, done), daemon=True).start()
        for _, done in work:
            done.wait(max(0.0, self.at(FACTS_BY) - time.monotonic()))
        if self.defects:  # in a thread of its own nobody would hear of it, and the host would seem well
            raise self.defects[0]
        for look in self.looks:
            if not look.done.is_set():
                look.not_done(FACTS_BY)

    def _do(self, work: Callable[[], None], done: threading.Event) -> None:
        try:
            work()
        except Exception as error:
            self.defects.append(error)
        finally:
            done.set()

    def _read_files(self) -> None:
        with contextlib.suppress(Stopped):
            self.files = read_own_files(self.job, self.looks[0].facts.name, self.stop_reading)

    def _look(self, look: Look) -> None:
        host = look.facts.host
        try:
            if look.number == 0:
                machine, python, project = LocalMachine(look.facts.name), sys.executable, str(PROJECT)
                self._check_master(look)
            else:
                machine = Remote.connect(host, timeout=CONNECT_S)
                self._keep_or_close(look, "remote", machine)
                python, project = host.python, machine.expand(host.project_path)
            look.facts.reached = True
            look.step = "starting its Python"
            session = Session(machine, python)
            self._keep_or_close(look, "session", session)
        except TunerError as error:
            look.failed("ssh", error)
            return
        look.gather(session, self._questions(look, project), self.at(FACTS_BY))

    def _questions(self, look: Look, project: str) -> Questions:
        device = look.facts.host.device or (self.job.profile.device if self.job else "auto")
        asked = {"names": list(self.pins.all), "project": project, "device": device}
        if look.number:
            return Questions(folders=[project], code=self.code, **asked)
        # The master's run folder may be on another disk than the project.
        runs = [str(self.job.profile.runs_dir)] if self.job else []
        return Questions(folders=[project, *runs], **asked)

    def _check_master(self, look: Look) -> None:
        try:
            check_is_this_machine(look.facts.host)
        except ConfigError as error:
            look.failed("ssh", error)

    def _keep_or_close(self, look: Look, kind: str, opened: Remote | Session) -> None:
        """What was opened after the preflight had ended is closed again."""
        with self.lock:
            if not self.over:
                setattr(look, kind, opened)
                return
        opened.close()
        raise NotInTime(opened.name, "too late")

    def _await_torch(self, seconds: float, *, last: bool = False) -> None:
        for look in self.looks:
            look.await_torch(self.at(seconds), last=last)

    def _links(self) -> tuple[list, list[Problem]]:
        able = [look for look in self.looks if self._can_try_links(look.facts.facts)]
        if len(able) < 2:
            return [], []
        try:
            peer = self._meeting_address()
        except TunerError as error:
            self.looks[0].failed("links", error)
            return [], []
        nodes = [Node(number=look.number, facts=look.facts, session=look.session, peer=peer) for look in able]
        links = Links(nodes, self.at(LINKS_BY))
        return links.measure(), links.problems

    def _can_try_links(self, facts: dict) -> bool:
        """Whether it is the Python that trains, and no so bad one that this has been said already."""
        return bool(
            facts
            and facts["training"]
            and "psutil" in facts["versions"]
            and self.pins.python.contains(".".join(map(str, facts["python"])))
        )

    def _meeting_address(self) -> str:
        remotes = [look.remote for look in self.looks if look.remote]
        try:
            return meeting_address(self.hosts, remotes)
        except ConfigError:  # that this is not the master has been said; the links between the others still count
            return (remotes and remotes[0].local_address) or route_to(self.hosts.workers[0].address).address

    def _judge(self, report: Report) -> list[Problem]:
        manifests, own = self.files or ([], [])
        needs = needs_of(self.job, len(self.looks), manifests)
        problems: list[Problem] = []
        if self.job and self.files is None:
            self.looks[0].not_read()
        for look in self.looks:
            sharing = report.sharing(look.facts)
            checks = Checks(look.facts, self.looks[0].facts, self.pins, needs, self.setup, sharing)
            problems += [*look.problems, *checks.all(), *checks.code(self.sync, look.differ)]
            if look.number == 0:
                problems += own
        return problems

    def _end(self, keep: bool) -> dict[int, Remote]:
        """End the agents; the connections go on to the caller if they are to be kept."""
        self.stop_reading.set()
        with self.lock:
            self.over = True
            connected = {look.number: look.remote for look in self.looks if look.remote}
            sessions = [look.session for look in self.looks if look.session]
        for session in sessions:
            session.close()
        deadline = time.monotonic() + 1.0
        for session in sessions:
            session.ended(max(0.0, deadline - time.monotonic()))
        if keep:
            return connected
        for remote in connected.values():
            remote.close()
        return {}
