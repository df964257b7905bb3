"""Looks at all hosts side by side before a run, and reports every problem of every host at once, in under 15 s.

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
from collections.abc import Callable, Iterator
from pathlib import Path

from distributed.hosts.code import code_items
from distributed.hosts.environment import own_pins
from distributed.hosts.paths import PROJECT
from distributed.plan.hosts_file import address_towards, check_is_this_machine
from distributed.plan.job import Job
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from distributed.ssh.machine import LocalMachine
from whisper_tuner.data.audio_check import Stopped
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.errors import ConfigError, TunerError

from .facts import Report
from .findings import Finding
from .folders import folder_problems
from .groups import Groups
from .judge import Judge
from .look import Look
from .needs import needs_of, read_own_files
from .networks import chosen, measured, told
from .session import Session

# Seconds from the beginning. Links are measured once torch's import no longer takes the hosts' CPU.
CONNECT_S = 5.0
FACTS_BY, TORCH_BY, FOLDERS_BY, LINKS_BY, GROUPS_BY = 8.0, 8.5, 9.5, 11.5, 13.5


@contextlib.contextmanager
def preflight(job: Job | None, hosts: Hosts, *, sync: bool = True, hosts_file: Path | None = None) -> Iterator[Report]:
    """Look at all hosts. job None: without what depends on a run; hosts_file: for the commands in remedies.

    Raises ConfigError if this machine lacks a package. Everything else is in the report.
    """
    running = _Preflight(job, hosts, sync, hosts_file)
    try:
        yield running.run()
    finally:
        running.close()


class _Preflight:
    def __init__(self, job: Job | None, hosts: Hosts, sync: bool, hosts_file: Path | None):
        self.job, self.hosts, self.sync = job, hosts, sync
        named = hosts_file or (job and job.distribution.hosts_config)
        self.setup = f"multimac hosts setup --hosts {named}" if named else "multimac hosts setup"
        self.begin = time.monotonic()
        self.looks = [Look(number, host) for number, host in enumerate(hosts.all)]
        self.files: tuple[list[Manifest], list[Finding]] | None = None  # None: they are not all read yet
        self.stop_reading = threading.Event()
        self.closed = False

    def run(self) -> Report:
        self.pins = own_pins()
        self.code = [[item.remote, hashlib.sha256(item.local.read_bytes()).hexdigest()] for item in code_items()]
        report = Report(hosts=[look.facts for look in self.looks])
        try:
            self._look_at_all()
            usable = [look for look in self.looks if look.facts.spaces]
            shared = folder_problems(usable, self.at(FOLDERS_BY), sync=self.sync)
            self._await_torch(TORCH_BY)
            link_problems = self._links(report)
            self._await_torch(GROUPS_BY)
            report.problems = [*self._judge(report), *shared, *link_problems]
        finally:
            self._end_agents()
        report.remotes = [look.remote for look in self.looks if look.remote]
        report.seconds = time.monotonic() - self.begin
        return report

    def close(self) -> None:
        self.closed = True
        for look in self.looks:
            look.close()

    def at(self, seconds: float) -> float:
        return self.begin + seconds

    def _look_at_all(self) -> None:
        """Give each host a thread until FACTS_BY, and one more to the master's own files."""
        defects: list[Exception] = []

        def read_files() -> None:
            with contextlib.suppress(Stopped):
                self.files = read_own_files(self.job, self.looks[0].name, self.stop_reading)

        def do(work: Callable[[], None]) -> None:
            try:
                work()
            except Exception as error:
                defects.append(error)

        work = [*(functools.partial(self._look, look) for look in self.looks), *([read_files] if self.job else [])]
        # Daemons: a name server or a disk that hangs must not hold up the end.
        threads = [threading.Thread(target=do, args=(each,), daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.at(FACTS_BY) - time.monotonic()))
        if defects:  # in a thread of its own nobody would hear of it, and the host would seem well
            raise defects[0]
        for look, thread in zip(self.looks, threads, strict=False):
            if thread.is_alive():
                look.not_done(FACTS_BY)

    def _look(self, look: Look) -> None:
        host = look.facts.host
        try:
            if look.number == 0:
                machine, python, project = LocalMachine(look.name), sys.executable, str(PROJECT)
                try:
                    check_is_this_machine(host)
                except ConfigError as error:
                    look.failed("ssh", error)
            else:
                machine = look.remote = Remote.connect(host, timeout=CONNECT_S)
                python, project = host.python, machine.expand(host.project_path)
            look.facts.reached = True
            look.step = "starting its Python"
            look.session = Session(machine, python)
        except TunerError as error:
            look.failed("ssh", error)
        else:
            self._gather(look, project)
        if self.closed:  # what was opened too late
            look.close()

    def _gather(self, look: Look, project: str) -> None:
        own_runs = self.job.profile.runs_dir if self.job else Path("runs").absolute()  # of NetworkTrainer
        look.folders = [project, f"{project}/runs" if look.number else str(own_runs)]
        # The master's run folder may be on another disk than the project.
        runs = [str(self.job.profile.runs_dir)] if self.job and not look.number else []
        device = look.facts.host.device or (self.job.profile.device if self.job else "auto")
        look.gather(
            self.at(FACTS_BY),
            names=list(self.pins.all),
            project=project,
            folders=[project, *runs],
            torch=device != "cpu" or len(self.looks) > 1,
            code=self.code if look.number else (),
        )

    def _await_torch(self, seconds: float) -> None:
        for look in self.looks:
            look.await_torch(self.at(seconds))

    def _links(self, report: Report) -> list[Finding]:
        """Find what is wrong with the links, and decide on which network the hosts train."""
        able = []
        for look in self.looks:
            facts = look.facts.facts
            # Only the Python that trains, and not one so bad that this has been said already.
            if facts and facts["training"] and "psutil" in facts["versions"] and not self.pins.unfit(facts["python"]):
                able.append(look)
        if len(able) < 2:
            return []
        try:
            usual = address_towards(self.hosts, [look.remote for look in self.looks if look.remote])
        except TunerError as error:
            self.looks[0].failed("links", error)
            return []
        networks = measured(able, usual, self.at(LINKS_BY))
        best = chosen(networks)
        best.warn_of_slow_ones()
        for number, place in best.places.items():
            facts = self.looks[number].facts
            facts.address, facts.interface = place["address"], place["interface"]
        report.pairs, report.network = list(best.pairs.values()), told(best, networks[0])
        report.meeting = best.peer if best is not networks[0] else None
        self._await_torch(LINKS_BY)
        return [*best.problems, *Groups(best, self.at(GROUPS_BY)).form()]

    def _judge(self, report: Report) -> list[Finding]:
        manifests, own = self.files or ([], [])
        master = self.looks[0]
        if self.job and self.files is None:
            master.not_read()
        needs = needs_of(self.job, len(self.looks), manifests)
        problems: list[Finding] = []
        for look, sharing in zip(self.looks, report.machine_workers, strict=True):
            judge = Judge(look.facts, master.facts, self.pins, needs, self.setup, sharing=sharing, sync=self.sync)
            problems += [*look.problems, *judge.all(), *(own if look is master else [])]
        return problems

    def _end_agents(self) -> None:
        self.stop_reading.set()
        sessions = [look.session for look in self.looks if look.session]
        for session in sessions:
            session.close()
        deadline = time.monotonic() + 1.0
        for session in sessions:
            session.ended(max(0.0, deadline - time.monotonic()))
