"""A thread in which a rank's collectives run while it computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

Job = Callable[[], None]
_this_thread = threading.local()


def in_background() -> bool:
    """Say whether this thread belongs to a Background: nobody waits for what it does, unless in Background.wait."""
    return getattr(_this_thread, "is_background", False)


class Background:
    """Runs jobs in a thread, one at a time, in the order in which they were put.

    Once one has failed, the others are left out, until `wait` has raised its error.
    waiting: gives the context in which a rank waits for others. interrupt: makes the job that is running fail soon.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager], interrupt: Job):
        self._waiting, self._interrupt = waiting, interrupt
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background collectives", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all is done."""
        with self._waiting():
            self._jobs.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread. What it is at is given up. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._jobs.unfinished_tasks:
            self._error = self._error or RuntimeError("closed")
            self._interrupt()
        self._jobs.put(None)
        thread.join()
        self._error = None

    def _run(self) -> None:
        _this_thread.is_background = True
        while (job := self._next()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # for the thread that waits
                self._error = error
            del job  # it may hold large tensors
            self._jobs.task_done()
        self._jobs.task_done()

    def _next(self) -> Job | None:
        return self._jobs.get()
