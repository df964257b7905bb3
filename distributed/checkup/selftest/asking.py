"""Asks the machines: starts probes there, hears their answers, and ends them all when a check is over."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed.hosts.host_process import HostProcess
from distributed.hosts.paths import PROJECT
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import Machine

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


class Asked(HostProcess):
    """A probe that runs. Its events arrive in a queue, so that waiting for one has an end."""

    def __init__(self, desk: Desk, place: Place, probe: str):
        super().__init__(place.machine, PROBE, probe)
        self.place, self.has_ended = place, False
        self._heard: queue.SimpleQueue[dict | None] = queue.SimpleQueue()

        def listen() -> None:
            for event in self.events():
                desk.learn(event.pop("secrets", {}), place.letter)
                self._heard.put(event)
            self._heard.put(None)

        threading.Thread(target=listen, daemon=True).start()

    def tell(self, message: dict) -> None:
        self.write(json.dumps(message))

    def next(self, *kinds: str, timeout: float | None = None) -> dict:
        """Return its next event of one of these types. Raises ProbeLost for another last word, or none in time."""
        while True:
            try:
                event = self._heard.get(timeout=timeout)
            except queue.Empty:
                raise ProbeLost(f"{self.place.letter}: no word within {timeout:g} s") from None
            if event is None:
                self.has_ended = True
                last = f": {self.last_words[-300:]}" if self.last_words else ", perhaps with its connection"
                raise ProbeLost(f"{self.place.letter}: it ended without an answer{last}")
            if event["type"] == "failed":
                raise ProbeLost(f"{self.place.letter}: {event['message']}")
            if event["type"] in kinds:
                return event


def told(work: Callable[[], Any]) -> dict:
    """Return its `answer`, or how it `failed`: one machine that fails keeps no other from answering."""
    try:
        return {"answer": work()}
    except Exception as error:
        return {"failed": str(error) or type(error).__name__}


class Asking:
    """Starts what one check asks. Its end, as of a `with`, kills it all on every machine; nothing more starts then.

    life_s: after which probes end by themselves, should this process be gone.
    """

    def __init__(self, desk: Desk, life_s: float):
        self.desk, self._life_s = desk, life_s
        self._lock, self._over = threading.Lock(), False
        self._to_end: list[Callable[[], object]] = []

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._over = True
        acts = [threading.Thread(target=act, daemon=True) for act in reversed(self._to_end)]
        for act in acts:
            act.start()
        for act in acts:
            act.join(10.0)  # a host that is gone must not hold up the others

    @property
    def places(self) -> list[Place]:
        return self.desk.places

    @property
    def hosts(self) -> Hosts:
        """Return the hosts that take part."""
        return Hosts(master=self.desk.hosts.master, workers=tuple(each.host for each in self.places[1:]))

    @property
    def remotes(self) -> list[Remote]:
        return [each.machine for each in self.places[1:] if isinstance(each.machine, Remote)]

    def at_end(self, act: Callable[[], object]) -> None:
        with self._lock:
            if not self._over:
                self._to_end.append(act)
                return
        act()
        raise ProbeLost("the check is over")

    def start(self, place: Place, probe: str, **request: Any) -> Asked:
        asked = Asked(self.desk, place, probe)
        self.at_end(asked.process.kill)
        asked.tell({"life_s": self._life_s, **request})
        return asked

    def forget(self, place: Place, run: str) -> None:
        """Remove what this check's run has left there: also when the check is over."""
        asked = Asked(self.desk, place, "system.forget")
        asked.tell({"life_s": FORGET_S, "run": run})
        asked.next("answer", timeout=FORGET_S)

    def ask(self, place: Place, probe: str, **request: Any) -> Any:
        return self.start(place, probe, **request).next("answer")["answer"]

    def ask_all(self, probe: str, **request: Any) -> list[dict]:
        """Ask every machine at once: of each its `host`, and `answer` or `failed`."""
        return self.on_all(lambda place: self.ask(place, probe, device=place.host.device, **request))

    def on_all(self, work: Callable[[Place], Any], places: Sequence[Place] | None = None) -> list[dict]:
        asked = self.places if places is None else places
        answers: list[dict] = [{}] * len(asked)

        def one(number: int, place: Place) -> None:
            answers[number] = {"host": place.letter, **told(partial(work, place))}

        threads = [threading.Thread(target=one, args=each, daemon=True) for each in enumerate(asked)]
        for thread in threads:
            thread.start()
        for thread in threads:  # daemons: a machine that hangs must not hold up the end of the command
            thread.join()
        return answers
