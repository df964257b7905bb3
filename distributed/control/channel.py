"""The line between the launcher and one worker: a heartbeat each way, and what the worker does when it falls silent.

The launcher writes lines to the worker's stdin: the RunSpec, then `beat` twice a second, `stop`, `save` or `quit`, and
as JSON what the coordinator says (see exogym.membership.messages), {"type": "unsent", "files"} for audio that cannot
be sent, and {"type": "peers", "peers"} for where the other workers listen (see peer_probe.py).
The worker writes events to its stdout, JSON lines after a record separator (RFC 7464), amid whatever else it prints;
its beats say how many lines it has heard. A pulled cable sends no end of file, so silence counts as well.

A connection may die while both ends live: a lid was closed, a network changed. The launcher then comes over another,
through relay.py and the worker's `door`, and both repeat what has not arrived: no line is lost, and none comes twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from exogym.membership.client import CoordinatorClient

from .messages import output, send_event
from .relay import GREETING_S

BEAT_S = 0.5  # a slow link that is full delays one by up to two seconds
# Without a word from the launcher a worker ends. Later is better, for it may be reached again; but nothing of a run may
# be left 25 s after its end.
SILENCE_S = 23.0
SAVING_PART = 0.5  # of it, after which it saves what must not be lost
TICK_S = 0.5
RESCUE_S, LATE_RESCUE_S = 8.0, 1.0  # for saving before the end: at once, and where it has begun before
GO_ON = b"go on\n"
LAUNCHER_GONE = 75  # exit status of a worker whose launcher is gone


class Lifeline:
    """Watches the launcher from threads of its own, since the main thread sits in long computations and collectives.

    `rescue` saves what must not be lost, from a thread: before the process ends, and when that becomes likely.
    """

    def __init__(self, stream: BinaryIO, silence_s: float = SILENCE_S):
        self.stopping = threading.Event()
        self.saving = threading.Event()
        self.coordinator = CoordinatorClient()
        self.unsent: set[str] = set()
        self.rescue: Callable[[], None] = lambda: None
        self.meet: Callable[[list], None] = lambda peers: None
        self._stream, self._silence_s = stream, silence_s
        self._heard, self._lines = True, 0
        self._hearing = threading.Lock()
        self._door: Path | None = None
        self._visitor: socket.socket | None = None
        # The thread that counts the silence never writes: a dead link may block every writer.
        self._begin(self._listen, stream)
        self._begin(self._count_silence)
        self._begin(self._beat)

    def open_door(self, path: Path) -> None:
        """Let the launcher in over another connection, through a Unix socket that only this user can open.

        Raises OSError.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        door = socket.socket(socket.AF_UNIX)
        door.bind(str(path))
        path.chmod(0o600)
        door.listen()
        self._door = path
        self._begin(self._answer, door)

    def close_door(self) -> None:
        if self._door:
            with contextlib.suppress(OSError):
                self._door.unlink()

    @staticmethod
    def _begin(work: Callable[..., None], *about: object) -> None:
        threading.Thread(target=work, args=about, daemon=True).start()

    def _answer(self, door: socket.socket) -> None:
        while True:
            visitor, _ = door.accept()
            try:
                self._let_in(visitor)
            except (OSError, ValueError):
                visitor.close()

    def _let_in(self, visitor: socket.socket) -> None:
        visitor.settimeout(GREETING_S)
        stream = visitor.makefile("rb")
        arrived = int(stream.readline(32))
        with self._hearing:
            visitor.sendall(f"{self._lines}\n".encode())
            if stream.readline(32) != GO_ON:  # the launcher has given up: this process had not answered for long
                raise ValueError("no launcher there")
            visitor.settimeout(None)
            output.move(visitor, arrived)
            self._stream, self._heard = stream, True
            before, self._visitor = self._visitor, visitor
        if before:
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        self._begin(self._listen, stream)

    def _listen(self, stream: BinaryIO) -> None:
        with contextlib.suppress(OSError):
            for line in stream:
                with self._hearing:
                    if stream is not self._stream or not line.endswith(b"\n"):  # it will be repeated
                        break
                    self._heard = True
                    self._lines += 1
                    self._hear(line.strip())
        with self._hearing:  # the launcher may just be coming over another
            is_over = stream is self._stream
        if is_over:
            self._give_up("the launcher is gone")

    def _hear(self, word: bytes) -> None:
        if word == b"stop":
            self.stopping.set()
        elif word == b"save":
            self.saving.set()
        elif word == b"quit":
            self._end()
        elif word.startswith(b"{"):
            self._take(json.loads(word))

    def _take(self, message: dict) -> None:
        if message["type"] == "unsent":
            self.unsent.update(message["files"])
        elif message["type"] == "peers":
            self.meet(message["peers"])
        else:
            self.coordinator.put(message)

    def _count_silence(self) -> None:
        """In ticks of its own and not by a clock: after a sleep the launcher gets its time to say something."""
        silent, saved = 0.0, False
        while silent < self._silence_s:
            time.sleep(TICK_S)
            silent = 0.0 if self._heard else silent + TICK_S
            self._heard = False
            if silent == 0.0:
                saved = False
            elif not saved and silent >= SAVING_PART * self._silence_s:
                saved = True
                self._begin(self.rescue)
        self._give_up(f"nothing heard from the launcher for {self._silence_s:.0f} s", LATE_RESCUE_S)

    def _beat(self) -> None:
        while True:
            send_event({"type": "beat", "heard": self._lines})
            time.sleep(BEAT_S)

    def _give_up(self, reason: str, rescue_s: float = RESCUE_S) -> None:
        def last_words() -> None:
            self.rescue()
            print(f"stopping: {reason}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=last_words, daemon=True)
        thread.start()
        thread.join(rescue_s)
        self._end()

    def _end(self) -> None:
        self.close_door()
        os._exit(LAUNCHER_GONE)
