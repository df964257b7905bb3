"""Looks at one host: asks its agent, and keeps what it says and what went wrong in asking."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from distributed.hosts.agent_call import group_probe
from distributed.hosts.paths import PROJECT, STORE
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import HostError, TunerError

from .facts import HostFacts
from .findings import Finding, Severity
from .session import NotInTime, Session

TORCH_ALARM_S = 14
CLOCK_TRIES = 3
BUSY = "Is it busy, or its network slow? Try: ssh"
OWN_FOLDER = "`ls -ld {0}` shows whose it is; `sudo chown -R $USER {0}` makes it yours."
OTHER_FOLDER = 'Set another "project_path" in the hosts file.'


class Look:
    """Looks at one host, in a thread of its own; number 0 is this machine."""

    def __init__(self, number: int, host: Host):
        self.number, self.facts = number, HostFacts(host=host)
        self.problems: list[Finding] = []
        self.session: Session | None = None
        self.remote: Remote | None = None
        self.step = "connecting"
        self.folders: list[str] = []  # its project, and the folder of its runs, which may be a link
        self._torch: int | None = None  # the number of a request whose answer takes seconds

    @property
    def name(self) -> str:
        return self.facts.name

    def problem(self, check: str, what: str, remedy: str = "", **more) -> None:
        self.problems.append(Finding(hosts=(self.name,), what=what, remedy=remedy, check=check, **more))

    def failed(self, check: str, error: TunerError, *, remedy: str = "") -> None:
        what = error.args[0].removeprefix(f"{self.name}: ")
        self.problem(check, what, error.remedy or remedy, status=error.exit_status)

    def not_done(self, seconds: float) -> None:
        check = "ssh" if self.session is None else "python"
        self.problem(check, f"not finished after {seconds:.0f} s: {self.step}", f"{BUSY} {self.name}")

    def not_read(self) -> None:
        remedy = "The run itself will read the rest."
        self.problem(
            "files", "there was no time to read all its manifests and audio", remedy, severity=Severity.WARNING
        )

    def gather(
        self,
        deadline: float,
        *,
        names: Sequence[str],
        project: str,
        folders: Sequence[str],
        torch: bool = True,
        code: Sequence[list[str]] = (),
        torch_s: int | None = None,
    ) -> None:
        """Fill in `facts`; deadline: by time.monotonic().

        names: packages. folders: where a run keeps its files; the last one's disk counts. torch: whether to import it.
        code: [name, sha256] of files to compare. torch_s: how long its import may take.
        """
        self.step = "waiting for its Python"
        facts, session = self.facts, self.session
        try:
            facts.facts = session.call("facts", deadline, names=list(names), project=project)
            facts.clock_ahead_s = self._clock_ahead(deadline)
        except HostError as error:
            self.failed("python", error, remedy=f"{BUSY} {self.name}")
            return
        if facts.facts["training"] and "torch" in facts.facts["versions"] and torch:
            facts.torch = {"late": True}
            alarm_s = torch_s or TORCH_ALARM_S
            self._torch = session.send("torch_facts", seconds=alarm_s, program=group_probe())
        try:
            for folder in folders:
                facts.spaces.append(session.call("space", deadline, project=folder, held=[STORE]))
        except HostError as error:
            here = OWN_FOLDER.format(folder) if folder == project else "Set another runs_dir."
            self.failed("folder", error, remedy=OTHER_FOLDER if self.number else here)
        if code:
            try:
                facts.differ = session.call("code", deadline, project=project, files=list(code))["differ"]
            except HostError as error:
                self.failed("code", error)

    def await_torch(self, deadline: float) -> None:
        """Wait for what torch says of itself. It may be called again: until there is an answer, torch is late."""
        if self._torch is None:
            return
        try:
            self.facts.torch = self.session.answer(self._torch, "torch_facts", deadline)
        except NotInTime:
            return
        except HostError as error:
            self.facts.torch = {"failed": error.args[0]}
        self._torch = None

    def close(self) -> None:
        for opened in (self.session, self.remote):
            if opened:
                opened.close()

    def _clock_ahead(self, deadline: float) -> float:
        """Measure how many seconds this host's clock is ahead, by the quickest of a few questions."""
        found = []
        for _ in range(CLOCK_TRIES):
            asked = time.time()
            there = self.session.call("clock", deadline)["clock"]
            answered = time.time()
            found.append((answered - asked, there - (asked + answered) / 2))
        return min(found)[1]


def look_here(folders: Sequence[str], seconds: int) -> Look:
    """Look at this machine alone, as at one of many. Raises HostError if its own Python does not answer.

    seconds: how long it may take in all.
    """
    look = Look(0, Host(address="this machine"))
    deadline = time.monotonic() + seconds
    look.session = Session(LocalMachine(look.name), sys.executable, seconds)
    try:
        look.gather(deadline, names=["torch"], project=str(PROJECT), folders=folders, torch_s=seconds)
        look.await_torch(deadline)
    finally:
        look.close()
    if not look.facts.facts:
        raise HostError(look.name, look.problems[0].what, remedy=look.problems[0].remedy)
    return look


def ask_all(
    looks: Iterable[Look],
    op: str,
    request: Callable[[Look], dict],
    deadline: float,
    failed: Callable[[Look, HostError], None],
) -> Iterator[tuple[Look, dict]]:
    """Ask several hosts at once, and yield each with its answer; `failed` is told of those that cannot give one."""
    numbers = [(look, look.session.send(op, **request(look))) for look in looks]
    for look, number in numbers:
        try:
            yield look, look.session.answer(number, op, deadline)
        except HostError as error:
            failed(look, error)
