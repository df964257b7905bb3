"""Time and threads, as the worker group sees them; tests have simulated ones. With the audio that goes to a worker."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from whisper_tuner.errors import HostError, TunerError

from .spawner import Spawner, WorkerProcess

GIVE_UP_S, AGAIN_S = 30.0, 3.0  # how long clips are tried to be brought to a host, and how often
TURN_S = 0.01  # in which another list's next group of clips gets its turn

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


class AudioPush:
    """Audio for one process of a worker; the worker's end is AudioPull. A thread for each list of files calls `send`.

    Of several lists one group of files each is sent in turn. `unsent` is told of files that cannot be sent.
    """

    def __init__(self, spawner: Spawner, background: Background, unsent: Callable[[Sequence[str]], None]):
        self.over = threading.Event()  # nobody waits for the files any more
        self.silent = threading.Event()  # a host that sleeps is sent its files when it wakes up
        self._spawner, self._background, self._unsent = spawner, background, unsent
        self._turn = threading.Lock()

    @property
    def is_sending(self) -> bool:
        return self._turn.locked()

    def send(self, files: Sequence[str]) -> HostError | None:
        """Again and again: clips that do not come would be left out. Returns the error of a host that takes none."""
        now = self._background.now
        deadline = now() + GIVE_UP_S
        while files and not self.over.is_set():
            try:
                groups = self._spawner.send(files, lambda: not self.over.is_set())
                while True:
                    with self._turn:
                        group = next(groups, None)
                    if group is None:
                        break
                    count, unsent = group
                    files, deadline = files[count:], now() + GIVE_UP_S
                    self._report_unsent(unsent)
                    self._background.sleep(TURN_S)
            except HostError as error:
                if self.silent.is_set():
                    deadline = now() + GIVE_UP_S
                elif now() > deadline:
                    return error
                self._background.sleep(AGAIN_S)
            except TunerError:  # what is to be sent is not known
                self._report_unsent(files)
                return None
        return None

    def _report_unsent(self, files: Sequence[str]) -> None:
        if files:
            self._background.put(partial(self._unsent, files))


def side_by_side(works: Sequence[Act], seconds: float) -> None:
    """Do all at once. What takes longer is left to itself."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
