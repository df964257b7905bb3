"""All that a coordinator knows, as it can be written down: another process could go on from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from exogym.membership.messages import Generation
from exogym.membership.reachability import Reachability

PATIENCE_S = 3.0  # from the first report to the next generation: the launcher may hear meanwhile who is lost
FRUITLESS = 3  # generations of the same members without a vote that counted, before one of them is given up


class Blame(NamedTuple):
    host: str
    said: str  # what members have reported


@dataclass
class Trouble:
    """Keeps what members say of a generation that does not come on, and finds whom to give up.

    fruitless: generations of the same members that ended by such reports. is_strangers: somebody was in it who is no
    member, for which none of them is to blame.
    """

    since: float | None = None
    reports: dict[str, str] = field(default_factory=dict)
    fruitless: int = 0
    is_strangers: bool = False

    def report(self, now: float, host: str | None, message: str) -> None:
        """host: who has said it; None for the launcher, which only sees that nobody moves."""
        self.since = now if self.since is None else self.since
        if host is not None:
            self.reports.setdefault(host, message)

    def clear(self) -> None:
        self.since, self.reports, self.is_strangers = None, {}, False

    def is_over_patience(self, now: float) -> bool:
        return self.since is not None and now - self.since >= PATIENCE_S

    def suspect(self, members: Sequence[str], *, voted: Collection[str], proven: Collection[str]) -> Blame:
        """Return the most likely culprit among `members` (in rank order): one that has not voted.

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


@dataclass
class CoordinatorState:
    """last: who was in when ranks last agreed, and has that in a checkpoint. remembering: those of them whose processes
    are still the same. awaited: who has not come yet for the first time. vote: the number of the vote that is going on.
    ending_round: of which a member has asked whether it is cut short; None if none has since the members began one.
    """

    generation: Generation | None = None
    ended: bool = False  # all members have voted that there is nothing left to do
    stopping: bool = False
    present: set[str] = field(default_factory=set)
    last: set[str] = field(default_factory=set)
    remembering: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)  # who is there, but too few to begin a round
    votes: dict[str, dict[str, Any]] = field(default_factory=dict)
    vote: int = 0
    is_mid_round: bool = False
    ending_round: int | None = None
    is_cut_short: bool = False  # that one
    is_stop_wanted: bool = False  # by one that came too late to cut it short
    diverged: int = 0  # times that members differed since a round last counted
    formed: int = 0  # generations
    last_members: list[str] = field(default_factory=list)
    orphaned_since: float | None = None
    apart_since: float | None = None
    trouble: Trouble = field(default_factory=Trouble)
    reach: Reachability = field(default_factory=Reachability)

    def to_json(self, now: float) -> dict[str, Any]:
        """Times become ages: another process has another clock."""
        return _listed(asdict(self._shifted(-now)))

    @classmethod
    def from_json(cls, record: dict[str, Any], now: float) -> CoordinatorState:
        generation = record["generation"]
        trouble, reach = Trouble(**record["trouble"]), Reachability.from_json(record["reach"])
        sets = {name: set(record[name]) for name in ("present", "last", "remembering", "awaited", "paused")}
        state = cls(**{**record, **sets, "trouble": trouble, "reach": reach})
        state.generation = Generation.of(generation) if generation else None
        return state._shifted(now)

    def _shifted(self, seconds: float) -> CoordinatorState:
        """Return a copy with all times moved by so much."""

        def moved(time: float | None) -> float | None:
            return None if time is None else time + seconds

        times = {"orphaned_since": moved(self.orphaned_since), "apart_since": moved(self.apart_since)}
        return replace(self, **times, trouble=replace(self.trouble, since=moved(self.trouble.since)))


def _listed(value: Any) -> Any:
    """Replace sets in a record by sorted lists."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return value
