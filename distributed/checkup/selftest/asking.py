"""Asks the machines: starts probes there, hears their answers, and ends them all when a check is over."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.control.messages import split_line
from distributed.hosts.host_process import environment
from distributed.hosts.paths import PROJECT
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import Machine, Process

from .sanitize import Sanitizer

PROBE = "distributed.checkup.probes.probe"
FORGET_S = 5.0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ProbeLost(Exception):
    """A probe that ended without an answer, or said what kept it from giving one."""


@dataclass(kw_only=True)
class Place:
    """One machine. `model` is the bundled Whisper there; `address`, its own one on the network of the run.

    name: the one that is looked up to reach it.
    """

    letter: str
    host: Host
    machine: Machine
    model: str = str(PROJECT / "bundled" / "model")
    address: str = ""
    name: str = ""

    def own_address(self) -> str:
        if not self.address:
            raise ProbeLost(f"{self.letter}: its own address is not known")
        return self.address

    @property
    def python(self) -> str:
        return self.machine.expand(self.host.python) if isinstance(self.machine, Remote) else sys.executable

    @property
    def project(self) -> str:
        return self.machine.expand(self.host.project_path) if isinstance(self.machine, Remote) else str(PROJECT)


@dataclass
class Desk:
    """All that checks share: the machines that were reached, the hosts file, what is private."""

    hosts: Hosts
    sanitizer: Sanitizer = field(default_factory=Sanitizer)
    places: list[Place] = field(default_factory=list)
    machine_workers: tuple[int, ...] = ()
    tell: Callable[[str], None] = lambda text: None  # which check is running
    ask_user: Callable[[str], None] = lambda text: None
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # until the end of the command

    def letter(self, host: Host) -> str:
        number = self.hosts.all.index(host)
        return f"{LETTERS[number % len(LETTERS)]}{number // len(LETTERS) or ''}"

    def learn(self, secrets: dict, letter: str) -> None:
        """Learn what a machine says of its owner, see `secrets` of distributed/checkup/probes/probe.py."""
        self.sanitizer.learn(secrets.get("names", ()), letter)
        self.sanitizer.learn(secrets.get("users", ()), "USER")
        self.sanitizer.learn_folders(secrets.get("folders", ()), "home or project")


class Asked:
    """A probe that runs. Its events arrive in a queue, so that waiting for one has an end."""

    def __init__(self, place: Place, process: Process, learn: Callable[[dict], None]):
        self.place, self.process = place, process
        self._learn, self._events = learn, queue.SimpleQueue()
        self._last, self.has_ended = "", False
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self, *kinds: str, timeout: float | None = None) -> dict:
        """Its next event of one of these types. Raises ProbeLost for another last word, or none in time."""
        while True:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                raise ProbeLost(f"{self.place.letter}: no word within {timeout:g} s") from None
            if event is None:
                self.has_ended = True
                raise ProbeLost(f"{self.place.letter}: it ended without an answer{self._last_words()}")
            if event["type"] == "failed":
                raise ProbeLost(f"{self.place.letter}: {event['message']}")
            if event["type"] in kinds:
                return event

    def _last_words(self) -> str:
        return f": {self._last[-300:]}" if self._last else ", perhaps with its connection"

    def write(self, message: dict) -> None:
        self.process.write(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        for line in self.process.lines():
            text, event = split_line(line)
            self._last = text.strip() or self._last
            if event:
                self._learn(event.pop("secrets", {}))
                self._events.put(event)
        self._events.put(None)


def told(work: Callable[[], Any]) -> dict:
    """`answer`, or `failed`: one machine that fails keeps no other from answering."""
    try:
        return {"answer": work()}
    except Exception as error:
        return {"failed": str(error) or type(error).__name__}


class Asking:
    """Starts what one check asks; `end` kills it all, on every machine, and lets nothing more start."""

    def __init__(self, desk: Desk, life_s: float):
        self.desk, self._life_s = desk, life_s
        self._lock, self._over = threading.Lock(), False
        self._to_end: list[Callable[[], None]] = []

    @property
    def places(self) -> list[Place]:
        return self.desk.places

    @property
    def reached(self) -> tuple[Host, ...]:
        """Workers' hosts that take part."""
        return tuple(each.host for each in self.places[1:])

    def at_end(self, act: Callable[[], None]) -> None:
        with self._lock:
            if not self._over:
                self._to_end.append(act)
                return
        act()
        raise ProbeLost("the check is over")

    def end(self) -> None:
        with self._lock:
            self._over = True
        acts = [threading.Thread(target=act, daemon=True) for act in reversed(self._to_end)]
        for act in acts:
            act.start()
        for act in acts:
            act.join(10.0)  # a host that is gone must not hold up the others

    def start(self, place: Place, probe: str, **request: Any) -> Asked:
        asked = self._begin(place, probe)
        self.at_end(asked.process.kill)
        asked.write({"life_s": self._life_s, **request})
        return asked

    def forget(self, place: Place, run: str) -> None:
        """Remove what this check's run has left there: also when the check is over."""
        asked = self._begin(place, "system.forget")
        asked.write({"life_s": FORGET_S, "run": run})
        asked.next("answer", timeout=FORGET_S)

    def _begin(self, place: Place, probe: str) -> Asked:
        env = environment(place.project)
        process = place.machine.start([place.python, "-m", PROBE, probe], env=env, cwd=place.project)
        return Asked(place, process, lambda secrets: self.desk.learn(secrets, place.letter))

    def ask(self, place: Place, probe: str, **request: Any) -> Any:
        return self.start(place, probe, **request).next("answer")["answer"]

    def ask_all(self, probe: str, **request: Any) -> list[dict]:
        """Ask every machine at once: of each its `host`, and `answer` or `failed`."""
        return self.on_all(lambda place: self.ask(place, probe, device=place.host.device, **request))

    def on_all(self, work: Callable[[Place], Any], places: Sequence[Place] | None = None) -> list[dict]:
        def one(place: Place) -> dict:
            return {"host": place.letter, **told(lambda: work(place))}

        asked = self.places if places is None else places
        answers: list[dict] = [{}] * len(asked)
        threads = [
            threading.Thread(target=lambda n, place: answers.__setitem__(n, one(place)), args=each, daemon=True)
            for each in enumerate(asked)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:  # daemons: a machine that hangs must not hold up the end of the command
            thread.join()
        return answers


@contextlib.contextmanager
def asking(desk: Desk, life_s: float) -> Iterator[Asking]:
    """life_s: after which probes end by themselves, should this process be gone."""
    running = Asking(desk, life_s)
    try:
        yield running
    finally:
        running.end()
