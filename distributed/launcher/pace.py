"""How fast a run goes, and what follows: after what silence a worker is lost, and when one holds up the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from distributed.control.timeouts import Timeouts

STUCK_FACTOR = 5.0  # nothing is stuck before it has taken so many times the slowest that was seen
SLOWEST_LINK = 250e3  # bytes/s: until a round has been seen, what an exchange of all weights is allowed to take
TRAVELS = 8  # bytes of each trained weight in an exchange: float32, there and back


@dataclass
class Pace:
    """patience_s: for how long a run may always stand still (`round_timeout_s`)."""

    patience_s: float
    timeouts: Timeouts
    trainable: int = 0  # weights
    _slowest_step: float = 0.0
    _slowest_round: float = 0.0
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # seconds from one commit to the next
    _last_commit: tuple[int, float] = (0, 0.0)  # its generation, and when
    _moved: dict[str, float] = field(default_factory=dict)  # when each host last said what it is at
    _steps: dict[str, int] = field(default_factory=dict)  # the last of each host; 0: none since it entered

    def moved(self, host: str, now: float) -> None:
        self._moved[host] = now

    def since_moved(self, host: str, now: float) -> float:
        return now - self._moved.get(host, 0.0)

    def step(self, host: str, number: int, seconds: float) -> None:
        self._slowest_step = max(self._slowest_step, seconds)
        self._steps[host] = number

    def round(self, seconds: float) -> None:
        self._slowest_round = max(self._slowest_round, seconds)

    def entered(self, members: Sequence[str]) -> None:
        """Note that they begin a round together: from here on a host that makes no step is behind one that does."""
        self._steps = dict.fromkeys(members, 0)

    def commit(self, generation: int, now: float) -> None:
        before, when = self._last_commit
        if generation == before:
            self._rounds.append(now - when)
        self._last_commit = generation, now

    def silence_s(self, *, is_busy_link: bool) -> float:
        """Return for how long a worker may say nothing while it is ready."""
        limits = self.timeouts
        if not self._rounds:
            return limits.silence_max_s
        shortest = max(limits.silence_min_s, limits.silence_busy_link_s if is_busy_link else 0.0)
        return min(max(limits.silence_share * median(self._rounds), shortest), limits.silence_max_s)

    def stuck(self, members: Sequence[str], now: float, *, entering: bool) -> tuple[str | None, float] | None:
        """Find whom these wait for, None if all wait, and for how long they have stood still though heartbeats come.

        None if they do not. entering: they have not come to one state yet.
        """
        quiet = min(self.since_moved(host, now) for host in members)
        steps = {host: self._steps.get(host, 0) for host in members}
        slowest = min(members, key=steps.__getitem__)
        is_behind = not entering and steps[slowest] < max(steps.values())
        if is_behind and quiet > max(self.patience_s, STUCK_FACTOR * self._slowest_step):
            return slowest, quiet
        if quiet > (self.patience_s if entering else self._round_limit()):
            for host in members:
                self.moved(host, now)
            return None, quiet
        return None

    def _round_limit(self) -> float:
        """Compute the seconds that an exchange of all weights may take."""
        longest = STUCK_FACTOR * self._slowest_round or TRAVELS * self.trainable / SLOWEST_LINK
        return max(self.patience_s, longest)
