"""Faults at random while a run goes on:

    with Mischief(lab, schedule(1, ["h2", "h3"], seconds=60), Aim(process="distributed.")) as mischief:
        ...
    print(*mischief.deeds, sep="\\n")

The same seed makes the same faults at the same times.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab import faults
from lab.errors import LabError
from lab.hosts import LabHost, user_home
from lab.lab import Lab

KINDS = ("kill", "freeze", "sleep", "cut", "blackhole", "slow", "disk", "clock", "garbage", "damage")
RATES = ("256kbit", "1mbit", "10mbit")
SKEWS_S = (-86400.0, -90.0, 90.0, 3600.0, 400 * 86400.0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`at` seconds after the beginning, for `seconds`; `seed` decides what the kind leaves open."""

    at: float
    host: str
    kind: str
    seconds: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LabError(f"no kind of fault {self.kind!r}: {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What faults hit: part of a command line, a folder on a `small_disk`, files by a pattern for `Path.glob`.

    Paths are absolute or relative to a host's home; `{host}` in them stands for its name.
    """

    process: str
    disk: str = ""
    files: str = ""


@dataclass(frozen=True, kw_only=True)
class Deed:
    """`done` is "begun", "undone" or "missed" (there was nothing to hit); the times are those when that began."""

    fault: Fault
    done: str
    words: str
    wall: float
    monotonic: float
    took: float


class Mischief:
    """Does planned faults to a lab's hosts, from the moment it is entered; left, it undoes what is not undone yet.

    What cannot be done (LabError, OSError: no such process now) is a deed too; what cannot be undone raises.
    """

    def __init__(self, lab: Lab, planned: Sequence[Fault], aim: Aim):
        self.lab, self.planned, self.aim = lab, planned, aim
        for fault in planned:
            lab[fault.host]  # LabError now, not a deed later
        self.deeds: list[Deed] = []
        self._open: dict[Fault, ExitStack] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Mischief:
        self._thread = ThreadPoolExecutor(1)
        self._end = self._thread.submit(self._run)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.shutdown()
        self._end.result()

    def _run(self) -> None:
        start = time.monotonic()
        moments = [(fault.at, self._begin, fault) for fault in self.planned]
        moments += [(fault.at + fault.seconds, self._undo, fault) for fault in self.planned]
        with ExitStack() as at_the_end:
            for fault in self.planned:
                at_the_end.callback(self._undo, fault)
            for at, act, fault in sorted(moments, key=lambda moment: moment[0]):
                if self._stop.wait(start + at - time.monotonic()):
                    break
                act(fault)

    def _begin(self, fault: Fault) -> None:
        undo, began = ExitStack(), (time.time(), time.monotonic())
        try:
            words = begin(fault, self.lab[fault.host], self.aim, undo)
        except (LabError, OSError) as error:
            self._note(fault, "missed", began, str(error))
        else:
            self._note(fault, "begun", began, words)
            if fault.kind != "kill":
                self._open[fault] = undo

    def _undo(self, fault: Fault) -> None:
        began = time.time(), time.monotonic()
        if undo := self._open.pop(fault, None):
            undo.close()
            self._note(fault, "undone", began)

    def _note(self, fault: Fault, done: str, began: tuple[float, float], words: str = "") -> None:
        wall, monotonic = began
        took = time.monotonic() - monotonic
        self.deeds.append(Deed(fault=fault, done=done, words=words, wall=wall, monotonic=monotonic, took=took))


def begin(fault: Fault, host: LabHost, aim: Aim, undo: ExitStack) -> str:
    """Do one fault; `undo` undoes it. Returns what was done, in words."""
    rng, enter = random.Random(fault.seed), undo.enter_context
    words = ""
    match fault.kind:
        case "kill":
            words = ", ".join(process.command[-1] for process in faults.kill(host, aim.process))
        case "freeze":
            pattern = rng.choice((aim.process, ""))
            enter(faults.frozen(host, pattern))
            words = pattern or "the whole host"
        case "sleep":
            enter(faults.asleep(host))
        case "cut":
            enter(faults.cut(host))
        case "blackhole":
            words = rng.choice(("in", "out", "both"))
            enter(faults.blackhole(host, way=words))
        case "slow":
            words = rng.choice(RATES)
            enter(faults.slow(host, words))
        case "disk":
            folder = aim.disk.format(host=host.name)
            words = f"{enter(faults.full_disk(host, folder))} bytes were free in {folder}"
        case "clock":
            seconds = rng.choice(SKEWS_S)
            enter(faults.skewed(host, seconds))
            words = f"{seconds:+.0f} s"
        case "garbage":
            made = enter(faults.garbage(host, aim.process, seed=fault.seed))
            words = f"connections made to each port: {made}"
        case "damage":
            words = enter(faults.damaged(any_file(host, aim, rng), seed=fault.seed, cut=rng.random() < 0.5))
    return words


def any_file(host: LabHost, aim: Aim, rng: random.Random) -> Path:
    pattern = str(user_home() / aim.files.format(host=host.name))
    found = sorted(path for path in host.path("/").glob(pattern.lstrip("/")) if path.is_file() and path.stat().st_size)
    if not found:
        raise LabError(f"{host.name}: no file {pattern}")
    return rng.choice(found)
