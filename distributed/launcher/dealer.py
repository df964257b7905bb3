"""Shares a test set among machines: each takes the next group of clips when it has finished one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from whisper_tuner.eval.evaluation import Transcript

LATE = 2.0  # of this machine's own time for as many clips: after that it no longer waits for another's group
SMALLEST = 4  # the part of a whole group below which it is no smaller, where a single clip takes as long as several


def in_groups(places: Sequence[int], most: int, machines: int, *, one_by_one: bool) -> Iterator[Sequence[int]]:
    """Make large groups first, small ones at the end, so that no machine waits long for another's last (guided
    self-scheduling: Polychronopoulos and Kuck, 1987).

    one_by_one: clips that are computed together take as long as one after the other, as on a CPU.
    """
    least, start = 1 if one_by_one else max(1, most // SMALLEST), 0
    while start < len(places):
        left = len(places) - start
        size = left if machines == 1 else min(most, max(least, -(-left // (2 * machines))))
        yield places[start : start + size]
        start += size


class Dealer:
    """Groups of a test set's clips, by their places in it. Called from several threads.

    A group that is given back, and one that a host takes too long for, is decoded by another machine; what comes first
    counts. `transcripts` holds each clip's, once all is done; `counts`, how many each machine has transcribed.
    """

    def __init__(self, groups: Sequence[Sequence[int]]):
        self._waiting, self._dealt = list(groups), {}  # group: when it was dealt
        self._changed = threading.Condition()
        self._for_this_machine: list[int] = []  # clips that a host cannot read
        self._clips = sum(map(len, groups))
        self._own_s, self._own_clips = 0.0, 0  # that this machine has taken, and for how many clips
        self._closed = False
        self.transcripts: dict[int, Transcript] = {}
        self.counts: dict[str, int] = {}

    @property
    def done(self) -> int:
        return len(self.transcripts)

    @property
    def has_waiting(self) -> bool:
        """True while a group is dealt to nobody."""
        return bool(self._waiting)

    @property
    def is_done(self) -> bool:
        return self.done == self._clips

    def take(self) -> tuple[int, ...] | None:
        """Give a host the next group, as soon as there is one; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_done or self._closed)
            return None if self.is_done or self._closed else self._deal()

    def take_here(self) -> tuple[int, ...] | None:
        """Give this machine the next group, also what hosts cannot read and take too long for; None at the end."""
        with self._changed:
            while not self.is_done:
                if self._for_this_machine:
                    group, self._for_this_machine = tuple(self._for_this_machine), []
                    return group
                if self._waiting:
                    return self._deal()
                oldest = min(self._dealt, key=lambda group: self._dealt[group])
                own_s = len(oldest) * self._own_s / max(1, self._own_clips)
                left = self._dealt[oldest] + LATE * own_s - time.monotonic()
                if left <= 0:
                    self._dealt[oldest] = time.monotonic()
                    return oldest
                self._changed.wait(left)
            return None

    def _deal(self) -> tuple[int, ...]:
        group = tuple(self._waiting.pop(0))
        self._dealt[group] = time.monotonic()
        return group

    def give_back(self, group: tuple[int, ...]) -> None:
        """Let another machine have a group that its own does not transcribe."""
        with self._changed:
            if self._dealt.pop(group, None) is not None:
                self._waiting.insert(0, group)
                self._changed.notify_all()

    def heard(self, group: tuple[int, ...], transcripts: Sequence[Transcript], machine: str) -> None:
        """Keep what a host has heard. What it could not read is tried here, or told with a path that the user knows."""
        with self._changed:
            failed = [clip for clip, one in zip(group, transcripts, strict=True) if one.problem]
            self._for_this_machine += [clip for clip in failed if clip not in self.transcripts]
            self._keep(group, transcripts, machine, problems=False)

    def heard_here(self, group: tuple[int, ...], transcripts: Sequence[Transcript], machine: str, began: float) -> None:
        with self._changed:
            self._own_s, self._own_clips = self._own_s + time.monotonic() - began, self._own_clips + len(group)
            self._keep(group, transcripts, machine, problems=True)

    def _keep(self, group: tuple[int, ...], transcripts: Sequence[Transcript], machine: str, *, problems: bool) -> None:
        self._dealt.pop(group, None)
        for clip, one in zip(group, transcripts, strict=True):
            if clip not in self.transcripts and (problems or not one.problem):
                self.transcripts[clip] = one
                self.counts[machine] = self.counts.get(machine, 0) + 1
        self._changed.notify_all()

    def close(self) -> None:
        """Give hosts no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
