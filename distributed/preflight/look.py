"""One host looked at: what its agent says, and what went wrong in asking it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.hosts.paths import PROJECT, STORE
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import HostError, TunerError

from .report import WARNING, HostFacts, Problem
from .session import NotInTime, Session

TORCH_ALARM_S = 12
CLOCK_TRIES = 3
BUSY = "Is it busy, or its network slow? Try: ssh"
OTHER_FOLDER = 'Set another "project_path" in the hosts file.'


@dataclass(frozen=True, kw_only=True)
class Questions:
    """names: packages. folders: where a run keeps its files; the last one's disk counts. device: as the user named it.
    code: [name, sha256] of files to compare."""

    names: Sequence[str]
    project: str
    folders: Sequence[str]
    device: str = "auto"
    code: Sequence[list[str]] = ()
    torch_s: int | None = None


class Look:
    """One host, looked at by a thread of its own. `torch` is the number of a request that is answered late."""

    def __init__(self, number: int, facts: HostFacts):
        self.number, self.facts = number, facts
        self.problems: list[Problem] = []
        self.session: Session | None = None
        self.remote: Remote | None = None
        self.torch: int | None = None
        self.spaces: list[dict] = []
        self.differ: list[str] = []
        self.step = "connecting"
        self.done = threading.Event()

    def problem(self, check: str, what: str, remedy: str = "", **more) -> None:
        self.problems.append(Problem(hosts=(self.facts.name,), what=what, remedy=remedy, check=check, **more))

    def failed(self, check: str, error: TunerError, *, remedy: str = "") -> None:
        what = error.args[0].removeprefix(f"{self.facts.name}: ")
        self.problem(check, what, error.remedy or remedy, status=error.exit_status)

    def not_done(self, seconds: float) -> None:
        check = "ssh" if self.session is None else "python"
        self.problem(check, f"not done after {seconds:.0f} s: {self.step}", f"{BUSY} {self.facts.name}")

    def not_read(self) -> None:
        remedy = "The run itself reads on from there."
        self.problem("files", "its manifests and audio were not all read in time", remedy, severity=WARNING)

    def gather(self, session: Session, questions: Questions, deadline: float) -> None:
        """Fill in `facts`; deadline: by time.monotonic()."""
        self.step = "waiting for its Python"
        facts = self.facts
        try:
            names = list(questions.names)
            facts.facts = session.call("facts", deadline, names=names, project=questions.project)
            facts.clock_ahead_s = _clock(session, deadline)
        except HostError as error:
            self.failed("python", error, remedy=f"{BUSY} {facts.name}")
            return
        # For the CPU there is nothing to ask torch, whose import takes seconds.
        if facts.facts["training"] and "torch" in facts.facts["versions"] and questions.device != "cpu":
            self.torch = session.send("torch_facts", seconds=questions.torch_s or TORCH_ALARM_S)
        try:
            for folder in questions.folders:
                facts.space = session.call("space", deadline, project=folder, held=[STORE])
                self.spaces.append(facts.space)
        except HostError as error:
            self.failed("folder", error, remedy=OTHER_FOLDER)
        if questions.code:
            self._compare(session, questions, deadline)

    def await_torch(self, deadline: float, *, last: bool) -> None:
        if self.torch is None or self.facts.torch is not None:
            return
        try:
            self.facts.torch = self.session.answer(self.torch, "torch_facts", deadline)
        except NotInTime:
            self.facts.torch = {"late": True} if last else None
        except HostError as error:
            self.facts.torch = {"failed": error.args[0]}

    def _compare(self, session: Session, questions: Questions, deadline: float) -> None:
        try:
            asked = {"project": questions.project, "files": list(questions.code)}
            self.differ = session.call("code", deadline, **asked)["differ"]
            self.facts.to_send = len(self.differ)
        except HostError as error:
            self.failed("code", error)


def look_here(names: Sequence[str], folders: Sequence[str], seconds: int) -> Look:
    """This machine alone, as one of many would be looked at. What torch says is still to be awaited.

    seconds: how long it may take in all. Raises HostError if its own Python does not answer.
    """
    look = Look(0, HostFacts(host=Host(address="this machine")))
    look.session = Session(LocalMachine(look.facts.name), sys.executable, seconds)
    questions = Questions(names=names, project=str(PROJECT), folders=folders, torch_s=seconds)
    look.gather(look.session, questions, time.monotonic() + seconds)
    if not look.facts.facts:
        raise HostError(look.facts.name, look.problems[0].what, remedy=look.problems[0].remedy)
    return look


def _clock(session: Session, deadline: float) -> float:
    """How far a host's clock is ahead, by the quickest of a few questions."""
    found = []
    for _ in range(CLOCK_TRIES):
        asked = time.time()
        there = session.call("clock", deadline)["clock"]
        answered = time.time()
        found.append((answered - asked, there - (asked + answered) / 2))
    return min(found)[1]
