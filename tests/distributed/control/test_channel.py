"""The worker's end of the control channel, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

from distributed.control.channel import BAD_LINE, LAUNCHER_GONE
from distributed.control.messages import split_line
from distributed.hosts.host_process import environment
from distributed.hosts.paths import PROJECT

TOY = [sys.executable, str(Path(__file__).with_name("toy_member.py"))]
QUICK = {"heartbeat_s": 0.1, "rescue_s": 0.5, "late_rescue_s": 0.5}


@pytest.fixture
def start():
    started = []

    def begin(do: str = "", **timeouts: float) -> subprocess.Popen:
        """A worker without a launcher, once it has done what it does first."""
        process = subprocess.Popen(
            TOY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(PROJECT),
        )
        started.append(process)
        tell(process, json.dumps({"do": do, "timeouts": QUICK | timeouts}))
        assert any(b"here" in line for line in process.stdout)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def tell(process: subprocess.Popen, line: str) -> None:
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()


def rescues(path: Path) -> str:
    return f"channel.rescue = lambda: open({str(path)!r}, 'w').close()"


def errors(process: subprocess.Popen) -> list[dict]:
    events = [split_line(line.decode())[1] for line in process.stdout]
    return [event for event in events if event and event["type"] == "error"]


def test_a_worker_whose_launcher_is_gone_saves_and_ends(start, tmp_path):
    process = start(rescues(tmp_path / "saved"))
    process.stdin.close()
    assert process.wait(10) == LAUNCHER_GONE and (tmp_path / "saved").exists()


@pytest.mark.parametrize(("word", "saved"), [("rescue", True), ("quit", False)])
def test_a_worker_ends_as_it_is_told(start, tmp_path, word, saved):
    process = start(rescues(tmp_path / "saved"))
    tell(process, word)
    assert process.wait(10) == LAUNCHER_GONE and (tmp_path / "saved").exists() == saved


NO_ADDRESS = '{"type": "meeting", "address": "mac.local", "port": 1}'
WRONG = ["", "{rubbish", '{"type": "unsent"}', '{"type": "generation"}', NO_ADDRESS, "beat all", "dance"]


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_cannot_be_understood_ends_the_worker_with_that_reason(start, tmp_path, line):
    process = start(rescues(tmp_path / "saved"))
    tell(process, line)
    assert process.wait(5) == BAD_LINE and (tmp_path / "saved").exists()
    [error] = errors(process)
    assert error["kind"] == "BadLine" and "cannot be understood" in error["message"]


def test_a_worker_that_hears_nothing_ends_though_nobody_reads_its_output(start):
    """As behind a pulled cable: no end of file, and a pipe that fills up and blocks whoever writes."""
    many = "import threading; flood = lambda: [send_event({'type': 'step', 'text': 'x' * 1000}) for _ in range(9999)]"
    process = start(f"{many}; threading.Timer(0.3, flood).start()", launcher_silence_s=1.0, early_rescue_s=0.5)
    assert process.wait(10) == LAUNCHER_GONE


def test_a_worker_that_hears_nothing_for_long_saves_before_it_ends(start, tmp_path):
    """It may be reached again, and then goes on."""
    process = start(rescues(tmp_path / "saved"), launcher_silence_s=2.0, early_rescue_s=0.5)
    wait_until((tmp_path / "saved").exists)
    assert process.poll() is None
    tell(process, "beat 1")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    assert process.wait(10) == LAUNCHER_GONE


def test_a_rescue_that_hangs_does_not_keep_the_worker(start):
    process = start("channel.rescue = lambda: time.sleep(60)")
    process.stdin.close()
    assert process.wait(10) == LAUNCHER_GONE


def test_a_worker_that_thaws_gives_the_launcher_its_time_to_speak(start):
    process = start(launcher_silence_s=0.8, early_rescue_s=0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert process.wait(10) == LAUNCHER_GONE


def test_a_heartbeat_says_which_of_the_launchers_was_heard_last(start):
    process = start()
    tell(process, "beat 17")
    heard = (split_line(line.decode())[1] for line in process.stdout)
    assert any(event and event.get("heard") == 17 for event in heard)


def test_words_reach_those_who_wait_for_them(start):
    waits = "channel.stopping.wait() and channel.saving.wait() and print('both', channel.unsent, channel.meeting)"
    process = start(f"import threading; threading.Thread(target=lambda: {waits}).start()")
    meeting = '{"type": "meeting", "address": "10.0.0.9"}'
    for line in ("stop", '{"type": "unsent", "files": ["a.wav"]}', meeting, "save"):
        tell(process, line)
    assert any(b"both {'a.wav'} 10.0.0.9" in line for line in process.stdout)
