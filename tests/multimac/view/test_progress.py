"""Bars on a terminal, lines elsewhere; no escape sequence where a terminal is dumb."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from multimac.view.progress import PlainProgress, count, progress, share, transfer, working
from multimac.view.transfers import STEPS_EVERYWHERE

PROJECT = Path(__file__).parents[3]


def test_a_line_every_ten_seconds_and_one_at_the_end():
    said, now = io.StringIO(), [0.0]
    with PlainProgress(Console(file=said), count, lambda: now[0]) as bars:
        task = bars.add_task("[base] test.csv", total=40)
        for done in range(1, 41):
            now[0] += 1.0
            bars.update(task, completed=done)
    lines = said.getvalue().splitlines()
    assert lines == [
        "[base] test.csv: 10/40, 0:30 left",
        "[base] test.csv: 20/40, 0:20 left",
        "[base] test.csv: 30/40, 0:10 left",
        "[base] test.csv: 40/40, took 0:40",
    ]


def test_a_short_task_and_one_that_stands_still_say_nothing():
    said, now = io.StringIO(), [0.0]
    with PlainProgress(Console(file=said), transfer, lambda: now[0]) as bars:
        short, slow = bars.add_task("short", total=1), bars.add_task("slow")
        bars.update(short, completed=1)
        now[0] = 11.0
        bars.update(slow, total=4_000_000, completed=2_000_000)
    assert said.getvalue().startswith("slow: 2.0 MB of 4.0 MB") and said.getvalue().count("\n") == 1


def test_what_cannot_be_measured_says_that_it_goes_on():
    said = io.StringIO()
    with working(Console(file=said), "loading [the] model", every_s=0.05) as tell:
        time.sleep(0.12)
        tell("writing")
        time.sleep(0.1)
    lines = said.getvalue().splitlines()
    assert lines[0] == "loading [the] model: 0:00 so far" and lines[-1] == "writing: 0:00 so far"


def test_figures_stay_on_one_line_in_80_columns():
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with progress(console, transfer) as bars:
        bars.get_time = lambda: now[0]
        bars.add_task(STEPS_EVERYWHERE, total=None)
        sent = bars.add_task("192.168.178.20", total=376_100_000)
        now[0] = 7.0
        bars.update(sent, completed=111_200_000)
        shown = io.StringIO()
        Console(file=shown, width=80).print(bars.get_renderable())
    steps, sending = shown.getvalue().splitlines()
    assert steps.startswith(STEPS_EVERYWHERE) and steps.rstrip().endswith("0:07 so far")
    assert "111.2 MB of 376.1 MB" in sending and "0:17 left" in sending


@pytest.mark.parametrize(("term", "moves"), [("xterm", True), ("dumb", False)])
def test_only_a_terminal_that_can_gets_a_bar(term, moves):
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, _environ={"TERM": term})
    with progress(console, share) as bars, working(console, "loading"):
        bars.update(bars.add_task("a.wav", total=2), completed=1)
    assert ("50 %" in said.getvalue() and "\x1b[" in said.getvalue()) == moves
    assert moves or said.getvalue() == ""


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """All that a command writes to a terminal of its own."""
    master, slave = pty.openpty()
    command = [sys.executable, str(PROJECT / "cli_typer.py"), *map(str, arguments)]
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | environment
    process = subprocess.Popen(command, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    said = b""
    with contextlib.suppress(OSError):  # EIO is the end
        while part := os.read(master, 4096):
            said += part
    process.wait(60)
    os.close(master)
    return said.decode()


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_message_has_colours_only_where_they_are_wanted(tmp_path, environment, coloured):
    said = on_a_terminal("config", "show", "--config", tmp_path / "no.ini", **environment)
    assert said.strip() and ("\x1b[31m" in said) == ("\x1b" in said) == coloured
    assert said.count("\r") == said.count("\r\n")
