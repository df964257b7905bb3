"""`--lid`: hears beats of all hosts while somebody closes a lid, and tells who came back."""

from __future__ import annotations

import time

from distributed.checkup.findings import Finding, ok
from distributed.ssh.connection import Remote
from whisper_tuner.errors import TunerError

from .asking import Asked, Asking, Place, ProbeLost
from .machine import failed

WATCH_S = 60.0
BACK_S = 30.0  # for a host to answer again, after that
SILENCE_S = 3.0
AGAIN_S = 2.0  # for a new connection, as a run tries it
ASK = "Now close the lid of one Mac, wait 20 seconds, and open it again. This takes a minute; without a lid, just wait."


def watch(asks: Asking) -> list[dict]:
    asks.desk.ask_user(ASK)
    return asks.on_all(lambda place: _Watch(asks, place).run())


class _Watch:
    """Hears one host, by the wall clock: the other one may stand still while this machine sleeps itself."""

    def __init__(self, asks: Asking, place: Place):
        self.asks, self.place = asks, place
        self.began = self.heard = time.time()
        self.until = self.began + WATCH_S
        self.silences: list[list[float]] = []
        self.connections = 1

    def run(self) -> dict:
        asked, own = self._start(), None
        while own is None and time.time() < self.until + BACK_S:
            try:
                event = asked.next("beat", "answer", timeout=1.0)
            except ProbeLost:
                asked = self._again(asked) if asked.has_ended else asked
                continue
            now = time.time()
            if now - self.heard > SILENCE_S:
                self.silences.append([round(self.heard - self.began, 1), round(now - self.began, 1)])
            self.heard = now
            own = event.get("answer")
        silent = time.time() - self.heard
        return {"silences": self.silences, "connections": self.connections, "own": own, "silent_at_end_s": silent}

    def _start(self) -> Asked:
        seconds = max(1.0, self.until - time.time())
        return self.asks.start(self.place, "system.beats", seconds=seconds, life_s=seconds + 60)

    def _again(self, ended: Asked) -> Asked:
        """Connect again, for the connection is gone; the probe that has ended if the host does not answer yet."""
        try:
            if isinstance(self.place.machine, Remote):
                self.place.machine = Remote.connect(self.place.host, timeout=AGAIN_S)
            self.connections += 1
            return self._start()
        except TunerError:
            time.sleep(1.0)
            return ended


def lid(about: dict) -> Finding:
    own = about["own"]
    if own is None:
        return failed(f"it has not come back: silent for {about['silent_at_end_s']:.0f} s", **about)
    slept = own["wall_gap_s"]
    if not about["silences"] and slept < 3.0:
        return ok(f"it did not sleep; longest gap {slept:.1f} s", **about)
    when = ", ".join(f"from {begin:.0f} to {end:.0f} s" for begin, end in about["silences"])
    clock = f"its clocks jumped by {slept:.0f} s (wall) and {own['steady_gap_s']:.0f} s (monotonic)"
    way = "the connection survived" if about["connections"] == 1 else f"connections made: {about['connections']}"
    return ok(f"silent {when or 'nowhere'}; {clock}; {way}", **about)
