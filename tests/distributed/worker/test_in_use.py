"""When a host asks to be left out: over recorded answers of psutil, as most machines here have no battery."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from distributed.worker import in_use
from distributed.worker.in_use import BEGINS_S, ENDS_S, EVERY_S, InUse, OtherPrograms, is_on_battery


class Day:
    """A machine through a day: what it says at each look, until then."""

    def __init__(self, *reasons: str):
        self.now, self.battery, self.cores, self.said = 0.0, False, 0.0, []
        self.watch = InUse(
            reasons,
            lambda event: self.said.append((self.now, event["why"])),
            clock=lambda: self.now,
            on_battery=lambda: self.battery,
            others_cores=lambda: self.cores,
        )

    def goes_on(self, seconds: float, *, battery: bool = False, cores: float = 0.0) -> None:
        self.battery, self.cores = battery, cores
        for _ in range(round(seconds / EVERY_S)):
            self.watch.turn()
            self.now += EVERY_S


def test_a_battery_counts_once_it_lasts_and_so_do_the_mains():
    day = Day("battery")
    day.goes_on(60)
    day.goes_on(BEGINS_S - EVERY_S, battery=True)  # carried to another socket
    day.goes_on(60)
    day.goes_on(600, battery=True, cores=8)
    day.goes_on(ENDS_S - EVERY_S)
    day.goes_on(60, battery=True)
    day.goes_on(300)
    assert [why for _, why in day.said] == ["battery", ""]
    began, ended = (when for when, _ in day.said)
    assert began == 60 + BEGINS_S - EVERY_S + 60 + BEGINS_S and ended - began > 600


def test_other_programs_count_while_they_take_much_and_what_comes_and_goes_changes_little(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    day = Day("busy")
    day.goes_on(600, cores=0.6, battery=True)
    for _ in range(30):  # a page loads now and then
        day.goes_on(20, cores=3)
        day.goes_on(20, cores=0.1)
    assert day.said == []
    for _ in range(10):  # a call, with pauses
        day.goes_on(120, cores=1.2)
        day.goes_on(60, cores=0.2)
        day.goes_on(60, cores=0.5)
    assert [why for _, why in day.said] == ["busy"]
    day.goes_on(ENDS_S + EVERY_S, cores=0.1)
    assert [why for _, why in day.said] == ["busy", ""]


def test_one_reason_may_follow_the_other():
    day = Day("battery", "busy")
    day.goes_on(60, cores=100)
    day.goes_on(60, cores=100, battery=True)
    day.goes_on(600, battery=True)
    assert [why for _, why in day.said] == ["busy", "battery"]


def test_a_look_that_fails_changes_nothing():
    day = Day("battery")
    day.goes_on(BEGINS_S + EVERY_S, battery=True)
    as_it_was, day.watch._on_battery = day.watch._on_battery, lambda: Path("/sys/BAT0/status").read_text() == ""
    day.goes_on(ENDS_S)
    day.watch._on_battery = as_it_was
    day.goes_on(ENDS_S + EVERY_S)
    assert [why for _, why in day.said] == ["battery", ""] and day.said[-1][0] > 2 * ENDS_S


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, False),  # a Mac mini
        (SimpleNamespace(percent=80, secsleft=9000, power_plugged=False), True),
        (SimpleNamespace(percent=80, secsleft=-2, power_plugged=True), False),
        (SimpleNamespace(percent=80, secsleft=-1, power_plugged=None), False),
    ],
)
def test_on_battery_is_a_machine_that_says_so(monkeypatch, answer, expected):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: answer, raising=False)
    assert is_on_battery() is expected
    monkeypatch.delattr(psutil, "sensors_battery")
    assert not is_on_battery()


class Recorded:
    """A process as psutil shows it. cmdline: None for one that may not be read."""

    def __init__(self, pid: int, ppid: int, cmdline: list[str] | None):
        self.pid, self._ppid, self._cmdline, self.seconds = pid, ppid, cmdline, 100.0

    def cmdline(self) -> list[str]:
        if self._cmdline is None:
            raise psutil.AccessDenied
        return self._cmdline

    def ppid(self) -> int:
        return self._ppid

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.seconds, system=0.0)


def test_what_our_own_processes_use_is_no_reason(monkeypatch):
    windows = Recorded(90, 1, None)
    worker, other_rank = (
        Recorded(os.getpid(), 1, ["python"]),
        Recorded(2**22, 1, ["py", "-m", "distributed.worker.main"]),
    )
    child, browser = Recorded(2**22 + 1, 2**22, ["ffmpeg"]), Recorded(2**22 + 2, 1, ["browser", "distributed"])
    command = Recorded(2**22 + 3, 1, ["python", "/home/me/.venv/bin/multimac", "train"])
    every, now = [windows, worker, other_rank, child, browser, command], [0.0]
    busy = lambda: SimpleNamespace(user=sum(p.seconds for p in every), nice=0.0, system=0.0)  # noqa: E731
    monkeypatch.setattr(in_use.psutil, "process_iter", lambda: iter(every))
    monkeypatch.setattr(in_use.psutil, "cpu_times", busy)
    monkeypatch.setattr(in_use.time, "monotonic", lambda: now[0])
    look = OtherPrograms()
    for process, seconds in zip(every, (2.0, 30.0, 30.0, 10.0, 3.0, 1.0), strict=True):
        process.seconds += seconds
    now[0] = 10.0
    assert look.cores() == pytest.approx(0.5)
    now[0] = 20.0
    assert look.cores() == 0.0
