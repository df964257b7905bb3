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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import normalize

from distributed.hosts.environment import own_pins
from distributed.hosts.paths import PROJECT, code_items
from distributed.hosts.sync import taken, this_master
from distributed.plan.automatic import Measured
from distributed.plan.hosts_file import address_towards, check_is_this_machine
from distributed.plan.job import Job
from distributed.ssh.connection import Remote
from distributed.ssh.host import PROJECT_PATH, Host, Hosts
from distributed.ssh.machine import LocalMachine, Machine
from whisper_tuner.data.audio_check import Stopped
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.errors import ConfigError, DataError, HostError, TunerError
from whisper_tuner.model.memory import FROZEN
from whisper_tuner.text import counted

from .findings import Finding, Severity
from .judge import Judge, needs_of, read_own_files
from .links import Pair, chosen, form_groups, measured, told
from .look import BUSY, HostFacts, Look, Session, ask_all

# Seconds from the beginning. Links are measured once torch's import no longer takes the hosts' CPU.
CONNECT_S = 5.0
FACTS_BY, TORCH_BY, FOLDERS_BY, LINKS_BY, GROUPS_BY = 8.0, 8.5, 9.5, 11.5, 13.5
LOOK_S = 20.0  # for folders alone
SHARED = "these folders are the same, or one is in another: each host would replace and remove what the others have"
OWN_FOLDERS = (
    "If two are one machine, name it once. Else give each worker its own folder by one line at the top of the hosts"
    f' file, and no other project_path below it: "project_path": "{PROJECT_PATH}-{{host}}". Then: multimac hosts setup'
)


@dataclass(kw_only=True)
class Report:
    """remotes: connections to the workers in the order of the hosts file; those to all of them if there is no error.

    pairs: on the network that training would use. Where that is not the usual one, `network` tells the user so in a
    line, and `meeting` is this machine's address in it.
    """

    hosts: list[HostFacts]
    pairs: list[Pair] = field(default_factory=list)
    network: str = ""
    meeting: str | None = None
    problems: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    remotes: list[Remote] = field(default_factory=list, repr=False)

    @property
    def errors(self) -> list[Finding]:
        return [problem for problem in self.problems if problem.is_error]

    @property
    def warnings(self) -> list[Finding]:
        return [problem for problem in self.problems if problem.severity is Severity.WARNING]

    def raise_if_errors(self) -> None:
        """Raise one error that holds all problems but the warnings; its kind is theirs if they are of one."""
        errors = self.errors
        if not errors:
            return
        text = "\n".join(map(str, errors))
        for kind in (ConfigError, DataError):
            if all(problem.status == kind.exit_status for problem in errors):
                raise kind(text)
        one = errors[0]
        if len(errors) == 1 and len(one.hosts) == 1:
            raise HostError(one.host, one.what, remedy=one.remedy)
        names = ", ".join(unique(name for problem in errors for name in problem.hosts))
        count = counted(len(errors), "problem")
        raise HostError(names, f"{count}:\n{text}")

    @property
    def machine_workers(self) -> tuple[int, ...]:
        """Count for each host the workers on its machine: hosts of the file may be one, as far as that is known."""
        machines = [facts.facts.get("memory", {}).get("machine", "") for facts in self.hosts]
        return tuple(machines.count(machine) if machine else 1 for machine in machines)

    @property
    def measured(self) -> Measured:
        """Return what limits a run: the slowest link, and the host with the least memory."""
        rates = [pair.mbit for pair in self.pairs if pair.mbit]
        spare = [facts.spare_memory for facts in self.hosts if facts.spare_memory is not None]
        return Measured(bytes_s=min(rates) * 125_000 if rates else None, spare_bytes=min(spare, default=None))

    def settled(self, job: Job) -> Job:
        """Return the job with what is frozen as small as the host needs it that has least memory."""
        kinds = [facts.way.frozen_precision for facts in self.hosts if facts.way]
        return job.with_profile(frozen_precision=max(kinds, key=[*FROZEN].index)) if kinds else job

    def summary(self) -> str:
        """Sum up in one line, for a run that goes on."""
        text = f"{counted(len(self.hosts), 'host')} checked in {self.seconds:.1f} s"
        slowest = min((pair for pair in self.pairs if pair.mbit), key=lambda pair: pair.mbit or 0.0, default=None)
        if slowest:
            speed = f"{slowest.mbit:.0f} Mbit/s, {(slowest.latency_s or 0.0) * 1000:.1f} ms"
            text += f"; slowest link {slowest.source} -> {slowest.target}: {speed}"
        return text


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def preflight(
    job: Job | None, hosts: Hosts, *, sync: bool = True, hosts_file: Path | None = None, setup: str = ""
) -> Iterator[Report]:
    """Look at all hosts. job None: without what depends on a run.

    hosts_file: for the commands in remedies. setup: what to do for an environment, where it is not `hosts setup`.

    Raises ConfigError if this machine lacks a package. Everything else is in the report.
    """
    running = _Preflight(job, hosts, sync, hosts_file, setup)
    try:
        yield running.run()
    finally:
        running.closed = True
        for look in running.looks:
            look.close()


