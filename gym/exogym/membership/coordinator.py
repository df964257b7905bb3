"""Who trains together, and when a round counts. Knows neither tensors nor sockets, and never waits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from exogym.errors import RanksDiverged
from exogym.membership.messages import END, ENTER, ROUND, Generation
from exogym.membership.reachability import Pair, Reachability, largest

PATIENCE_S = 3.0  # between a member's word of trouble and the news of who is lost
APART_S = 2.0  # between the first news of who cannot reach whom and a choice: others may say more
# How long to wait for those who have the newest state: where some are there who had it too, and where nobody is.
RETURN_SOON_S, RETURN_S = 20.0, 600.0
FRUITLESS = 3  # generations of the same members, without a vote that counted: by then it is known who reaches whom
MOST_DIVERGED = 3  # times that members may differ, without a round that counted in between


@dataclass
class Roster:
    """Decides who is in. Methods send messages, and never block.

    hosts: all names, in rank order. send(name, message) reaches one of them; emit takes events for the log.
    resumed: any of them may have a checkpoint. Members may be amid a round. If one is then lost, the others end that
    round among themselves; whoever has come meanwhile joins at the next. Below `min_hosts` the next round has to wait;
    so it has for those who were in when a round last counted, if nobody is there who remembers it. Of those who are
    there, but cannot reach each other, the most who can go on; the others wait until they can.
    """

    hosts: Sequence[str]
    send: Callable[[str, dict], None]
    emit: Callable[[dict], None]
    min_hosts: int = 1
    resumed: bool = False
    clock: Callable[[], float] = time.monotonic
    generation: Generation | None = None
    ended: bool = False  # all members have voted that there is nothing left to do
    stopping: bool = False
    _present: set[str] = field(default_factory=set)
    _last: set[str] = field(default_factory=set)  # who was in when ranks last agreed, and has that in a checkpoint
    _remembering: set[str] = field(default_factory=set)  # those of them whose processes are the same still
    _orphaned_since: float | None = None
    _awaited: set[str] = field(default_factory=set)
    _votes: dict[str, dict] = field(default_factory=dict)
    _vote: int = 0  # the number of the vote that is going on
    _amid: bool = False
    _trouble_since: float | None = None
    _fruitless: int = 0
    _diverged: int = 0  # times since a round last counted
    _formed: int = 0
    _last_members: list[str] = field(default_factory=list)
    _paused: set[str] = field(default_factory=set)
    _reach: Reachability = field(default_factory=Reachability)
    _apart_since: float | None = None

    def __post_init__(self) -> None:
        self._awaited = set(self.hosts)
        self._last = set(self.hosts) if self.resumed else set()

    @property
    def is_entering(self) -> bool:
        """Whether a generation has been called, and not all of it have entered yet."""
        return self.generation is not None and self._vote == 0

    def ready(self, host: str, *, anew: bool = True) -> None:
        """A process of this host has loaded what it needs, and waits to be called. anew: it has just started."""
        self._awaited.discard(host)
        self._present.add(host)
        if anew:
            self._remembering.discard(host)
        self._gather()
        if not anew and not self._is_member(host):
            self.send(host, {"type": "out"})

    def lost(self, host: str, *, for_good: bool = False) -> None:
        """It crashed, fell silent or was given up (for_good); or it never came."""
        self._awaited.discard(host)
        self._present.discard(host)
        self._reach.forget(host)
        if for_good:
            self._last.discard(host)
            self._remembering.discard(host)
        if self._is_member(host) and not self.ended:
            self._regroup()
        else:
            self._gather()

    def stop(self) -> None:
        """Somebody wants the run to end: wait for nobody any more."""
        self.stopping = True
        self._awaited.clear()
        self._gather()

    def vote(self, host: str, message: dict[str, Any]) -> None:
        """Raises RanksDiverged if members voted for different things, again and again."""
        is_due = self._is_member(host) and message["generation"] == self.generation.number
        if is_due and message["vote"] == self._vote:
            self._votes[host] = message
            if len(self._votes) == len(self.generation.members):
                self._count()

    def trouble(self, host: str, message: dict[str, Any]) -> None:
        if self.ended or not self._is_member(host) or message["generation"] != self.generation.number:
            return
        if self._trouble_since is None:
            self._trouble_since = self.clock()

    def reach(self, host: str, message: dict[str, Any], *, doubtful: Collection[str] = ()) -> None:
        """Whom this host does not reach, as long as there is anybody, and then once more.

        doubtful: hosts that may be lost as well, so that nothing new is learned of them. A member's word is of its
        present generation, or only says who is reached again.
        """
        if self.ended or host not in self._present:
            return
        is_late = self._is_member(host) and message["generation"] != self.generation.number
        unreached = self._present.intersection(message["unreached"])
        before = self._pairs_in_generation()
        self._reach.says(host, unreached, new=() if is_late else unreached.difference(doubtful))
        now = self._pairs_in_generation()
        is_stuck = not is_late and message["waits"] and any(host in pair for pair in now)
        if is_stuck and (self._apart_since is None or set(now) - set(before)):
            self._apart_since = self.clock()
        if again := self._reach.reached_again():
            self.emit({"type": "reached", "pairs": [list(pair) for pair in again]})

    def tick(self) -> str | None:
        """To be called often. Names a member to give up, where one must be to blame and nothing says which."""
        if self.generation is None:
            self._trouble_since = self._apart_since = None
            self._gather()
        if self._apart_since is not None and self.clock() - self._apart_since >= APART_S:
            self._apart_since = None
            if self._pairs_in_generation():
                self._regroup()
                return None
        if self._trouble_since is None or self.clock() - self._trouble_since < PATIENCE_S:
            return None
        self._trouble_since = None
        self._fruitless += 1
        if self._fruitless > FRUITLESS and len(self.generation.members) > 1 and not self._pairs_in_generation():
            return self.generation.members[-1]
        self._regroup()
        return None

    def _is_member(self, host: str) -> bool:
        return self.generation is not None and host in self.generation.members

    def _regroup(self) -> None:
        """This generation is over."""
        left = [host for host in self.generation.members if host in self._present]
        if self._amid and left:
            self._form(self._choose(left, tell=True))
        else:
            self._amid, self.generation = False, None
            self._gather()

    def _gather(self) -> None:
        """Begin a round with all who are there, if they are enough and none is amid one."""
        if self.ended or self.generation or self._awaited or not self._present or self._is_orphaned():
            return
        chosen = self._choose(self._present, tell=True)
        if len(chosen) < self.min_hosts and not self.stopping:
            if self._paused != set(chosen):
                self.emit({"type": "paused", "hosts": sorted(chosen), "min_hosts": self.min_hosts})
            self._paused = set(chosen)
        else:
            self._form(chosen)

    def _choose(self, hosts: Collection[str], *, tell: bool = False) -> list[str]:
        """Who of these goes on, in rank order. tell: also those who are left out, and why."""
        hosts = [host for host in self.hosts if host in hosts]
        pairs = self._reach.pairs(hosts)
        chosen = largest(hosts, pairs, self._remembering.intersection(hosts) or self._last.intersection(hosts))
        waiting = [host for host in hosts if host not in chosen]
        if tell and self._reach.is_news(pairs, waiting):
            self.emit({"type": "apart", "pairs": [list(pair) for pair in pairs], "hosts": waiting})
        return chosen

    def _pairs_in_generation(self) -> list[Pair]:
        return self._reach.pairs(self.generation.members) if self.generation else []

    def _is_orphaned(self) -> bool:
        """Nobody is there who remembers the last agreement: those who may have it are waited for, not for ever."""
        missing = self._last - self._present
        if self.stopping or not missing or self._present & self._remembering:
            self._orphaned_since = None
            return False
        if self._orphaned_since is None:
            self._orphaned_since = self.clock()
            self.emit({"type": "orphaned", "hosts": sorted(missing)})
        limit = RETURN_SOON_S if self._present & self._last else RETURN_S
        return self.clock() - self._orphaned_since < limit

    def _form(self, members: list[str]) -> None:
        self._formed += 1
        if members != self._last_members:
            self._fruitless = 0
        before, self._last_members = self._last_members, members
        self.generation = Generation(self._formed, tuple(members), secrets.token_hex(16), self._amid)
        self._votes, self._vote, self._trouble_since, self._paused = {}, 0, None, set()
        self._orphaned_since = self._apart_since = None
        self.emit({"type": "generation", "number": self._formed, "hosts": members})
        for host in members:
            self.send(host, self.generation.message())
        for host in self._present.intersection(before).difference(members):
            self.send(host, {"type": "out"})

    def _count(self) -> None:
        """All members have voted: it counts."""
        first, votes = self._votes[self.generation.members[0]], self._votes
        if difference := next(filter(None, map(self._difference, votes)), None):
            self._diverge(difference)
            return
        what = first["what"]
        self._amid = True
        self._last, self._remembering = set(self.generation.members), set(self.generation.members)
        if what != ENTER:
            self._fruitless = 0
        if what == ROUND:
            self._diverged = 0
        if what == END:
            self.ended = True
        elif what == ROUND:
            samples = {host: vote["samples"] for host, vote in votes.items()}
            kind = "commit" if not first["cut_short"] else "stopped"
            self.emit({"type": kind, "generation": self.generation.number, "round": first["round"], "samples": samples})
        regroup = what == ROUND and self._should_regroup()
        commit = {"type": "commit", "generation": self.generation.number, "vote": self._vote, "regroup": regroup}
        for host in self.generation.members:
            self.send(host, commit)
        self._votes, self._vote, self._trouble_since, self._apart_since = {}, self._vote + 1, None, None
        if regroup:
            self._amid, self.generation = False, None
            self._gather()

    def _difference(self, host: str) -> str | None:
        """What this member's vote says that the first one's does not."""
        first, vote = self.generation.members[0], self._votes[host]
        ours = self._votes[first]
        if vote["what"] != ours["what"]:
            return f"{host} is at {vote['what']}, {first} at {ours['what']}"
        if vote["digest"] != ours["digest"]:
            return f"the weights of {host} are not those of {first} before {ours['what']}"
        if (place := self._where(vote)) != (wanted := self._where(ours)):
            return f"{host} is at {place} in the work, {first} at {wanted}"
        return None

    def _diverge(self, difference: str) -> None:
        """This must not happen. All begin the round anew, from a state that one of them hands to those who differ."""
        self._diverged += 1
        if self._diverged > MOST_DIVERGED:
            raise RanksDiverged(difference)
        self.emit({"type": "warning", "what": f"{difference}: the round begins anew, from one state for all"})
        self._amid = False
        self._regroup()

    @staticmethod
    def _where(vote: dict[str, Any]) -> list[int]:
        """A round that a stop cuts short ends at different steps."""
        return [vote.get("round"), *(() if vote.get("cut_short") else vote.get("position", ()))]

    def _should_regroup(self) -> bool:
        """Below min_hosts, or where somebody can be let in. Pairs who found no way to each other only now go on."""
        few = len(self.generation.members) < self.min_hosts
        return not self.stopping and (few or not set(self._choose(self._present)) <= set(self.generation.members))
