"""A worker whose connection dies and is replaced, with real processes."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until

from distributed.control.channel import LAUNCHER_GONE
from distributed.control.messages import split_line
from distributed.control.relay import END_UNSEEN, NOBODY_THERE
from distributed.hosts.paths import PROJECT
from distributed.launcher.host_runner import RELAY
from distributed.launcher.reattach import WorkerProcess
from distributed.plan.launch_env import environment
from distributed.ssh.machine import LocalMachine

ECHO = [sys.executable, str(Path(__file__).with_name("toy_echo.py")), "door"]


class Line:
    """A process here, over a connection that can be cut: then nothing passes, and nobody is told."""

    def __init__(self, process):
        self._process, self.dead = process, False
        self.name, self.pid = process.name, process.pid
        self.poll, self.wait = process.poll, process.wait

    def write(self, data):
        if not self.dead:
            self._process.write(data)

    def lines(self):
        for line in self._process.lines():
            if not self.dead:
                yield line

    def close_stdin(self):
        self._process.close_stdin()

    def kill(self):
        os.killpg(self.pid, signal.SIGKILL)


class Launcher:
    """Writes numbers to a worker, and listens."""

    def __init__(self, folder: Path):
        self.folder, self.lines = folder, []
        self.line = self._start(ECHO)
        self.worker = WorkerProcess(self.line)
        self.counts, self.echoes, self.written = [], [], 0
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def attach(self) -> bool:
        return self.worker.attach(lambda arrived: self._start([sys.executable, "-m", RELAY, "door", str(arrived)]))

    def write(self, count: int) -> None:
        for _ in range(count):
            self.worker.write(json.dumps({"type": "number", "n": self.written}).encode() + b"\n")
            self.written += 1

    def wait_for_counts(self, more: int) -> None:
        until = len(self.counts) + more
        wait_until(lambda: len(self.counts) >= until, tell=lambda: len(self.counts))

    def _start(self, command) -> Line:
        self.lines.append(Line(LocalMachine("host").start(command, env=environment(PROJECT), cwd=str(self.folder))))
        return self.lines[-1]

    def _listen(self) -> None:
        for line in self.worker.lines():
            _, event = split_line(line)
            if event and event["type"] != "beat":
                {"count": self.counts, "echo": self.echoes}[event["type"]].append(event["n"])


@pytest.fixture
def launcher(tmp_path):
    made = Launcher(tmp_path)
    made.wait_for_counts(1)
    yield made
    for line in made.lines:
        if line.poll() is None:
            made.worker.kill()
            line.kill()


def test_no_line_is_lost_and_none_comes_twice(launcher):
    for _ in range(3):
        launcher.write(20)
        launcher.wait_for_counts(20)
        launcher.lines[-1].dead = True
        launcher.write(20)  # to nobody
        time.sleep(0.1)
        assert launcher.attach()
        launcher.wait_for_counts(50)
    wait_until(lambda: len(launcher.echoes) >= 120, tell=lambda: launcher.echoes)
    assert launcher.echoes == list(range(120))
    assert launcher.counts == list(range(len(launcher.counts)))


def test_a_connection_that_still_works_may_be_replaced(launcher):
    """Its network came back in the same moment."""
    for _ in range(5):
        launcher.write(10)
        assert launcher.attach()
    wait_until(lambda: len(launcher.echoes) >= 50, tell=lambda: launcher.echoes)
    assert launcher.echoes == list(range(50))
    assert launcher.counts == list(range(len(launcher.counts)))


def test_the_end_of_the_connection_before_does_not_end_the_worker(launcher):
    assert launcher.attach()
    launcher.line.close_stdin()
    launcher.wait_for_counts(200)
    assert launcher.worker.poll() is None


def test_a_worker_whose_launcher_is_gone_ends_though_it_was_attached(launcher):
    assert launcher.attach()
    launcher.worker.close_stdin()
    assert launcher.worker.wait(10) == END_UNSEEN
    assert launcher.line.wait(10) == LAUNCHER_GONE
    assert not (launcher.folder / "door").exists()


def test_killing_an_attached_worker_kills_it_and_its_relay(launcher):
    assert launcher.attach()
    launcher.worker.kill()
    assert launcher.line.wait(10) == -signal.SIGKILL
    assert launcher.worker.wait(10) == END_UNSEEN
    launcher.listener.join(10)
    assert not launcher.listener.is_alive()


def test_no_dead_worker_is_attached_to(launcher):
    launcher.line.kill()
    launcher.line.wait(10)
    assert not launcher.attach()
    assert launcher.lines[-1].wait(10) == NOBODY_THERE


def test_a_frozen_worker_cannot_be_attached_to_and_goes_on_as_it_was(launcher):
    os.kill(launcher.line.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert not launcher.attach() and time.monotonic() - began < 10
    os.kill(launcher.line.pid, signal.SIGCONT)
    launcher.write(5)
    launcher.wait_for_counts(200)
    assert launcher.echoes == list(range(5)) and launcher.counts == list(range(len(launcher.counts)))


def test_one_that_repeats_less_than_was_lost_is_not_gone_on_with(launcher):
    launcher.line.dead = True
    launcher.worker._kept.clear()
    launcher.worker._written = 10
    assert not launcher.attach()


def test_a_stranger_at_the_door_disturbs_nobody(launcher):
    for words in (b"", b"-1\n", b"rubbish\n", b"999999999\n", bytes(range(256)) * 10):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(launcher.folder / "door"))
            stranger.sendall(words)
    launcher.write(5)
    launcher.wait_for_counts(200)
    assert launcher.echoes == list(range(5)) and launcher.counts == list(range(len(launcher.counts)))