class _Preflight:
    def __init__(self, job: Job | None, hosts: Hosts, sync: bool, hosts_file: Path | None, setup: str):
        self.job, self.hosts, self.sync = job, hosts, sync
        named = hosts_file or (job and job.distribution.hosts_config)
        self.setup = setup or "Run: multimac hosts setup" + (f" --hosts {named}" if named else "")
        self.begin = time.monotonic()
        self.looks = [Look(number, host) for number, host in enumerate(hosts.all)]
        self.files: tuple[list[Manifest], list[Finding]] | None = None  # None: they are not all read yet
        self.stop_reading = threading.Event()
        self.closed = False
        self.pins = own_pins()
        self.code = [[item.remote, hashlib.sha256(item.local.read_bytes()).hexdigest()] for item in code_items()]

    def run(self) -> Report:
        report = Report(hosts=[look.facts for look in self.looks])
        try:
            self._look_at_all()
            usable = [look for look in self.looks if look.facts.spaces]
            shared = folder_problems(usable, self.begin + FOLDERS_BY, sync=self.sync)
            self._await_torch(TORCH_BY)
            link_problems = self._links(report)
            self._await_torch(GROUPS_BY)
            report.problems = [*self._judge(report), *shared, *link_problems]
        finally:
            self.stop_reading.set()
            sessions = [look.session for look in self.looks if look.session]
            for session in sessions:
                session.close()
            deadline = time.monotonic() + 1.0
            for session in sessions:
                session.ended(max(0.0, deadline - time.monotonic()))
        report.remotes = [look.remote for look in self.looks if look.remote]
        report.seconds = time.monotonic() - self.begin
        return report

    def _look_at_all(self) -> None:
        """Give each host a thread until FACTS_BY, and one more to the master's own files."""
        defects: list[Exception] = []
        work: list[Callable[[], None]] = [functools.partial(self._look, look) for look in self.looks]
        if job := self.job:

            def read_files() -> None:
                with contextlib.suppress(Stopped):
                    self.files = read_own_files(job, self.looks[0].name, self.stop_reading)

            work.append(read_files)

        def do(work: Callable[[], None]) -> None:
            try:
                work()
            except Exception as error:
                defects.append(error)

        # Daemons: a name server or a disk that hangs must not hold up the end.
        threads = [threading.Thread(target=do, args=(each,), daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.begin + FACTS_BY - time.monotonic()))
        if defects:  # in a thread of its own nobody would hear of it, and the host would seem well
            raise defects[0]
        for look, thread in zip(self.looks, threads, strict=False):
            if thread.is_alive():
                check = "ssh" if look.session is None else "python"
                what = f"not finished after {FACTS_BY:.0f} s: {look.step}"
                late = Finding(hosts=(look.name,), what=what, remedy=f"{BUSY} {look.name}", check=check)
                look.problems.append(late)

    def _look(self, look: Look) -> None:
        host = look.facts.host
        machine: Machine = LocalMachine(look.name)
        try:
            if look.number == 0:
                python, project = sys.executable, str(PROJECT)
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
            self.begin + FACTS_BY,
            names=list(self.pins.all),
            project=project,
            folders=[project, *runs],
            torch=device != "cpu" or len(self.looks) > 1,
            code=self.code if look.number else (),
        )

    def _await_torch(self, seconds: float) -> None:
        for look in self.looks:
            look.await_torch(self.begin + seconds)

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
        networks = measured(able, usual, self.begin + LINKS_BY)
        best = chosen(networks)
        best.warn_of_slow_ones()
        for number, place in best.places.items():
            host = self.looks[number].facts
            host.address, host.interface = place["address"], place["interface"]
        report.pairs, report.network = list(best.pairs.values()), told(best, networks[0])
        report.meeting = best.peer if best is not networks[0] else None
        self._await_torch(LINKS_BY)
        return [*best.problems, *form_groups(best, self.begin + GROUPS_BY)]

    def _judge(self, report: Report) -> list[Finding]:
        manifests, own = self.files or ([], [])
        master = self.looks[0]
        if self.job and self.files is None:
            what = "there was no time to read all its manifests and audio"
            remedy = "The run itself will read the rest."
            late = Finding(hosts=(master.name,), what=what, remedy=remedy, severity=Severity.WARNING, check="files")
            master.problems.append(late)
        problems: list[Finding] = []
        for look, sharing in zip(self.looks, report.machine_workers, strict=True):
            needs = needs_of(self.job, len(self.looks), manifests, rank=look.number)
            judge = Judge(look.facts, master.facts, self.pins, needs, self.setup, sharing=sharing, sync=self.sync)
            problems += [*look.problems, *judge.all(), *(own if look is master else [])]
        return problems


