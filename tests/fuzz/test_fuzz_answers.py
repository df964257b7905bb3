"""What hosts say: to a question, to the preflight, to the launcher. A shell may put text of its own before it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial

from damage import damaged_json
from fuzzing import fuzz, outcome, parsed, same
from hypothesis import example
from packaging.specifiers import SpecifierSet

from distributed.checkup.look import Session
from distributed.hosts import environment
from distributed.hosts.agent_call import agent_call
from distributed.launcher.background import Background, Takes, ignore, outcome_of, throw
from distributed.launcher.training import Training
from distributed.ssh.machine import Completed

CHECKED = {"missing": [[0, 0]], "stale": [], "foreign": [], "free": 9000000000, "taken": ""}
ANSWER = {"id": 0, "answer": CHECKED}
FAILURE = {"id": 0, "error": "/data: Permission denied", "errno": 13}
BURST = {"event": "burst", "source": 1, "port": 4000, "bytes": 9000, "seconds": 0.5}
SAID = [{"id": 0, "answer": {"clock": 1763726400.0}}, FAILURE, BURST]
PROBED = {"torch": "2.13.0", "numpy": "2.1.0"}
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
    """An object is the answer, whole; an error is none, and neither is the answer to another request."""
    answer = outcome(agent_call, FakeHost(data), "check", names="mini: ")
    lines = [parsed(line) for line in data.decode("utf-8", "replace").splitlines()]
    own = [line for line in lines if isinstance(line, dict) and line.get("id") == 0]
    assert answer is None or any(same(answer, message.get("answer")) for message in own)
    assert answer is not None or data != json.dumps(ANSWER).encode()


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
    burst = outcome(session.burst_from, 1, 4000, soon)
    lines = [parsed(line) for line in data.decode("utf-8", "replace").split("\n")]
    bursts = [line for line in lines if isinstance(line, dict) and (line.get("source"), line.get("port")) == (1, 4000)]
    assert burst is None or any(same(burst, line) for line in bursts)
    assert burst is not None or BURST not in lines


@fuzz("what an environment holds", damaged_json(PROBED))
@example(data=b'{"torch": "unknown", "numpy": null}')
@example(data=b"1.5")
@example(data=b'{"torch": "' + b"9" * 5000 + b'"}')
def test_an_environment(data: bytes):
    """Each pin that is not met exactly is named."""
    document = parsed(data)
    found = document if isinstance(document, dict) else {}
    unlike = outcome(environment.unlike, PINS, found)
    met = {name for name, version in PINS.all.items() if found.get(name) == version}
    assert not met & {line.split()[0] for line in unlike}
    assert len(unlike) == 0 or met != set(PINS.all)
    assert {name for name in PINS.all if name not in found} <= {line.split()[0] for line in unlike}


VOTE = {"type": "vote", "generation": 1, "vote": 0, "what": "state_sync", "digest": 7, "samples": {"0": ["clip"]}}
SPOKEN = [*EVENTS, VOTE, {"type": "trouble", "generation": 1, "message": ""}, {"type": "want", "files": ["a.wav"]}]


class FakeSpawner:
    """A host's place in a run; its files never arrive."""

    def __init__(self, rank: int):
        self.name, self.rank = f"host{rank}", rank

    def start(self, *, again: bool) -> FakeHost:
        host = FakeHost(b"")
        host.name = self.name
        return host

    def reconnect(self) -> bool:
        return True

    def send(self, files: list[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        yield len(files), files


class Inbox(Background):
    """What is said comes from the test, and what may block is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self._hear: dict[str, Takes] = {}

    def run(self, work, then=ignore, failed=throw, late=ignore) -> None:
        self.put(*outcome_of(work, then, failed, late))

    def listen(self, process: FakeHost, hear: Takes, ended: Takes, grace_s: float) -> None:
        self._hear[process.name] = hear

    def hear(self, name: str, line: str) -> None:
        self.put(partial(self._hear[name], line))


def followed(data: bytes) -> list[dict]:
    """What a training of two passes on, where the first one says `data`."""
    events: list[dict] = []
    inbox = Inbox()
    training = Training([FakeSpawner(0), FakeSpawner(1)], events=events.append, log=lambda line: None, background=inbox)
    training.group.start()
    training.follow(training.group.turn())
    for name in training.workers:
        inbox.hear(name, "\x1e" + json.dumps(HELLO))
        inbox.hear(name, "\x1e" + json.dumps({"type": "ready"}))
    for line in FakeHost(b"\x1e" + data).lines():
        inbox.hear("host0", line)
    training.follow(training.group.turn())
    assert training.workers["host1"].liveness.is_there
    return events


@fuzz("a worker's events", damaged_json(*SPOKEN))
@example(data=b'{"type": "hello", "pid": 4711}')
@example(data=b"[" * 3000)
@example(data=b'{"type": "step", "step": 1}')
@example(data=b'{"type": "vote", "generation": 1, "vote": 0}')
def test_the_launcher_reads_on(data: bytes):
    """What a worker says is passed on as it is, with its name; all else that is told is the launcher's own."""
    passed = outcome(followed, data) or ()
    documents = [parsed(line) for line in data.decode("utf-8", "replace").split("\n")]
    said = [doc for doc in [HELLO, *documents] if isinstance(doc, dict)]
    for event in passed:
        if event["type"] in ("step", "error", "hello"):
            assert any(same(event, {**one, "host": event["host"], "rank": event["rank"]}) for one in said)
        assert event.get("host", "host0") in ("host0", "host1")
    if documents in ([EVENTS[1]], [EVENTS[2]]):
        assert any(same(event, {**documents[0], "host": "host0", "rank": 0}) for event in passed) == (
            "seconds" in documents[0] or documents[0]["type"] != "step"
        )
