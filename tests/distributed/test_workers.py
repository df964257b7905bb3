"""The crew and the lifeline, with real processes that speak the workers' protocol but do not train."""

import subprocess
import sys
import textwrap
import time

import pytest

from distributed import workers
from distributed.lifeline import LAUNCHER_GONE
from distributed.machine import LocalMachine
from distributed.workers import Crew, Worker
from whisper_tuner.errors import RunError

HEAD = """
import os, sys, time
from distributed.lifeline import Lifeline, send_event
spec = sys.stdin.buffer.readline()
line = Lifeline(sys.stdin.buffer, silence_s=SILENCE)
"""

TAIL = "\nos._exit(0)  # as worker_main ends: a thread still reads stdin"


def script(body: str, silence_s: float = 20) -> list[str]:
    return [sys.executable, "-c", HEAD.replace("SILENCE", str(silence_s)) + textwrap.dedent(body) + TAIL]


@pytest.fixture
def crew_of():
    made = []

    def build(*bodies: str) -> tuple[Crew, list, list]:
        events, log = [], []
        members = []
        for rank, body in enumerate(bodies):
            machine = LocalMachine(f"host{rank}")
            members.append(Worker(rank=rank, name=machine.name, process=machine.start(script(body))))
        crew = Crew(members, events=events.append, log=log.append)
        for worker in members:
            worker.process.write(b"{}\n")
        made.append(crew)
        return crew, events, log

    yield build
    for crew in made:
        crew.end()
        assert all(worker.process.wait(5) is not None for worker in crew.workers)


def test_events_and_lines_carry_their_host(crew_of):
    crew, events, log = crew_of("print('hello'); send_event({'type': 'step', 'step': 3})", "pass")
    assert crew.watch(lambda: False) is None
    assert {"type": "step", "step": 3, "host": "host0", "rank": 0} in events
    assert log == ["host0: hello"]


def test_an_event_amid_a_line_is_neither_lost_nor_shown(crew_of):
    body = "sys.stdout.write('hel'); sys.stdout.flush(); send_event({'type': 'step'}); print('lo', flush=True)"
    crew, events, log = crew_of(body)
    assert crew.watch(lambda: False) is None
    assert log == ["host0: hel", "host0: lo"] and [event["type"] for event in events] == ["step"]


def test_a_killed_worker_is_named_with_its_last_lines(crew_of):
    crew, _, _ = crew_of("print('last words', flush=True); os.kill(os.getpid(), 9)", "time.sleep(60)")
    started = time.monotonic()
    failed = crew.watch(lambda: False)
    assert time.monotonic() - started < 10
    assert failed.name == "host0"
    assert "killed by signal 9" in failed.describe_failure() and "host0: last words" in failed.describe_failure()


def test_the_cause_is_blamed_and_not_who_noticed_first(crew_of):
    crew, _, _ = crew_of(
        "send_event({'type': 'error', 'kind': 'PeerLost', 'message': 'lost a peer'}); sys.exit(1)",
        "time.sleep(1); os.kill(os.getpid(), 9)",
    )
    assert crew.watch(lambda: False).name == "host1"


def test_a_frozen_worker_is_given_up_after_the_silence(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", 3.0)
    crew, _, _ = crew_of("os.kill(os.getpid(), 19)", "time.sleep(60)")
    failed = crew.watch(lambda: False)
    assert failed.name == "host0" and "nothing heard" in failed.describe_failure()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(("Linux", "a"), ("Linux", "b"), "host1 runs other code than host0"), (("Darwin", "a"), ("Linux", "a"), "Macs")],
)
def test_ranks_that_cannot_train_together_are_refused(crew_of, first, second, words):
    say = "send_event({'type': 'hello', 'pid': 1, 'system': '%s', 'source': '%s'}); time.sleep(60)"
    crew, _, _ = crew_of(say % first, say % second)
    with pytest.raises(RunError, match=words):
        crew.watch(lambda: False)


def test_stop_reaches_every_worker(crew_of):
    wait = "line.stopping.wait(30); send_event({'type': 'done', 'stopped': line.stopping.is_set()})"
    crew, events, _ = crew_of(wait, wait)
    assert crew.watch(lambda: True) is None
    assert [event["stopped"] for event in events if event["type"] == "done"] == [True, True]


def lonely(body: str, silence_s: float = 20) -> subprocess.Popen:
    process = subprocess.Popen(script(body, silence_s), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(b"{}\n")
    process.stdin.flush()
    return process


def test_a_worker_whose_launcher_is_gone_saves_and_ends(tmp_path):
    saved = tmp_path / "saved"
    process = lonely(
        f"line.rescue = lambda: open({str(saved)!r}, 'w').close(); print('ready', flush=True); time.sleep(60)"
    )
    while b"ready" not in process.stdout.readline():
        pass
    process.stdin.close()
    assert process.wait(10) == LAUNCHER_GONE
    assert saved.exists()


def test_a_worker_that_hears_nothing_ends_though_nobody_reads_its_output():
    """As behind a pulled cable: no end of file, and a pipe that fills up and blocks whoever writes."""
    process = lonely("while True: send_event({'type': 'step', 'text': 'x' * 1000})", silence_s=2)
    assert process.wait(15) == LAUNCHER_GONE


def test_a_rescue_that_hangs_does_not_keep_the_worker():
    process = lonely("line.rescue = lambda: time.sleep(60); print('ready', flush=True); time.sleep(60)")
    while b"ready" not in process.stdout.readline():
        pass
    process.stdin.close()
    assert process.wait(10) == LAUNCHER_GONE
