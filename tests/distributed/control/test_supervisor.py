"""The lines that a supervisor keeps, and how it ends; with relays, see launcher/test_worker_link.py."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from distributed.control import supervisor
from distributed.control.messages import split_line
from distributed.control.relay import connect, end_supervisor, start_supervisor
from distributed.control.supervisor import END, KeptLines, Supervisor
from distributed.control.timeouts import Timeouts
from distributed.hosts.host_process import environment
from distributed.hosts.paths import PROJECT

QUICK = Timeouts(orphaned_s=0.3, rescue_s=0.3, grace_s=0.3, last_lines_s=0.3)


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(supervisor, "KEPT", 40)
    kept = KeptLines()
    for number in range(10):
        kept.append(b"line %d\n" % number)  # of 7 bytes
    return kept


def test_lines_are_kept_up_to_a_size(lines):
    assert lines.count == 10
    assert lines.since(10) == [] and lines.since(9) == [b"line 9\n"]
    assert lines.since(4) == [b"line %d\n" % number for number in range(4, 10)]


@pytest.mark.parametrize("number", [3, -1, 11])
def test_lines_that_are_not_kept_are_not_made_up(lines, number):
    with pytest.raises(ValueError, match="wanted"):
        lines.since(number)


def test_a_line_longer_than_what_is_kept_is_kept_until_as_much_has_followed(lines):
    lines.append(b"x" * 100)
    lines.append(b"short", sent=11)
    assert lines.since(10) == [b"x" * 100, b"short"]
    lines.append(b"y" * 40)
    with pytest.raises(ValueError, match="wanted"):
        lines.since(10)


def test_lines_that_were_not_sent_are_all_kept(lines):
    lines.append(b"x" * 100, sent=6)
    assert len(lines.since(6)) == 5


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Runs a supervisor of a command; `launcher(reader, writer)` is with it."""
    monkeypatch.chdir(tmp_path)

    def run(command, launcher=None, timeouts=QUICK):
        async def both():
            running = asyncio.create_task(Supervisor(timeouts).run(command, tmp_path / "sock"))
            while launcher and not (tmp_path / "sock").exists():
                await asyncio.sleep(0.01)
            heard = await launcher(*await asyncio.open_unix_connection("sock")) if launcher else None
            await asyncio.wait_for(running, 5)
            return heard

        return asyncio.run(both())

    return run


@pytest.mark.parametrize("command", [["sleep", "60"], ["sh", "-c", "kill -STOP $$"]], ids=["deaf", "frozen"])
def test_a_worker_that_does_not_hear_that_its_launcher_is_gone_is_killed(supervise, command):
    began = time.monotonic()
    supervise(command)
    assert time.monotonic() - began < 3


def test_the_last_words_are_heard_long_after_the_connection_began(supervise):
    async def launcher(reader, writer):
        await reader.readline()
        writer.write(json.dumps({"arrived": 0, "first": 0}).encode() + b"\n")
        return [split_line(line.decode())[1] for line in (await reader.read()).split(END)[:-1]]

    program = "import time; time.sleep(1); raise SystemExit(3)"
    assert supervise([sys.executable, "-c", program], launcher) == [{"type": "exit", "status": 3}]


def test_one_that_ends_leaves_the_socket_of_another_that_has_taken_its_path(tmp_path, monkeypatch):
    for key, value in environment(PROJECT).items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    path = Path("sock")

    def start(seconds: int) -> subprocess.Popen:
        before = path.stat().st_mtime_ns if path.exists() else 0
        process = start_supervisor(path, [sys.executable, "-c", f"import time; time.sleep({seconds})"])
        wait_until(lambda: path.exists() and path.stat().st_mtime_ns != before)
        return process

    first = start(2)
    launcher = connect(path, None)
    launcher.sendall(b'{"arrived": 0, "first": 0}\n')
    second = start(60)
    first.wait(10)
    other = connect(path, None)
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    launcher.close()
    assert other
    other.close()


@pytest.mark.parametrize("dies", [True, False])
def test_an_earlier_worker_that_may_not_be_killed_is_named(tmp_path, monkeypatch, dies):
    """EPERM is also what macOS says of a group of zombies: that is none."""
    path, killpg = tmp_path / "sock", os.killpg
    program = [sys.executable, "-c", "import time; time.sleep(60)", str(path)]
    earlier = subprocess.Popen(program, start_new_session=True)
    wait_until(lambda: psutil.Process(earlier.pid).cmdline() == program)  # it has none in the middle of exec

    def refuse(group: int, number: int) -> None:
        if dies:
            killpg(group, number)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.killpg", refuse)
    if dies:
        end_supervisor(path)
    else:
        with pytest.raises(SystemExit, match=f"may not be killed; on that host: ps -p {earlier.pid}"):
            end_supervisor(path)
    earlier.kill()
    earlier.wait()
