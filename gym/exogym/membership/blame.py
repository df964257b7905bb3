"""Members of a generation that does not come on: who has said so, and who is given up if none comes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PATIENCE_S = 3.0  # from the first report to the next generation: the launcher may hear meanwhile who is lost
FRUITLESS = 3  # generations of the same members without a vote that counted, before one of them is given up


class Blame(NamedTuple):
    host: str
    said: str  # what members have reported


@dataclass
class Trouble:
    """Reports of the present generation. `fruitless` counts generations of the same members that ended by them."""

    since: float | None = None
    reports: dict[str, str] = field(default_factory=dict)
    fruitless: int = 0

    def report(self, now: float, host: str | None, message: str) -> None:
        """host: who has said it; None for the launcher, which only sees that nobody moves."""
        self.since = now if self.since is None else self.since
        if host is not None:
            self.reports.setdefault(host, message)

    def clear(self) -> None:
        self.since, self.reports = None, {}

    def is_over_patience(self, now: float) -> bool:
        return self.since is not None and now - self.since >= PATIENCE_S

    def suspect(self, members: Sequence[str], *, voted: Collection[str], proven: Collection[str]) -> Blame:
        """The most likely culprit among `members` (in rank order): one that has not voted.

        The smaller group is suspected: those who stay silent while most report trouble, or the few who report it alone.
        In it one that has not yet agreed on anything with the others (is not `proven`), then the last in rank.
        """
        silent = [host for host in members if host not in self.reports and host not in voted]
        reporting = [host for host in members if host in self.reports]
        groups = [group for group in (silent, reporting) if group] or [list(members)]
        smallest = min(map(len, groups))
        suspects = [host for host in members if any(host in group for group in groups if len(group) == smallest)]
        unproven = [host for host in suspects if host not in proven]
        said = "; ".join(f"{host}: {message}" for host, message in self.reports.items())
        return Blame((unproven or suspects)[-1], said)
