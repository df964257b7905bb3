"""The workers as the launcher sees them: a process each, here or over SSH, watched until all end or one fails."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whisper_tuner.errors import HostError, RunError

from .lifeline import BEAT_S, SILENCE_S, split_line
from .machine import Process

TAIL_LINES = 20
GRACE_S = 2.0  # for the others' last words once one has failed
# Errors that only tell that some other rank has failed.
CONSEQUENCES = {"PeerLost"}


@dataclass
class Worker:
    rank: int
    name: str
    process: Process
    last_heard: float = field(default_factory=time.monotonic)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    error: dict | None = None
    status: int | None = None
    silent: bool = False
    hello: dict | None = None  # what it said of itself: pid, system, hash of the code that it loaded

    @property
    def failed(self) -> bool:
        return self.silent or self.status not in (None, 0)

    @property
    def is_cause(self) -> bool:
        """Whether this failure is no mere consequence of another's."""
        return self.failed and not (self.error and self.error.get("kind") in CONSEQUENCES)

    def describe_failure(self) -> str:
        if self.silent:
            return f"nothing heard for {SILENCE_S:.0f} s: asleep, or its network is gone"
        if self.error:
            return str(self.error.get("message"))
        if self.status == 255:
            reason = "the SSH connection was lost"
        elif self.status < 0 or self.status >= 128:
            number = -self.status if self.status < 0 else self.status - 128
            reason = f"the worker was killed by {f'signal {number}' if number else 'a signal'}"
        else:
            reason = f"the worker ended with status {self.status}"
        last = "\n".join(f"  {self.name}: {line}" for line in self.tail)
        return f"{reason}; its last lines:\n{last}" if last else f"{reason}, and printed nothing"


class Crew:
    """All workers of a run. `events` gets their events with `host` and `rank`; `log` each other line, prefixed."""

    def __init__(self, workers: Sequence[Worker], *, events: Callable[[dict], None], log: Callable[[str], None]):
        self.workers = list(workers)
        self._events, self._log = events, log
        self._inbox: queue.SimpleQueue[tuple[Worker, str | None]] = queue.SimpleQueue()
        for worker in self.workers:
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def watch(self, stopping: Callable[[], bool]) -> Worker | None:
        """Wait until all have ended well (None), or one has failed: that one, the cause rather than a consequence.

        Raises RunError if two of them cannot train together.
        Once `stopping()` is true, asks every worker to finish its step, agree and end.
        """
        next_beat, asked = 0.0, False
        while any(worker.status is None for worker in self.workers):
            if time.monotonic() >= next_beat:
                self._tell("beat")
                next_beat = time.monotonic() + BEAT_S
            if stopping() and not asked:
                self._tell("stop")
                asked = True
            self._take(0.25)
            self._mark_silent()
            self._compare()
            if any(worker.failed for worker in self.workers):
                return self._cause()
        return None

    def end(self) -> None:
        """Leave no worker behind: ask, wait a moment, kill."""
        self._tell("quit")
        for worker in self.workers:
            worker.process.close_stdin()
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers:
            if worker.silent or worker.process.wait(max(0.0, deadline - time.monotonic())) is None:
                worker.process.kill()

    def _read(self, worker: Worker) -> None:
        with contextlib.suppress(HostError):
            for line in worker.process.lines():
                self._inbox.put((worker, line))
        self._inbox.put((worker, None))

    def _take(self, timeout: float) -> None:
        """Handle what has come in, waiting at most `timeout` seconds for the first line."""
        try:
            self._handle(*self._inbox.get(timeout=timeout))
            while True:
                self._handle(*self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, worker: Worker, line: str | None) -> None:
        worker.last_heard = time.monotonic()
        if line is None:
            status = worker.process.wait(GRACE_S)
            worker.status = 255 if status is None else status
            return
        text, event = split_line(line)
        if text.strip():
            worker.tail.append(text)
            self._log(f"{worker.name}: {text}")
        if event and event["type"] != "beat":
            if event["type"] == "error":
                worker.error = event
            elif event["type"] == "hello":
                worker.hello = event
            self._events({**event, "host": worker.name, "rank": worker.rank})

    def _mark_silent(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.status is None and now - worker.last_heard > SILENCE_S:
                worker.silent = True

    def _compare(self) -> None:
        first, *others = [worker for worker in self.workers if worker.hello] or [None]
        for worker in others:
            if worker.hello["system"] != first.hello["system"]:
                raise RunError(
                    f"{worker.name} runs {worker.hello['system']}, {first.name} {first.hello['system']}",
                    remedy="gloo cannot join Macs and other systems in one group: train on hosts of one kind.",
                )
            if worker.hello["source"] != first.hello["source"]:
                raise RunError(
                    f"{worker.name} runs other code than {first.name}",
                    remedy="Start again without --no-sync; `multimac hosts check` shows each host's environment.",
                )

    def _cause(self) -> Worker:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not any(worker.is_cause for worker in self.workers):
            self._take(0.1)
        failed = [worker for worker in self.workers if worker.failed]
        return next((worker for worker in failed if worker.is_cause), failed[0])

    def _tell(self, word: str) -> None:
        for worker in self.workers:
            if worker.status is None and not worker.silent:
                with contextlib.suppress(HostError):
                    worker.process.write(f"{word}\n".encode())
