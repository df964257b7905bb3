"""Asks the launcher for audio that this host lacks: when a host is lost, the others train its clips."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from whisper_tuner.data.dataset import Sample

POLL_S = 0.05
LOOK_S = 5.0  # between two `alive` events: without them the launcher takes a worker that makes no step for stuck
LONGEST_S = 600.0  # a clip is given up when nothing at all has arrived for so long


class AudioPull:
    """Asks the launcher for audio, which it puts into place over SSH; whoever reads a clip waits for it here."""

    def __init__(self, events: Callable[[dict], None], unsent: Container[str]):
        """unsent: what the launcher has said that it cannot send."""
        self._events, self._unsent = events, unsent
        self._wanted: set[str] = set()
        self._next_look = 0.0
        self._last_arrival = 0.0

    def order(self, samples: Sequence[Sample]) -> None:
        """Ask for clips in the order in which they are needed; not again for those that are here or on their way."""
        new = [_name(s) for s in samples if _name(s) not in self._wanted and not s.audio.exists()]
        self._wanted.update(new)
        if new:
            self._events({"type": "want", "files": new})

    def wait(self, sample: Sample, given_up: Callable[[], bool] = lambda: False) -> None:
        """Return once the file is here, nobody needs it, or it will not come: opening it fails then."""
        name, began = _name(sample), time.monotonic()
        while name in self._wanted and not sample.audio.exists() and not given_up():
            self._look()
            quiet_since = max(began, self._last_arrival)
            if name in self._unsent or time.monotonic() - quiet_since > LONGEST_S:
                return
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Look every LOOK_S for what has arrived, and tell the launcher that this worker waits."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if arrived := {name for name in list(self._wanted) if Path(name).exists()}:
            self._wanted -= arrived
            self._last_arrival = now
        self._events({"type": "alive"})


def _name(sample: Sample) -> str:
    """The name by which the launcher knows it: relative to the project folder, in which a worker runs."""
    return os.path.relpath(sample.audio)
