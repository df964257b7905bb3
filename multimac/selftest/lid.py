"""`--lid`: beats of all hosts while somebody closes a lid, and who came back."""

from __future__ import annotations

import time

from distributed.ssh.connection import Remote
from whisper_tuner.errors import TunerError

from .asking import Asked, Asking, Place, ProbeLost

WATCH_S = 60.0
BACK_S = 30.0  # for a host to answer again, after that
SILENCE_S = 3.0
AGAIN_S = 2.0  # for a new connection, as a run tries it
ASK = "Now close the lid of one Mac, wait 20 seconds, and open it again. This takes a minute; without a lid, just wait."


def lid(asks: Asking) -> list[dict]:
    asks.desk.ask_user(ASK)
    return asks.on_all(lambda place: _Watch(asks, place).run())


class _Watch:
    """One host's beats, by the wall clock: the other one may stand still while this machine sleeps itself."""

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
            self._hear()
            own = event.get("answer")
        silent = time.time() - self.heard
        return {"silences": self.silences, "connections": self.connections, "own": own, "silent_at_end_s": silent}

    def _start(self) -> Asked:
        seconds = max(1.0, self.until - time.time())
        return self.asks.start(self.place, "beats", seconds=seconds, life_s=seconds + 60)

    def _hear(self) -> None:
        now = time.time()
        if now - self.heard > SILENCE_S:
            self.silences.append([round(self.heard - self.began, 1), round(now - self.began, 1)])
        self.heard = now

    def _again(self, ended: Asked) -> Asked:
        """The connection is gone: another one, once the host answers."""
        try:
            if isinstance(self.place.machine, Remote):
                self.place.machine = Remote.connect(self.place.host, timeout=AGAIN_S)
            self.connections += 1
            return self._start()
        except TunerError:
            time.sleep(1.0)
            return ended
