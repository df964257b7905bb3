"""Time and threads, as the worker group sees them. Tests have simulated ones."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .spawner import WorkerProcess

Act = Callable[[], None]
Takes = Callable[[Any], None]
Work = Callable[[], Any]


def ignore(content: object) -> None:
    pass


def throw(error: Exception) -> None:
    raise error


def outcome_of(work: Work, then: Takes, failed: Takes, late: Takes) -> tuple[Act, Act]:
    """Do the work. What to tell of what it returned or raised, and what to do instead if nobody takes that any more."""
    try:
        result = work()
    except Exception as error:
        return partial(failed, error), partial(ignore, error)
    return partial(then, result), partial(late, result)


class Background:
    """An inbox, and threads for what may block. What they come to is told in the thread that takes it from there."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Act, Act | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def put(self, tell: Act, instead: Act | None = None) -> None:
        """Hand in what is to be told, from any thread. instead: what is to be done if nobody takes it any more."""
        with self._lock:
            if not self._closed:
                self._inbox.put((tell, instead))
                return
        if instead:
            instead()

    def take(self, timeout: float) -> list[Act]:
        """Return all that has come in, after at most `timeout` seconds of waiting for the first of it."""
        return [tell for tell, _ in self._take(timeout)]

    def close(self) -> None:
        """Take nothing any more."""
        with self._lock:
            self._closed = True
        for _, instead in self._take(0):
            if instead:
                instead()

    def _take(self, timeout: float) -> list[tuple[Act, Act | None]]:
        taken = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._inbox.get(timeout=timeout))
            while True:
                taken.append(self._inbox.get_nowait())
        return taken

    def run(self, work: Work, then: Takes = ignore, failed: Takes = throw, late: Takes = ignore) -> None:
        """Do work() in a thread; then outcome_of() says what is told.

        Without `failed` the error ends the one who takes from the inbox: nobody would notice it otherwise.
        """
        threading.Thread(target=lambda: self.put(*outcome_of(work, then, failed, late)), daemon=True).start()

    def listen(self, process: WorkerProcess, hear: Takes, ended: Takes, grace_s: float) -> None:
        """Tell hear(line) of each line of a process, and of None where its connection has ended; then ended(status)."""

        def listen() -> int | None:
            for line in process.lines():
                self.put(partial(hear, line))
            return process.wait(grace_s)

        self.run(listen, ended)


def side_by_side(works: Sequence[Act], seconds: float) -> None:
    """Do all at once. What takes longer is left to itself."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
