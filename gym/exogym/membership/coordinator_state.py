"""All that a coordinator knows, as it can be written down, with who goes on where hosts cannot reach each other.

Knows no sockets and never waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from exogym.membership import Generation

PATIENCE_S = 3.0  # from the first report to the next generation: the launcher may hear meanwhile who is lost
FRUITLESS = 3  # generations of the same members without a vote that counted, before one of them is given up

Pair = tuple[str, str]


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
class Reachability:
    """Keeps what each host says about the others. One side's report is enough: gloo needs both ways.

    A rank that waits asks its peers whether they are there (client.py). Who does not answer, though the launcher hears
    them, is kept here.
    told: the pairs of which users have heard. waiting: who has to wait for them to reach each other.
    """

    unreached: dict[str, set[str]] = field(default_factory=dict)
    told: list[Pair] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Reachability:
        unreached = {host: set(others) for host, others in record["unreached"].items()}
        return cls(unreached, [(one, other) for one, other in record["told"]], record["waiting"])

    def says(self, host: str, unreached: Collection[str], *, new: Collection[str]) -> None:
        """Take in whom this host does not reach; others than before only if they are among `new`."""
        self.unreached[host] = set(unreached) & (self.unreached.get(host, set()) | set(new))

    def forget(self, host: str) -> None:
        """Forget what a host said, and what others said of it."""
        self.unreached.pop(host, None)
        for others in self.unreached.values():
            others.discard(host)
        self.told = [pair for pair in self.told if host not in pair]
        self.waiting = [name for name in self.waiting if name != host]

    def pairs(self, hosts: Sequence[str]) -> list[Pair]:
        """Return the pairs of `hosts` who do not reach each other, in their order."""
        return [
            (one, other)
            for n, one in enumerate(hosts)
            for other in hosts[n + 1 :]
            if other in self.unreached.get(one, ()) or one in self.unreached.get(other, ())
        ]

    def is_news(self, pairs: list[Pair], waiting: list[str]) -> bool:
        if not pairs:
            return False
        new = [pair for pair in pairs if pair not in self.told]
        is_news = bool(new) or waiting != self.waiting
        self.told, self.waiting = self.told + new, waiting
        return is_news

    def reached_again(self) -> list[Pair]:
        """Return the pairs that were told and reach each other now, each once."""
        again = [pair for pair in self.told if not self.pairs(pair)]
        self.told = [pair for pair in self.told if pair not in again]
        return again


def largest(hosts: Sequence[str], pairs: Collection[Pair], known: Collection[str]) -> list[str]:
    """Return the most of `hosts` (in rank order) without any of `pairs`, with one of `known` if there are any.

    Of several as large, the one with the most of `known`, then the first in rank order. `known` have the newest state:
    were it left behind, what was agreed would be trained once more.
    """
    rank = {host: n for n, host in enumerate(hosts)}

    def worth(chosen: frozenset[str]) -> tuple[bool, int, int, list[int]]:
        ours = len(chosen & set(known))
        return bool(ours), len(chosen), ours, sorted((-rank[host] for host in chosen), reverse=True)

    most: frozenset[str] = max(list(_without(frozenset(hosts), pairs)), key=worth)
    return sorted(most, key=rank.__getitem__)


def _without(hosts: frozenset[str], pairs: Collection[Pair]) -> Iterator[frozenset[str]]:
    """Yield sets without any of `pairs`, all those among them to which nobody could be added."""
    apart = {host: {a if b == host else b for a, b in pairs if host in (a, b)} & hosts for host in hosts}
    worst = max(sorted(hosts), key=lambda host: len(apart[host]), default=None)
    if worst is None or not apart[worst]:
        yield hosts
        return
    yield from _without(hosts - {worst}, pairs)
    for others in _without(hosts - {worst} - apart[worst], pairs):
        yield others | {worst}


@dataclass
class CoordinatorState:
    """last: who was in when ranks last agreed, and has that in a checkpoint. remembering: those of them whose processes
    are still the same. awaited: who has not come yet for the first time. vote: the number of the vote that is going on.
    ending_round: of which a member has asked whether it is cut short; None if none has since the members began one.
    away: who is to leave, or has left, and why. told_away: of whom users have heard that they left, and why.
    """

    generation: Generation | None = None
    ended: bool = False  # all members have voted that there is nothing left to do
    stopping: bool = False
    present: set[str] = field(default_factory=set)
    last: set[str] = field(default_factory=set)
    remembering: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)  # who is there, but too few to begin a round
    away: dict[str, str] = field(default_factory=dict)
    told_away: dict[str, str] = field(default_factory=dict)
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
        """Return it with ages for times, as another process has another clock, and sorted lists for sets."""

        def listed(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: listed(item) for key, item in value.items()}
            return sorted(value) if isinstance(value, set) else value

        return {name: listed(value) for name, value in asdict(self._shifted(-now)).items()}

    @classmethod
    def from_json(cls, record: dict[str, Any], now: float) -> CoordinatorState:
        generation = record["generation"]
        sets = {name: set(record[name]) for name in ("present", "last", "remembering", "awaited", "paused")}
        state = cls(**{**record, **sets})
        state.trouble, state.reach = Trouble(**record["trouble"]), Reachability.from_json(record["reach"])
        state.generation = Generation.of(generation) if generation else None
        return state._shifted(now)

    def _shifted(self, seconds: float) -> CoordinatorState:
        """Return a copy with all times moved by so much."""

        def moved(time: float | None) -> float | None:
            return None if time is None else time + seconds

        return replace(
            self,
            orphaned_since=moved(self.orphaned_since),
            apart_since=moved(self.apart_since),
            trouble=replace(self.trouble, since=moved(self.trouble.since)),
        )
