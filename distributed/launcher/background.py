"""Time and threads, as the worker group sees them. Tests have simulated ones."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol


class Kind(Enum):
    STARTED = auto()  # content: the process
    NOT_STARTED = auto()  # the TunerError
    RECONNECTED = auto()
    NOT_RECONNECTED = auto()  # the HostError
    NOBODY_THERE = auto()
    LINE = auto()  # what the worker wrote
    CUT_OFF = auto()
    EXITED = auto()  # the status; None if nobody has seen it
    UNSENT = auto()  # names of audio files
    NOT_SENT = auto()  # the HostError: no audio can be sent
    FETCHED = auto()  # the HostError, or None
    BROKEN = auto()  # the exception that a thread has ended with


@dataclass(frozen=True)
class Message:
    """What a thread reports: about which worker, and which of its processes (`life`)."""

    name: str
    life: int
    kind: Kind
    content: Any = None


class Listenable(Protocol):
    def lines(self): ...

    def wait(self, timeout: float | None = None) -> int | None: ...

    def kill(self) -> None: ...


class Background:
    """An inbox, and threads that do what may block, and do nothing but put messages into it."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def put(self, message: Message) -> None:
        """From any thread. After the end nobody takes it: a process that was just started is killed instead."""
        with self._lock:
            if not self._closed:
                self._inbox.put(message)
                return
        if message.kind is Kind.STARTED:
            message.content.kill()

    def take(self, timeout: float) -> list[Message]:
        """All that has come in, after at most `timeout` seconds of waiting for the first of it."""
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=timeout))
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def close(self) -> list[Message]:
        """Nothing is taken any more; returns what was left."""
        with self._lock:
            self._closed = True
        return self.take(0)

    def run(self, work: Callable[[], Message | None]) -> None:
        """In a thread, which puts what it returns."""

        def run() -> None:
            try:
                message = work()
            except Exception as error:  # nobody would notice otherwise
                message = Message("", 0, Kind.BROKEN, error)
            if message:
                self.put(message)

        threading.Thread(target=run, daemon=True).start()

    def listen(self, name: str, life: int, process: Listenable, grace_s: float) -> None:
        """Put each line of a process, and its end."""

        def listen() -> Message:
            for line in process.lines():
                self.put(Message(name, life, Kind.CUT_OFF if line is None else Kind.LINE, line))
            return Message(name, life, Kind.EXITED, process.wait(grace_s))

        self.run(listen)
