"""The line between the launcher and one worker: a heartbeat each way, and what the worker does when it falls silent.

The launcher writes lines to the worker's stdin: the RunSpec, then `beat` every second, `stop`, `save` or `quit`, and as
JSON what the roster says (see exogym.membership), and {"type": "unsent", "files"} for audio that cannot be sent. The
worker writes events to its stdout, JSON lines after a record separator (RFC 7464), amid whatever else it prints; its
beats say how many lines it has heard. A pulled cable sends no end of file, so silence counts as well.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from exogym.membership import Mailbox
from whisper_tuner.json_text import parse_json

MARK = "\x1e"
BEAT_S = 1.0
SILENCE_S = 15.0  # without a word from the launcher a worker ends
TICK_S = 0.5
RESCUE_S = 8.0
LAUNCHER_GONE = 75  # exit status of a worker whose launcher is gone


_writing = threading.Lock()


def send_event(event: dict) -> None:
    """The whole line, with none of another thread's amid it: a long one needs several writes.

    Where nobody reads any more it does not return: the lifeline saves what is to be saved, and ends the process.
    """
    line = f"{MARK}{json.dumps(event)}\n".encode()
    with _writing:
        try:
            while line:
                line = line[os.write(1, line) :]
        except OSError:
            threading.Event().wait()


def split_line(line: str) -> tuple[str, dict | None]:
    """(ordinary text, event) of one line of a worker's output.

    Both at once if a thread sent an event while another had written a line's text, but not its end.
    """
    text, mark, rest = line.partition(MARK)
    try:
        event = parse_json(rest) if mark else None
    except ValueError:
        return line, None
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return text, event
    return line, None


class Lifeline:
    """Watches the launcher from threads of its own, since the main thread sits in long computations and collectives.

    `rescue` saves what must not be lost; it gets RESCUE_S seconds before the process ends.
    """

    def __init__(self, stream: BinaryIO, silence_s: float = SILENCE_S):
        self.stopping = threading.Event()
        self.saving = threading.Event()
        self.mailbox = Mailbox()
        self.unsent: set[str] = set()
        self.rescue: Callable[[], None] = lambda: None
        self._stream, self._silence_s = stream, silence_s
        self._heard, self._lines = True, 0
        # The thread that counts the silence never writes: a dead link may block every writer.
        for target in (self._listen, self._count_silence, self._beat):
            threading.Thread(target=target, daemon=True).start()

    def _listen(self) -> None:
        for line in self._stream:
            self._heard = True
            self._lines += 1
            word = line.strip()
            if word == b"stop":
                self.stopping.set()
            elif word == b"save":
                self.saving.set()
            elif word == b"quit":
                os._exit(LAUNCHER_GONE)
            elif word.startswith(b"{"):
                self._take(json.loads(word))
        self._give_up("the launcher is gone")

    def _take(self, message: dict) -> None:
        if message["type"] == "unsent":
            self.unsent.update(message["files"])
        else:
            self.mailbox.put(message)

    def _count_silence(self) -> None:
        """In ticks of its own and not by a clock: after a sleep the launcher gets its time to say something."""
        silent = 0.0
        while silent < self._silence_s:
            time.sleep(TICK_S)
            silent = 0.0 if self._heard else silent + TICK_S
            self._heard = False
        self._give_up(f"nothing heard from the launcher for {self._silence_s:.0f} s")

    def _beat(self) -> None:
        while True:
            send_event({"type": "beat", "heard": self._lines})
            time.sleep(BEAT_S)

    def _give_up(self, reason: str) -> None:
        def last_words() -> None:
            self.rescue()
            print(f"stopping: {reason}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=last_words, daemon=True)
        thread.start()
        thread.join(RESCUE_S)
        os._exit(LAUNCHER_GONE)
