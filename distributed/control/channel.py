"""The worker's end of the control channel: a heartbeat each way, and what the worker does when the launcher is gone.

The launcher writes lines to the worker's stdin: the RunSpec, then

    beat N                                   a heartbeat; the worker's own say which it has heard last
    stop                                     finish the step, agree, and end
    save                                     write the model: one worker is asked to, at the end
    rescue                                   the run breaks off: save what was agreed, and end
    quit                                     end at once
    {"type": "unsent", "files"}              audio that cannot be sent
    {"type": "peers", "peers"}               where the other workers listen, see peer_probe.py
    {"type": "meeting", "address"}           towards which groups form: the launcher's machine has a new address
    {"type": "generation" | "commit" | ...}  from the coordinator, see exogym.membership

The worker writes events to its stdout, see messages.py. On the launcher's machine it is the launcher's child; elsewhere
it is the child of a supervisor that outlives the connection, see supervisor.py. A worker need not know which.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from exogym.membership.client import CoordinatorClient

from .messages import send_event
from .timeouts import Timeouts

LAUNCHER_GONE, BAD_LINE = 75, 76  # exit statuses of a worker: its launcher is gone; it cannot be understood


class ControlChannel:
    """Hears the launcher from threads of its own, since the main thread sits in long computations and collectives.

    `rescue` saves what must not be lost, from a thread: before the process ends, and when that becomes likely.
    """

    def __init__(self, stream: BinaryIO, timeouts: Timeouts | None = None):
        self.stopping = threading.Event()
        self.saving = threading.Event()
        self.coordinator = CoordinatorClient()
        self.unsent: set[str] = set()
        self.meeting = ""  # the launcher's address, if it is not the RunSpec's any more
        self.rescue: Callable[[], None] = lambda: None
        self.meet: Callable[[list], None] = lambda peers: None
        self._stream, self._timeouts = stream, timeouts or Timeouts()
        self._heard = threading.Event()  # since the silence was last looked at
        self._last_beat = 0
        # The thread that counts the silence never writes: a dead link may block every writer.
        for work in (self._listen, self._count_silence, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._stream:
                if not line.endswith(b"\n"):
                    break
                self._heard.set()
                try:
                    self._take(line.strip())
                except Exception as error:  # a thread that ended here would look like a launcher that fell silent
                    said = f"the launcher's line {line[:80]!r} cannot be understood: {type(error).__name__}: {error}"
                    send_event({"type": "error", "kind": "BadLine", "message": said})
                    self._rescue_and_end(said, self._timeouts.rescue_s, BAD_LINE)
        self._rescue_and_end("the launcher is gone", self._timeouts.rescue_s)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"{"):
            message = json.loads(line)
            kind = message["type"]
            if kind == "unsent":
                self.unsent.update(message["files"])
            elif kind == "peers":
                self.meet(message["peers"])
            elif kind == "meeting":
                self.meeting = str(ipaddress.IPv4Address(message["address"]))
            else:
                self.coordinator.put(message)
            return
        word, *about = line.split()
        if word == b"beat":
            self._last_beat = int(about[0])
        elif word == b"stop":
            self.stopping.set()
        elif word == b"save":
            self.saving.set()
        elif word == b"rescue":
            self._rescue_and_end("the run has broken off", self._timeouts.rescue_s)
        elif word == b"quit":
            os._exit(LAUNCHER_GONE)
        else:
            raise ValueError("an unknown word")

    def _count_silence(self) -> None:
        """Count in turns of its own and not by a clock: after a sleep the launcher gets its time to say something."""
        silent, rescued, turn = 0.0, False, self._timeouts.heartbeat_s
        while silent < self._timeouts.launcher_silence_s:
            time.sleep(turn)
            silent += turn
            if self._heard.is_set():
                self._heard.clear()
                silent, rescued = 0.0, False
            elif not rescued and silent >= self._timeouts.early_rescue_s:
                rescued = True
                threading.Thread(target=self.rescue, daemon=True).start()
        reason = f"nothing heard from the launcher for {self._timeouts.launcher_silence_s:.0f} s"
        self._rescue_and_end(reason, self._timeouts.late_rescue_s)

    def _beat(self) -> None:
        while True:
            send_event({"type": "beat", "heard": self._last_beat})
            time.sleep(self._timeouts.heartbeat_s)

    def _rescue_and_end(self, reason: str, rescue_s: float, status: int = LAUNCHER_GONE) -> None:
        def last_words() -> None:
            self.rescue()
            print(f"stopping: {reason}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=last_words, daemon=True)
        thread.start()
        thread.join(rescue_s)
        os._exit(status)
