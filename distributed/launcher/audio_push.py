"""The launcher's end of the way that audio takes during a run; the worker's is in delivery.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from whisper_tuner.errors import HostError, TunerError

from .worker import Worker

DELIVERY_S, DELIVERY_AGAIN_S = 30.0, 3.0  # how long clips are tried to be brought to a host, and how often
TURN_S = 0.01  # in which another list's next group gets its turn

T = TypeVar("T")


def deliver(worker: Worker, files: Sequence[str], wanted: Callable[[], bool]) -> None:
    """Again and again: clips that do not come would be left out. Raises HostError for a host that cannot take them."""
    deadline = time.monotonic() + DELIVERY_S
    while files and wanted():
        try:
            for count, unsent in _in_turns(worker.delivering, worker.post.send(files, wanted)):
                files, deadline = files[count:], time.monotonic() + DELIVERY_S
                _tell_unsent(worker, unsent)
        except HostError:
            if worker.silent:  # when it wakes up it still waits for them
                deadline = time.monotonic() + DELIVERY_S
            elif time.monotonic() > deadline:
                raise
            time.sleep(DELIVERY_AGAIN_S)
        except TunerError:  # what is to be sent is not known
            _tell_unsent(worker, files)
            return


def _tell_unsent(worker: Worker, files: Sequence[str]) -> None:
    if files:
        worker.tell(json.dumps({"type": "unsent", "files": list(files)}))


def _in_turns(lock: threading.Lock, steps: Iterator[T]) -> Iterator[T]:
    """A host is sent one group of files at a time, and of several lists one from each in turn."""
    while True:
        with lock:
            step = next(steps, None)
        if step is None:
            return
        yield step
        time.sleep(TURN_S)
