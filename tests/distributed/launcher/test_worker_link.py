"""A worker whose connection dies and is replaced: real processes, a real supervisor, relays over pipes."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from distributed.control.channel import LAUNCHER_GONE
from distributed.control.messages import split_line
from distributed.control.relay import NOBODY_THERE
from distributed.control.supervisor import KEPT
from distributed.hosts.host_process import environment
from distributed.hosts.paths import PROJECT
from distributed.launcher.spawner import RELAY, WorkerLink
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import HostError

ECHO = [sys.executable, str(PROJECT / "tests/distributed/control/toy_echo.py")]


class Connection:
    """A relay here, over a connection that can be cut: then nothing passes, and nobody is told."""

    def __init__(self, process):
        self._process, self.dead = process, False
        self.name, self.pid = process.name, process.pid
        self.poll, self.wait = process.poll, process.wait

    def write(self, data):
        if not self.dead:
            self._process.write(data)

    def lines(self):
        for line in self._process.lines():
            while self.dead:
                time.sleep(0.02)
            yield line

    def end(self):
        """As when the launcher's machine closes it."""
        self._process.close_stdin()

    def kill(self):
        for pid in (self.pid, self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


class Launcher:
    """Writes numbers to a worker, and listens."""

    def __init__(self, folder: Path):
        self.folder, self.socket, self.connections = folder, "sock", []
        self.link = WorkerLink("host")
        self.counts, self.echoes, self.text, self.cuts, self.written = [], [], [], 0, 0
        self.listener = threading.Thread(target=self._listen, daemon=True)

    def connect(self, *command: str) -> bool:
        command_line = [sys.executable, "-m", RELAY, self.socket]
        process = LocalMachine("host").start(command_line, env=environment(PROJECT), cwd=str(self.folder))
        self.connections.append(Connection(process))
        process.write(json.dumps(command).encode() + b"\n")
        connected = self.link.connect(self.connections[-1])
        if connected and not self.listener.is_alive():
            self.listener.start()
        return connected

    def write(self, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(HostError):
                self.link.write(json.dumps({"type": "number", "n": self.written}).encode() + b"\n")
            self.written += 1

    def wait_for_counts(self, more: int) -> None:
        until = len(self.counts) + more
        wait_until(lambda: len(self.counts) >= until, tell=lambda: len(self.counts))

    def _listen(self) -> None:
        for line in self.link.lines():
            if line is None:
                self.cuts += 1
                continue
            text, event = split_line(line)
            self.text += [text] if text else []
            if event and event["type"] != "beat":
                {"count": self.counts, "echo": self.echoes}[event["type"]].append(event["n"])


@pytest.fixture
def nobody(tmp_path):
    made = Launcher(tmp_path)
    yield made
    made.link.kill()


@pytest.fixture
def launcher(nobody):
    assert nobody.connect(*ECHO)
    nobody.wait_for_counts(1)
    return nobody


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # until its relay ends
    except psutil.NoSuchProcess:
        return True


def test_no_line_is_lost_and_none_comes_twice(launcher):
    for _ in range(3):
        launcher.write(20)
        launcher.wait_for_counts(20)
        launcher.connections[-1].dead = True
        launcher.write(20)  # to nobody
        assert launcher.connect()
        launcher.connections[-2].dead = False
        launcher.connections[-2].kill()
        launcher.wait_for_counts(50)
    wait_until(lambda: len(launcher.echoes) >= 120, tell=lambda: launcher.echoes)
    assert launcher.echoes == list(range(120))
    assert launcher.counts == list(range(len(launcher.counts)))


def test_a_connection_that_still_works_may_be_replaced(launcher):
    """Its network came back in the same moment."""
    for _ in range(5):
        launcher.write(10)
        assert launcher.connect()
    wait_until(lambda: len(launcher.echoes) >= 50, tell=lambda: launcher.echoes)
    assert launcher.echoes == list(range(50))
    assert launcher.counts == list(range(len(launcher.counts)))


FLOOD = "import time; print(*range(100_000), sep=chr(10), flush=True); time.sleep(60)"


def test_a_worker_that_has_written_more_than_a_dead_connection_takes_is_reached_again(nobody):
    """It waits, as with any pipe that is full, and goes on over the new connection."""
    assert nobody.connect(sys.executable, "-c", FLOOD)
    nobody.connections[0].dead = True
    time.sleep(1)
    assert nobody.connect()
    nobody.connections[0].dead = False
    nobody.connections[0].kill()
    wait_until(lambda: len(nobody.text) == 100_000, 20, tell=lambda: len(nobody.text))
    assert nobody.text == [str(number) for number in range(100_000)]


def test_a_line_longer_than_all_that_is_kept_arrives_with_those_around_it(nobody):
    program = f"print('a', 'x' * {KEPT + 1000}, 'b', 'c', sep=chr(10), flush=True); import time; time.sleep(60)"
    assert nobody.connect(sys.executable, "-c", program)
    wait_until(lambda: len(nobody.text) == 4, 20, tell=lambda: [len(text) for text in nobody.text])
    assert [len(text) for text in nobody.text] == [1, KEPT + 1000, 1, 1]


def test_a_line_of_which_a_killed_relay_has_passed_on_the_half_comes_whole_over_the_next(nobody):
    program = "import time; time.sleep(0.5); print('a', 'x' * 1_000_000, 'b', sep=chr(10), flush=True); time.sleep(60)"
    assert nobody.connect(sys.executable, "-c", program)
    nobody.connections[0].dead = True  # nobody reads on after the first line, so that the relay is amid the second
    time.sleep(1.5)
    nobody.connections[0].kill()
    nobody.connections[0].dead = False
    wait_until(lambda: nobody.cuts == 1)
    assert nobody.connect()
    wait_until(lambda: len(nobody.text) == 3, tell=lambda: [len(text) for text in nobody.text])
    assert [len(text) for text in nobody.text] == [1, 1_000_000, 1]


@pytest.mark.parametrize("end", [Connection.end, lambda connection: os.killpg(connection.pid, signal.SIGKILL)])
def test_a_connection_that_ends_or_whose_relay_is_killed_does_not_end_the_worker(launcher, end):
    end(launcher.connections[-1])
    wait_until(lambda: launcher.cuts == 1)
    launcher.write(5)
    assert launcher.connect()
    launcher.wait_for_counts(200)
    assert launcher.echoes == list(range(5)) and launcher.counts == list(range(len(launcher.counts)))
    assert launcher.link.wait(0) is None


def test_killing_a_worker_kills_its_supervisor_and_the_relay(launcher):
    supervisor = launcher.link._pid
    launcher.link.kill()
    wait_until(lambda: is_gone(supervisor))
    assert launcher.connections[-1].wait(5) is not None
    launcher.listener.join(5)
    assert not launcher.listener.is_alive()


def test_nobody_is_there_after_the_end(launcher):
    os.killpg(launcher.link._pid, signal.SIGKILL)
    wait_until(lambda: launcher.cuts == 1)
    assert not launcher.connect()
    assert launcher.connections[-1].wait(5) == NOBODY_THERE


def test_a_frozen_worker_goes_on_over_the_new_connection(launcher):
    os.killpg(launcher.link._pid, signal.SIGSTOP)
    threading.Timer(0.5, os.killpg, (launcher.link._pid, signal.SIGCONT)).start()
    assert launcher.connect()
    launcher.write(5)
    launcher.wait_for_counts(200)
    assert launcher.echoes == list(range(5)) and launcher.counts == list(range(len(launcher.counts)))


def test_one_that_repeats_less_than_was_lost_is_not_gone_on_with(launcher):
    launcher.link._kept._kept.clear()
    launcher.link._kept.count = 10
    assert not launcher.connect()


def test_a_stranger_at_the_socket_disturbs_nobody(launcher):
    wrong = (b"", b"-1\n", b"rubbish\n", b'{"arrived": 0, "first": 99}\n', b'{"arrived": "x", "first": []}\n')
    for words in (*wrong, bytes(range(256)) * 10, b'{"arrived": -1, "first": 0}\n', b"[" * 5000 + b"\n"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(launcher.folder / "sock"))
            stranger.sendall(words)
    launcher.write(5)
    launcher.wait_for_counts(200)
    assert launcher.echoes == list(range(5)) and launcher.counts == list(range(len(launcher.counts)))
    assert launcher.cuts == 0


# how a worker begins and ends


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("print('no newline', end=''); raise SystemExit(3)", 3, "no newline"),
        ("import os; print('no newline', end='', flush=True); os.kill(os.getpid(), 11)", -11, "no newline"),
        ("import subprocess; print('a child', end='', flush=True); subprocess.Popen(['sleep', '60'])", 0, "a child"),
        ("import nothing_of_that_name", 1, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ],
    ids=["exit", "segfault", "child", "traceback"],
)
def test_the_last_words_and_the_status_are_heard(nobody, program, status, words):
    assert nobody.connect(sys.executable, "-c", program)
    nobody.listener.join(10)
    assert nobody.link.wait(0) == status and nobody.text[-1] == words
    wait_until(lambda: is_gone(nobody.link._pid))
    assert not (nobody.folder / "sock").exists()


def test_what_a_worker_says_before_it_ends_while_it_is_cut_off_is_heard(nobody):
    program = "import time; print('here', flush=True); time.sleep(1); print('last words'); raise SystemExit(3)"
    assert nobody.connect(sys.executable, "-c", program)
    wait_until(lambda: nobody.text)
    nobody.connections[-1].end()
    wait_until(lambda: nobody.cuts == 1)
    time.sleep(1.5)
    assert nobody.connect()
    nobody.listener.join(10)
    assert nobody.text == ["here", "last words"] and nobody.link.wait(0) == 3
    wait_until(lambda: is_gone(nobody.link._pid))


def test_the_status_of_one_that_was_killed_with_its_supervisor_while_it_was_cut_off_is_not_seen(launcher):
    launcher.connections[-1].end()
    wait_until(lambda: launcher.cuts == 1)
    os.killpg(launcher.link._pid, signal.SIGKILL)
    assert not launcher.connect() and launcher.link.wait(0) is None


def test_a_command_that_does_not_exist_is_an_error_with_its_reason(nobody):
    with pytest.raises(HostError, match="No such file or directory: '/no/such/python'"):
        nobody.connect("/no/such/python")


def test_the_path_of_the_socket_may_be_long_and_lead_through_a_link(nobody, tmp_path):
    real = tmp_path / ("a" * 100) / ("b" * 100)
    real.mkdir(parents=True)
    (tmp_path / "runs").symlink_to(real)
    nobody.socket = f"runs/{'run' * 30}/checkpoints/0.sock"
    assert nobody.connect(*ECHO)
    nobody.connections[-1].end()
    wait_until(lambda: nobody.cuts == 1)
    assert nobody.connect()
    nobody.wait_for_counts(10)


def test_a_start_ends_the_worker_that_is_still_there_frozen_or_not(launcher, tmp_path):
    first = launcher.link._pid
    os.killpg(first, signal.SIGSTOP)
    other = Launcher(tmp_path)
    assert other.connect(*ECHO)
    other.wait_for_counts(10)
    assert is_gone(first) and other.counts[0] == 0
    other.link.kill()


def test_a_start_ends_a_frozen_worker_whose_supervisor_was_killed_alone(launcher, tmp_path):
    [first] = psutil.Process(launcher.link._pid).children()
    first.suspend()
    os.kill(launcher.link._pid, signal.SIGKILL)
    wait_until(lambda: launcher.cuts == 1)
    other = Launcher(tmp_path)
    assert other.connect(*ECHO)
    other.wait_for_counts(10)
    assert is_gone(first.pid)
    other.link.kill()


def test_a_worker_saves_and_ends_when_the_run_breaks_off(nobody):
    program = "import sys, time; from distributed.control.channel import ControlChannel; "
    program += "channel = ControlChannel(sys.stdin.buffer); channel.rescue = lambda: print('saved', flush=True); "
    assert nobody.connect(sys.executable, "-c", f"{program}print('here', flush=True); time.sleep(60)")
    wait_until(lambda: nobody.text)
    nobody.link.write(b"rescue\n")
    nobody.listener.join(10)
    assert nobody.link.wait(0) == LAUNCHER_GONE and "saved" in nobody.text
