"""Looks at one host: starts its agent, asks it, and keeps what it says and what went wrong in asking."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.hosts.agent_call import (
    answer_in,
    fits,
    group_probe,
    no_answer,
    parse_message,
    request_line,
    sources,
    start_command,
)
from distributed.hosts.paths import PROJECT, STORE
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.machine import LocalMachine, Machine
from whisper_tuner.errors import HostError, TunerError
from whisper_tuner.model.memory import Way

from .findings import Finding

LIFE_S = 25  # after which an agent ends whatever happens
END_S = 1.0
BURST = {"event": str, "source": int, "port": int, "bytes": int, "seconds": float}
TORCH_ALARM_S = 14
CLOCK_TRIES = 3
BUSY = "Is it busy, or its network slow? Try: ssh"
OWN_FOLDER = "`ls -ld {0}` shows whose it is; `sudo chown -R $USER {0}` makes it yours."
OTHER_FOLDER = 'Set another "project_path" in the hosts file.'


class NotInTime(HostError):
    """An agent gave no answer before its deadline."""


class Session:
    """The master's side of one agent, which answers until it is told to end.

    Any thread may call. Raises HostError for what the agent could not do, NotInTime for silence.
    """

    def __init__(self, machine: Machine, python: str, life_s: int | None = None):
        self.name = machine.name
        command = start_command(str(life_s or LIFE_S), machine.expand(python))
        self._process = machine.start(command, env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"})
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._bursts: dict[tuple[int, int], dict[str, Any]] = {}  # by their source, and the port where they arrived
        self._said: list[str] = []
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()
        self._process.write(sources())

    def call(self, op: str, deadline: float, **request: Any) -> dict[str, Any]:
        """Ask, and wait for the answer until `deadline`, by time.monotonic()."""
        return self.answer(self.send(op, **request), op, deadline)

    def send(self, op: str, **request: Any) -> int:
        """Send a request; return its number, for `answer`."""
        number = next(self._numbers)
        with contextlib.suppress(HostError):  # it has ended: the answer will say so
            self._process.write(request_line(number, op, request))
        return number

    def answer(self, number: int, op: str, deadline: float) -> dict[str, Any]:
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self._ended, max(0.0, deadline - time.monotonic()))
            found = self._answers.pop(number, None)
        if found is None and self._ended:
            raise no_answer(self.name, self._process.wait(END_S), "\n".join(self._said))
        if found is None:
            raise NotInTime(self.name, f"no answer in time ({op})")
        return answer_in(found, self.name, op)

    def burst_from(self, source: int, port: int, deadline: float) -> dict[str, Any] | None:
        """Return what a burst of host number `source` brought to this host's port; None if it has not ended in time."""
        key = source, port
        with self._news:
            self._news.wait_for(lambda: key in self._bursts or self._ended, max(0.0, deadline - time.monotonic()))
            return self._bursts.get(key)

    def close(self) -> None:
        """End the agent, by its stdin; over a cut link its own alarm does it."""
        self._process.close_stdin()

    def ended(self, timeout: float = END_S) -> bool:
        return self._process.wait(timeout) is not None

    def _read(self) -> None:
        for line in self._process.lines():
            message = parse_message(line)
            with self._news:
                if message is None:
                    self._said = [*self._said[-20:], line]
                elif "id" in message:
                    self._answers[message["id"]] = message
                elif fits(message, BURST):
                    self._bursts.setdefault((message["source"], message["port"]), message)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@dataclass(kw_only=True)
class HostFacts:
    """The facts of one host that was looked at; None is what could not be found out."""

    host: Host
    reached: bool = False
    facts: dict = field(default_factory=dict)  # as the agent's `facts` gives them
    clock_ahead_s: float | None = None
    spaces: list[dict] = field(default_factory=list)  # of each folder where a run keeps files; the last one counts
    differ: list[str] | None = None  # files of code that are not the master's
    torch: dict | None = None
    device: str | None = None  # on which it would train
    way: Way | None = None  # how it would train
    spare_memory: float | None = None  # bytes beyond what each of its workers needs
    address: str | None = None  # of the chosen interface
    interface: str | None = None

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def space(self) -> dict | None:
        return self.spaces[-1] if self.spaces else None


class Look:
    """Looks at one host, in a thread of its own; number 0 is this machine."""

    def __init__(self, number: int, host: Host):
        self.number, self.facts = number, HostFacts(host=host)
        self.name = host.address
        self.problems: list[Finding] = []
        self.session: Session | None = None
        self.remote: Remote | None = None
        self.step = "connecting"
        self.folders: list[str] = []  # its project, and the folder of its runs, which may be a link
        self._torch: int | None = None  # the number of a request whose answer takes seconds

    def failed(self, check: str, error: TunerError, *, remedy: str = "") -> None:
        what, remedy = error.args[0].removeprefix(f"{self.name}: "), error.remedy or remedy
        found = Finding(hosts=(self.name,), what=what, remedy=remedy, check=check, status=error.exit_status)
        self.problems.append(found)

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
        assert session is not None
        try:
            facts.facts = session.call("facts", deadline, names=list(names), project=project)
            clocks = []
            for _ in range(CLOCK_TRIES):
                asked = time.time()
                there = session.call("clock", deadline)["clock"]
                answered = time.time()
                clocks.append((answered - asked, there - (asked + answered) / 2))
            facts.clock_ahead_s = min(clocks)[1]  # by the quickest of a few questions
        except HostError as error:
            self.failed("python", error, remedy=f"{BUSY} {self.name}")
            return
        if facts.facts["training"] and "torch" in facts.facts["versions"] and torch:
            facts.torch = {"late": True}
            self._torch = session.send("torch_facts", seconds=torch_s or TORCH_ALARM_S, program=group_probe())
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
        assert self.session is not None
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
    request: Callable[[Look], Mapping[str, Any]],
    deadline: float,
    failed: Callable[[Look, HostError], None],
) -> Iterator[tuple[Look, dict]]:
    """Ask several hosts with a session at once, and yield each with its answer; tell `failed` of those without."""
    asked = [(look, look.session, look.session.send(op, **request(look))) for look in looks if look.session]
    for look, session, number in asked:
        try:
            yield look, session.answer(number, op, deadline)
        except HostError as error:
            failed(look, error)
