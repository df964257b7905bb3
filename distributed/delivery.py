"""A worker's end of the way that audio takes during a run, when it is dealt clips of a host that is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from whisper_tuner.dataset import Sample

from .lifeline import Lifeline

POLL_S = 0.2
LONGEST_S = 600.0


class Delivery:
    """Asks the launcher for audio, which it puts into place over SFTP; whoever reads a clip waits for it here."""

    def __init__(self, events: Callable[[dict], None], lifeline: Lifeline):
        self._events, self._lifeline = events, lifeline
        self._wanted: set[str] = set()

    def order(self, samples: Sequence[Sample]) -> None:
        """In the order in which they will be needed; what is there already, or on its way, is not asked for again."""
        new = [_name(s) for s in samples if _name(s) not in self._wanted and not s.audio.exists()]
        self._wanted.update(new)
        if new:
            self._events({"type": "want", "files": new})

    def wait(self, sample: Sample) -> None:
        """Until the file is there, or will not come: then whoever opens it will say so."""
        deadline = time.monotonic() + LONGEST_S
        while _name(sample) in self._wanted and not sample.audio.exists():
            if _name(sample) in self._lifeline.unsent or time.monotonic() > deadline:
                return
            time.sleep(POLL_S)


def _name(sample: Sample) -> str:
    """As the launcher knows it: relative to the project folder, where a worker runs."""
    return os.path.relpath(sample.audio)
