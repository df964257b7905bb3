"""The one screen of a run that lasts, in a real terminal: keys, sizes, and what the terminal is like afterwards."""

import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

PROJECT = Path(__file__).parents[3]
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
FOLLOWER = """
import subprocess, sys
from pathlib import Path
from multimac.commands import attach_stop
from multimac.view.terminal import Console
run = Path(sys.argv[1])
attach_stop.open_page = lambda run_dir: (run_dir / "opened").open("a").write("x") and "opens in your browser"
launcher = '''
import os, pathlib, signal, time
pathlib.Path("pid").write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not pathlib.Path("over").exists():
    time.sleep(0.05)
'''
start = lambda: subprocess.Popen([sys.executable, "-c", launcher], cwd=run, start_new_session=True)
print("status", int(attach_stop._followed(Console(), run, start)))
"""
BEGIN = {"type": "phase", "phase": "start", "hosts": ["h1", "h2"]}
LONG = "a warning that is longer than the terminal is wide, and is there in full when all is over, in one piece"
END = {"type": "end", "status": 0, "message": ""}


class Terminal:
    """A command on a terminal of its own, which is in front there as a shell's would be."""

    def __init__(self, run: Path, *, has_stdin: bool = True):
        self.run, self.seen = run, ""
        self.tell(BEGIN)
        self.master, self.slave = os.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, str(run)],
            stdin=self.slave if has_stdin else subprocess.DEVNULL,
            stdout=self.slave,
            stderr=self.slave,
            cwd=PROJECT,
            env={**os.environ, "PYTHONPATH": f"{PROJECT}/gym:{PROJECT}", "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )

    def tell(self, *events: dict) -> None:
        with (self.run / "events.jsonl").open("a") as file:
            file.writelines(json.dumps({"time": time.time(), **event}) + "\n" for event in events)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self) -> str:
        while select.select([self.master], [], [], 0.05)[0]:
            self.seen += os.read(self.master, 65536).decode()
        return self.seen

    def until(self, text: str, count: int = 1) -> None:
        wait_until(lambda: self.read().count(text) >= count, 30)

    def end(self, *events: dict) -> str:
        """End the run, and return what is on the terminal after the screen has been left."""
        self.tell(*events)
        (self.run / "over").touch()
        wait_until(lambda: (self.read(), self.process.poll())[1] is not None, 30)
        assert termios.tcgetattr(self.slave) == self.before
        assert self.read().count(ENTERED) == self.seen.count(LEFT)
        return self.seen.rpartition(LEFT)[2]


@pytest.fixture
def terminal(tmp_path):
    made: list[Terminal] = []

    def start(**options) -> Terminal:
        made.append(Terminal(tmp_path, **options))
        return made[0]

    yield start
    (tmp_path / "over").touch()
    for one in made:
        one.process.kill()
        one.process.wait()
        os.close(one.master)
        os.close(one.slave)


def test_lines_are_printed_in_full_once_the_screen_is_left(terminal):
    shown = terminal()
    shown.until("w: live page")
    shown.tell({"type": "warning", "what": LONG}, {"type": "warning", "what": "\x1b[2Jowned"})
    shown.until("[2Jowned")
    shown.resize(40, 10)
    shown.tell({"type": "validation", "host": "h1", "step": 4, "loss": 1.5})
    shown.until("step 4: validation loss 1.500")
    left = shown.end(END)
    assert f"{LONG} [2Jowned step 4: validation loss 1.500 status 0" in " ".join(left.split())


def test_a_key_opens_the_page_and_pasted_text_and_arrows_do_nothing(terminal):
    shown = terminal()
    shown.until("w: live page")
    for keys in ("w w\nw", "\x1b[A"):
        shown.press(keys)
        time.sleep(0.5)
    assert not (shown.run / "opened").exists()
    shown.press("w")
    shown.until("opens in your browser")
    shown.end(END)
    assert (shown.run / "opened").read_text() == "x"


def test_a_key_leaves_the_run_going_on(terminal):
    shown = terminal()
    shown.until("d: leave it running")
    shown.press("d")
    wait_until(lambda: shown.process.poll() is not None, 30)
    told = " ".join(shown.read().rpartition(LEFT)[2].split())
    assert "to follow it: multimac runs attach" in told and told.endswith("status 0")
    assert termios.tcgetattr(shown.slave) == shown.before
    assert psutil.pid_exists(int((shown.run / "pid").read_text()))
    shown.end()


def test_ctrl_c_reaches_the_run_and_ctrl_z_leaves_the_screen(terminal):
    shown = terminal()
    shown.until("w: live page")
    shown.press("\x1a")  # this process has no shell that would wake it
    shown.until(ENTERED, 2)
    shown.press("\x03")
    shown.until("finishing the step")
    assert "status 130" in shown.end(END | {"status": 130, "message": "stopped"})


def test_a_run_that_fails_leaves_the_terminal_as_it_was(terminal):
    shown = terminal()
    shown.until("w: live page")
    assert "RunError: h2: asleep" in shown.end(
        {"type": "warning", "what": "hot"}, END | {"status": 6, "message": "h2: asleep"}
    )


def test_nothing_is_read_where_stdin_is_no_terminal(terminal):
    shown = terminal(has_stdin=False)
    shown.until("Ctrl-C: stop")
    shown.press("w")
    assert "status 0" in shown.end(END) and "live page" not in shown.seen
    assert not (shown.run / "opened").exists()
