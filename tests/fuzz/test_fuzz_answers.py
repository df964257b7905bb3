"""What hosts say: to a question, to the preflight, to the launcher. A shell may put text of its own before it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from damage import damaged_json
from fuzzing import fuzz, outcome
from hypothesis import example
from packaging.specifiers import SpecifierSet

from distributed.hosts import environment
from distributed.hosts.agent_call import ask
from distributed.launcher.background import Background, Kind, Message
from distributed.launcher.training import Training
from distributed.preflight.session import Session
from distributed.ssh.machine import Completed

ANSWER = {"missing": [[0, 0]], "stale": [], "foreign": [], "free": 9000000000, "root": "/home/anna/tuner"}
FAILURE = {"error": "/data: Permission denied", "errno": 13}
BURST = {"event": "burst", "source": 1, "bytes": 9000, "seconds": 0.5}
SAID = [{"id": 0, "answer": {"clock": 1763726400.0}}, {"id": 0, **FAILURE}, BURST]
PROBED = [True, {"torch": "2.13.0", "numpy": "2.1.0"}]
PINS = environment.Pins(direct=(), all={"torch": "2.13.0", "numpy": "2.1.0"}, python=SpecifierSet(">=3.11"))
HELLO = {"type": "hello", "pid": 4711, "system": "Darwin", "source": "f00"}
EVENTS = [HELLO, {"type": "error", "kind": "DataError", "message": "no audio"}, {"type": "step", "step": 1}]


class FakeHost:
    """A machine, and every process on it, that says what it is told to."""

    name, pid = "mini", 4711

    def __init__(self, said: bytes):
        self._said = said.decode("utf-8", "replace")  # as the real ones do

    def run(self, command, **more) -> Completed:
        return Completed(returncode=0, stdout=self._said, stderr="")

    def start(self, command, **more) -> FakeHost:
        return self

    def lines(self) -> Iterator[str]:
        yield from self._said.split("\n")

    def expand(self, path: str) -> str:
        return path

    def write(self, data: bytes) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def close_stdin(self) -> None:
        pass

    def kill(self) -> None:
        pass


@fuzz("a host's answer", damaged_json(ANSWER, FAILURE))
@example(data=b"null")
@example(data=b'{"error": "/data: Permission denied"}')
def test_an_answer(data: bytes):
    answer = outcome(ask, FakeHost(data), "check", names="mini: ")
    assert answer is None or isinstance(answer, dict)


@fuzz("a preflight agent's lines", damaged_json(*SAID))
@example(data=b"42")
@example(data=b'{"id": []}')
@example(data=b'{"event": "burst"}')
def test_the_preflight_reads_on(data: bytes):
    """Whatever a host said before, its next answer counts."""
    session = Session(FakeHost(b"Welcome!\n" + data + b'\n{"id": 99, "answer": {"clock": 2.0}}'), "python")
    soon = time.monotonic() + 5
    outcome(session.answer, 0, "clock", 0.0, names="mini: ")
    assert outcome(session.answer, 99, "clock", soon) == {"clock": 2.0}
    burst = outcome(session.burst_from, 1, soon)
    assert burst is None or "seconds" in burst


@fuzz("what an environment holds", damaged_json(PROBED))
@example(data=b'[true, {"torch": "unknown", "numpy": null}]')
@example(data=b"1.5")
@example(data=b'[true, {"torch": "' + b"9" * 5000 + b'"}]')
def test_an_environment(data: bytes):
    found = outcome(environment.probe, FakeHost(data), "python", ["torch"])
    assert found is None or len(outcome(environment.unlike, PINS, found[1])) <= 2


VOTE = {"type": "vote", "generation": 1, "vote": 0, "what": "enter", "digest": 7, "samples": {"0": ["clip"]}}
SPOKEN = [*EVENTS, VOTE, {"type": "trouble", "generation": 1, "message": ""}, {"type": "want", "files": ["a.wav"]}]


class FakeSpawner:
    """A host's place in a run; its files never arrive."""

    def __init__(self, rank: int):
        self.name, self.rank = f"host{rank}", rank

    def start(self, *, again: bool) -> FakeHost:
        return FakeHost(b"")

    def reconnect(self) -> bool:
        return True

    def send(self, files: list[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        yield len(files), files


class Inbox(Background):
    """What is said comes from the test, and what may block is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lives: dict[str, int] = {}

    def run(self, work: Callable[[], Message | None]) -> None:
        if message := work():
            self.put(message)

    def listen(self, name: str, life: int, process: FakeHost, grace_s: float) -> None:
        self._lives[name] = life

    def hear(self, name: str, line: str) -> None:
        self.put(Message(name, self._lives[name], Kind.LINE, line))


def followed(data: bytes) -> list[dict]:
    """What a training of two passes on, where the first one says `data`."""
    events: list[dict] = []
    inbox = Inbox()
    training = Training([FakeSpawner(0), FakeSpawner(1)], events=events.append, log=lambda line: None, background=inbox)
    training.group.start()
    training.group.turn()
    for name in training.workers:
        inbox.hear(name, "\x1e" + json.dumps(HELLO))
        inbox.hear(name, "\x1e" + json.dumps({"type": "ready"}))
    for line in FakeHost(b"\x1e" + data).lines():
        inbox.hear("host0", line)
    training.group.turn()
    assert training.workers["host1"].liveness.is_there
    return events


@fuzz("a worker's events", damaged_json(*SPOKEN))
@example(data=b'{"type": "hello", "pid": 4711}')
@example(data=b"[" * 3000)
@example(data=b'{"type": "step", "step": 1}')
@example(data=b'{"type": "vote", "generation": 1, "vote": 0}')
def test_the_launcher_reads_on(data: bytes):
    for event in outcome(followed, data) or ():
        assert isinstance(event["type"], str) and event.get("host", "host0") in ("host0", "host1")
