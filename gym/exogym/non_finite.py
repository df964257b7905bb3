"""Steps without a finite loss or gradient: told, and counted."""

from __future__ import annotations

from exogym.errors import NotFinite
from exogym.micro_batches import StepWork
from exogym.progress import Progress
from exogym.strategy.strategy import StepResult

MOST_SKIPPED = 5  # steps in a row without a finite loss or gradient, before the run ends
NAMED = 8  # clips at most in a message


class NonFiniteGuard:
    def __init__(self, progress: Progress):
        self._progress = progress
        self._skipped = self._in_a_row = 0

    def check(self, result: StepResult, work: StepWork) -> None:
        """After a step. Raises NotFinite once there were too many in a row."""
        if not work.not_finite and not result.skipped:
            self._in_a_row = 0 if work.loss.weight else self._in_a_row
            return
        what, *clips = work.not_finite or [result.skipped, *work.ids]
        names = f" ({', '.join(clips[:NAMED])}{' ...' if len(clips) > NAMED else ''})" if clips else ""
        nothing_counted = bool(result.skipped) or not work.loss.weight
        self._skipped += 1
        self._in_a_row = self._in_a_row + 1 if nothing_counted else 0
        told = f"{what} at step {self._progress.step} of rank {self._progress.rank}{names}"
        if self._in_a_row >= MOST_SKIPPED:
            remedy = "a smaller learning rate or max_norm may help, or other clips"
            raise NotFinite(f"{told}, as in the {MOST_SKIPPED - 1} steps before; {remedy}")
        self._progress.emit("warning", what=f"{told}: left out", skipped=self._skipped)