# Of two hosts that share a folder, each would replace and remove what the other has. Neither links hide that, nor the
# names by which the hosts know a network disk: see distributed/hosts/agent/files.py.


def shared_folders(master: Host, remotes: Sequence[Remote]) -> list[Finding]:
    """Find what is wrong with the folders of hosts, before anything is changed there."""
    looks = [Look(0, master), *(Look(number, remote.host) for number, remote in enumerate(remotes, 1))]
    machines: list[Machine] = [LocalMachine(master.address), *remotes]
    try:
        for look, machine in zip(looks, machines, strict=True):
            look.folders = [machine.expand(look.facts.host.project_path) if look.number else str(PROJECT)]
            try:
                look.session = Session(machine, look.facts.host.python if look.number else sys.executable)
            except HostError as error:
                look.failed("folder", error)
        shared = folder_problems([look for look in looks if look.session], time.monotonic() + LOOK_S)
        return [*shared, *(problem for look in looks for problem in look.problems)]
    finally:
        for look in looks:
            look.close()


def folder_problems(looks: Sequence[Look], deadline: float, *, sync: bool = True) -> list[Finding]:
    """Find what hosts with a session share. What is wrong with one alone is added to its look.

    sync: whether new files will be sent.
    """

    def call_all(op: str, **request: list[str]) -> Iterator[tuple[Look, dict]]:
        def failed(look: Look, error: HostError) -> None:
            look.failed("folder", error, remedy=f"{BUSY} {look.name}")

        return ask_all(looks, op, lambda look: {"folders": look.folders, **request}, deadline, failed)

    marked = list(call_all("mark", master=this_master()))
    marks = {name: (look, below) for look, answer in marked for name, below in answer["marks"]}
    sharing = set()
    for look, answer in call_all("seen", marks=list(marks)):
        for name, above in answer["seen"]:
            marking, below = marks.get(name, (look, above))
            if marking is not look and are_nested(above, below):
                sharing |= {look.number, marking.number}
    for look, answer in marked:
        other = answer["master"] if look.number else ""
        if answer["busy"] and other:
            look.failed("folder", taken(look.name, other, look.folders[0]))
        elif other and not sync:
            what = f"{other}, another master, sent its files last"
            look.failed("folder", HostError(look.name, what, remedy="Leave --no-sync out."))
    if not (group := [look for look in looks if look.number in sharing]):
        return []
    what = f"{', '.join(f'{look.name} ({look.folders[0]})' for look in group)}: {SHARED}"
    return [Finding(hosts=tuple(look.name for look in group), what=what, remedy=OWN_FOLDERS, check="folder")]


def are_nested(one: Sequence[str], other: Sequence[str]) -> bool:
    """Tell from the names that lead to two folders from one place if they are the same, or one is in the other.

    Upper and lower case are the same on most Macs, and so is an accent as a character of its own.
    """
    pairs = zip(one, other, strict=False)  # to the end of the shorter
    return all(len({normalize("NFKD", name).casefold() for name in pair}) == 1 for pair in pairs)
