"""Whether a person needs this machine: it runs on battery, or other programs use much of its processor (yield_when).

A look costs a millisecond, also while this worker is left out.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from .readings import battery

EVERY_S = 5.0
# A cable that is plugged in elsewhere, or a program that starts, is no reason to leave; a pause in a call or between
# two builds none to return, as the others share out the work anew each time. So a host changes at most every 150 s.
BEGINS_S, ENDS_S = 30.0, 120.0
# A video call keeps about one core busy, an idle desktop with an open browser a third of one. Beside training, another
# program gets less than it would like: on two cores one that computes without a pause was seen to get 0.7 of one.
BUSY_CORES, BUSY_SHARE = 0.75, 0.3  # of one core, or of the whole machine, whichever is less
CALM = 0.5  # it is over at this part of the above


class Lasting:
    """A condition that holds once it has been so for BEGINS_S, until it has not been so for ENDS_S."""

    def __init__(self) -> None:
        self.holds = False
        self._since: float | None = None  # when the opposite of `holds` was seen first

    def look(self, now: float, *, begins: bool, ends: bool) -> bool:
        if not (ends if self.holds else begins):
            self._since = None
            return self.holds
        self._since = now if self._since is None else self._since
        if now - self._since >= (ENDS_S if self.holds else BEGINS_S):
            self.holds, self._since = not self.holds, None
        return self.holds


class OtherPrograms:
    """Measures how many cores programs use that are not ours. Ours are of any run: launcher, workers, commands."""

    def __init__(self) -> None:
        self._is_ours: dict[psutil.Process, bool] = {}
        self._ours: dict[psutil.Process, float] = {}  # seconds of the processor that each has used
        self._busy_s, self._looked = 0.0, 0.0
        self.cores()

    def cores(self) -> float:
        """Return the mean since the last call."""
        before, busy_before, looked_before = self._ours, self._busy_s, self._looked
        times = psutil.cpu_times()
        self._looked, self._ours = time.monotonic(), self._seconds_of_ours()
        self._busy_s = times.user + times.nice + times.system
        own = sum(seconds - before.get(process, 0.0) for process, seconds in self._ours.items())
        passed = max(self._looked - looked_before, 1e-3)
        return max(0.0, self._busy_s - busy_before - own) / passed

    def _seconds_of_ours(self) -> dict[psutil.Process, float]:
        here = [*psutil.process_iter()]  # it keeps what it knows of a process: only new ones are read
        before, self._is_ours = self._is_ours, {}
        found = {}
        for process in here:
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = before[process] if process in before else self._look_whose(process)
                self._is_ours[process] = is_ours
                if is_ours:
                    times = process.cpu_times()
                    found[process] = times.user + times.system
        return found

    def _look_whose(self, process: psutil.Process) -> bool:
        """Say whether it is this process, one of this program's, or started by one. Processes come in their order."""
        if process.pid == os.getpid():
            return True
        words = process.cmdline()
        if any(word.startswith("distributed.") or Path(word).name == "multimac" for word in words[:4]):
            return True
        parent = process.ppid()
        return any(is_ours and other.pid == parent for other, is_ours in self._is_ours.items())


def is_on_battery() -> bool:
    """Say whether this machine has a battery and knows that nothing charges it."""
    return battery().get("on_mains") is False


class InUse:
    """Tells the launcher for which of `reasons` (battery, busy) this host is to be left out, "" for none."""

    def __init__(
        self,
        reasons: Sequence[str],
        send: Callable[[dict], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_battery: Callable[[], bool] = is_on_battery,
        others_cores: Callable[[], float] | None = None,
    ):
        self._lasting = {reason: Lasting() for reason in reasons}
        self._send, self._clock, self._on_battery = send, clock, on_battery
        self._others_cores = others_cores or (OtherPrograms().cores if "busy" in reasons else lambda: 0.0)
        self._limit = min(BUSY_CORES, BUSY_SHARE * (os.cpu_count() or 1))
        self._told = ""

    def start(self) -> None:
        """Look from now on, in a thread; without a reason to look for there is none."""
        if self._lasting:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.turn()

    def turn(self) -> None:
        now = self._clock()
        try:
            on_battery, cores = "battery" in self._lasting and self._on_battery(), self._others_cores()
        except Exception:  # whatever psutil met, as of a battery that was taken out: the next look may tell
            return
        looks = {
            "battery": (on_battery, not on_battery),
            "busy": (cores > self._limit, cores < CALM * self._limit),
        }
        holding = [r for r, one in self._lasting.items() if one.look(now, begins=looks[r][0], ends=looks[r][1])]
        why = holding[0] if holding else ""
        if why != self._told:
            self._told = why
            self._send({"type": "in_use", "why": why})
