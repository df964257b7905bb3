"""Who trains together, and when a round counts. Knows neither tensors, sockets, threads nor the time of day."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from exogym.errors import RanksDiverged
from exogym.membership import END, ROUND, STATE_SYNC, Generation
from exogym.membership.coordinator_state import FRUITLESS, Blame, CoordinatorState, Pair, largest

LONGEST_KEY, LONGEST_VALUE = 64, 64 << 10  # of what members tell each other: an address, and a number for each
APART_S = 2.0  # from the first report of who cannot reach whom to a choice: others may report more
# How long to wait for those who have the newest state: where some are there who had it too, and where nobody is.
RETURN_SOON_S, RETURN_S = 20.0, 600.0
MOST_DIVERGED = 3  # times that members may differ, without a round that counted in between


class Coordinator:
    """Forms generations and counts votes. Methods send messages, and never block.

    hosts: all names, in rank order. send(name, message) reaches one of them; emit takes events for the log.
    resumed: any of them may have a checkpoint. `state` is all that it knows.

    If a member is lost in the middle of a round, the others end that round; whoever has come meanwhile joins at the
    next. The next round has to wait while fewer than `min_hosts` are there, or while nobody is there who remembers the
    last one that counted. Of hosts that cannot reach each other the largest group goes on, and the others wait.

    A host that is away is there, and takes no part. It leaves where a round has just counted, so nothing is trained
    twice. Only where nobody else has the newest state it is called: to hand it over, and leave again; or to end a run.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        send: Callable[[str, dict[str, Any]], None],
        emit: Callable[[dict[str, Any]], None],
        *,
        clock: Callable[[], float],
        min_hosts: int = 1,
        resumed: bool = False,
    ):
        self.hosts, self.send, self.emit, self.clock, self.min_hosts = hosts, send, emit, clock, min_hosts
        self.state = CoordinatorState(awaited=set(hosts), last=set(hosts) if resumed else set())

    @property
    def generation(self) -> Generation | None:
        return self.state.generation

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names in the present generation, in rank order."""
        return self.state.generation.members if self.state.generation else ()

    @property
    def ended(self) -> bool:
        return self.state.ended

    @property
    def stopping(self) -> bool:
        return self.state.stopping

    @property
    def is_syncing(self) -> bool:
        """Say whether a generation has been called, and not all of it have come to one state yet."""
        return self.generation is not None and self.state.vote == 0

    @property
    def is_apart(self) -> bool:
        """Say whether hosts that are there do not reach each other."""
        return bool(self.state.reach.told)

    # What the launcher tells.

    def ready(self, host: str, *, anew: bool = True) -> None:
        """Take note that a process of this host waits to be called. anew: it has just started."""
        self.state.awaited.discard(host)
        self.state.present.add(host)
        if anew:
            self.state.remembering.discard(host)
        self._gather()
        if not anew and host not in self.members:
            self.send(host, {"type": "excluded"})
        if host not in self.members and self.state.told_away.pop(host, ""):
            self._tell_away(self.members, found=True)  # again: it was lost meanwhile

    def lost(self, host: str, *, for_good: bool = False) -> None:
        """Take note that a host crashed, fell silent or was given up (for_good), or never came."""
        self.state.awaited.discard(host)
        self.state.present.discard(host)
        self.state.reach.forget(host)
        if for_good:
            self.state.last.discard(host)
            self.state.remembering.discard(host)
        if host in self.members and not self.ended:
            self._regroup()
        else:
            self._gather()

    def leave(self, host: str, reason: str) -> None:
        """Leave this host out from the end of the present round on."""
        state = self.state
        state.away[host] = reason
        if host not in state.last:  # else it may have a checkpoint that the others need
            state.awaited.discard(host)
        if host not in self.members:
            self._tell_away(self.members)
        self._gather()

    def come_back(self, host: str) -> None:
        """Let this host in again, at the next round."""
        self.state.away.pop(host, None)
        self._gather()

    def stop(self) -> None:
        """Wait for nobody any more, as somebody wants the run to end."""
        self.state.stopping = True
        self.state.awaited.clear()
        self._gather()

    def stalled(self) -> None:
        """Take it as trouble that no member has moved for longer than it should take, though none reports any."""
        if self.members and not self.ended:
            self.state.trouble.report(self.clock(), None, "")

    def tick(self) -> Blame | None:
        """Act on the time that has passed; call it often. Names a member to give up, where one must be to blame."""
        state, now = self.state, self.clock()
        if self.generation is None:
            state.trouble.clear()
            state.apart_since = None
            self._gather()
        if state.apart_since is not None and now - state.apart_since >= APART_S:
            state.apart_since = None
            if self._pairs_in_generation():
                self._regroup()
                return None
        if not state.trouble.is_over_patience(now):
            return None
        members, blame = self.members, None
        state.trouble.fruitless += not state.trouble.is_strangers
        if state.trouble.fruitless > FRUITLESS and len(members) > 1 and not self._pairs_in_generation():
            blame = state.trouble.suspect(members, voted=state.votes, proven=state.remembering)
        state.trouble.clear()
        if blame is None:
            self._regroup()
        return blame

    # What members tell, see __init__.py.

    def vote(self, host: str, message: dict[str, Any]) -> None:
        """Count a vote. Raises RanksDiverged if members voted for different things, again and again."""
        if self._is_present(host, message) and message["vote"] == self.state.vote:
            self.state.votes[host] = message
            if len(self.state.votes) == len(self.members):
                self._count()

    def set(self, host: str, message: dict[str, Any]) -> None:
        """Tell the others what a member sets in the store of its generation. Raises ValueError."""
        if not self._is_present(host, message):
            return
        told = {"type": "told", "generation": message["generation"]}
        for name, longest in (("key", LONGEST_KEY), ("value", LONGEST_VALUE)):
            text = told[name] = message[name]
            if not isinstance(text, str) or len(text) > longest:
                raise ValueError(f"no {name} of at most {longest} characters")
        for other in self.members:
            if other != host:
                self.send(other, told)

    def round_end(self, host: str, message: dict[str, Any]) -> None:
        """Let the first member that asks, before its last step or to stop, decide for all if the round is cut short.

        So who comes first need not wait for the others, and who comes later knows that it did not. One that wants to
        stop and comes too late stops in the next round.
        """
        state = self.state
        if not self._is_present(host, message):
            return
        if state.ending_round != message["round"]:
            state.ending_round, state.is_cut_short = message["round"], message["stop"] or state.is_stop_wanted
            state.is_stop_wanted = False
        state.is_stop_wanted |= message["stop"] and not state.is_cut_short
        told = {"generation": message["generation"], "round": state.ending_round, "stop": state.is_cut_short}
        self.send(host, {"type": "round_end", **told})

    def trouble(self, host: str, message: dict[str, Any]) -> None:
        if not self.ended and self._is_present(host, message):
            self.state.trouble.report(self.clock(), host, message["message"])
            if message.get("stranger") and not self.state.trouble.is_strangers:
                self.state.trouble.is_strangers = True
                what = "somebody on the network took the place of a host, and was left out: see docs/security.md"
                self.emit({"type": "warning", "what": f"{host}: {what}"})

    def reach(self, host: str, message: dict[str, Any], *, doubtful: Collection[str] = ()) -> None:
        """Learn whom this host does not reach: told as long as there is anybody, and then once more.

        doubtful: hosts that may be lost as well, so that nothing new is learned of them. A member's report is of its
        present generation, or only says who is reached again.
        """
        state = self.state
        if self.ended or host not in state.present:
            return
        is_late = host in self.members and not self._is_present(host, message)
        unreached = state.present.intersection(message["unreached"])
        before = self._pairs_in_generation()
        state.reach.says(host, unreached, new=() if is_late else unreached.difference(doubtful))
        now = self._pairs_in_generation()
        is_stuck = not is_late and message["waits"] and any(host in pair for pair in now)
        if is_stuck and (state.apart_since is None or set(now) - set(before)):
            state.apart_since = self.clock()
        if again := state.reach.reached_again():
            self.emit({"type": "reached", "pairs": [list(pair) for pair in again]})

    # Who goes on.

    def _is_present(self, host: str, message: dict[str, Any]) -> bool:
        """Say whether a member has sent this in the present generation."""
        return self.generation is not None and host in self.members and message["generation"] == self.generation.number

    def _regroup(self) -> None:
        """End this generation: the rest of it goes on with the round, or a new one begins."""
        left = [host for host in self.members if host in self.state.present]
        if self.state.is_mid_round and left:
            self._form(self._choose(left, tell=True))
        else:
            self._end_generation()

    def _end_generation(self) -> None:
        self.state.is_mid_round, self.state.generation = False, None
        self._gather()

    def _gather(self) -> None:
        """Begin a round with all who are there, if they are enough and none is in the middle of one."""
        state = self.state
        if self.ended or self.generation or state.awaited or not state.present or self._is_orphaned():
            return
        chosen = self._choose(self._may_be_called(), tell=True)
        staying = [host for host in chosen if host not in state.away]
        if len(staying) < self.min_hosts and not self.stopping:
            self._tell_away([])
            if state.paused != set(chosen):
                out = {"away": sorted(state.away)} if state.away else {}
                self.emit({"type": "paused", "hosts": sorted(staying), "min_hosts": self.min_hosts, **out})
            state.paused = set(chosen)
        else:
            self._form(chosen)

    def _may_be_called(self) -> Collection[str]:
        """Return who is there and not away; if none of them has the newest state, those who are away as well."""
        here = self.state.present.difference(self.state.away)
        return here if here & self.state.remembering else self.state.present

    def _tell_away(self, members: Collection[str], **more: bool) -> None:
        """Tell who is left out of a group of these members, or is back in it. found: it was lost, and is no more."""
        state = self.state
        for host, reason in state.away.items():
            if host not in members and state.told_away.get(host) != reason:
                state.told_away[host] = reason
                self.emit({"type": "away", "host": host, "reason": reason, **more})
        for host in members:
            if state.told_away.pop(host, None) is not None and host not in state.away:
                self.emit({"type": "back", "host": host})

    def _choose(self, hosts: Collection[str], *, tell: bool = False) -> list[str]:
        """Choose who of these goes on, in rank order. tell: emit also who is left out, and why."""
        state, hosts = self.state, [host for host in self.hosts if host in hosts]
        pairs = state.reach.pairs(hosts)
        chosen = largest(hosts, pairs, state.remembering.intersection(hosts) or state.last.intersection(hosts))
        waiting = [host for host in hosts if host not in chosen]
        if tell and state.reach.is_news(pairs, waiting):
            self.emit({"type": "apart", "pairs": [list(pair) for pair in pairs], "hosts": waiting})
        return chosen

    def _pairs_in_generation(self) -> list[Pair]:
        return self.state.reach.pairs(self.members)

    def _is_orphaned(self) -> bool:
        """Nobody is there who remembers the last agreement: those who may have it are waited for, not for ever."""
        state = self.state
        missing = state.last - state.present
        if self.stopping or not missing or state.present & state.remembering:
            state.orphaned_since = None
            return False
        if state.orphaned_since is None:
            state.orphaned_since = self.clock()
            self.emit({"type": "orphaned", "hosts": sorted(missing)})
        limit = RETURN_SOON_S if state.present & state.last else RETURN_S
        return self.clock() - state.orphaned_since < limit

    def _should_regroup(self) -> bool:
        """Say whether somebody leaves or can be let in, or they are too few. Pairs who found no way only now go on."""
        members, best = set(self.members), set(self._choose(self._may_be_called()))
        leaves = not members.isdisjoint(self.state.away)
        return not self.stopping and (len(members) < self.min_hosts or leaves or not best <= members)

    def _has_handed_over(self) -> bool:
        """Say whether members are away who only came to bring others to their state, which has just been done."""
        assert self.generation
        leaves = not self.state.away.keys().isdisjoint(self.members)
        return leaves and not self.stopping and not self.generation.continues_round

    def _form(self, members: list[str]) -> None:
        state = self.state
        state.formed += 1
        if members != state.last_members:
            state.trouble.fruitless = 0
        before, state.last_members = state.last_members, members
        state.generation = Generation(state.formed, tuple(members), secrets.token_hex(16), state.is_mid_round)
        state.ending_round = state.ending_round if state.is_mid_round else None
        state.votes, state.vote, state.paused = {}, 0, set()
        state.orphaned_since = state.apart_since = None
        state.trouble.clear()
        self._tell_away(members)
        self.emit({"type": "generation", "number": state.formed, "hosts": members})
        for host in members:
            self.send(host, state.generation.message())
        for host in state.present.intersection(before).difference(members):
            self.send(host, {"type": "excluded"})

    # What counts.

    def _count(self) -> None:
        """Count the votes of all members."""
        state, members, generation = self.state, self.members, self.state.formed
        if difference := next(filter(None, map(self._difference, members)), None):
            # This must not happen. The round begins anew, from a state that one member hands to those who differ.
            state.diverged += 1
            if state.diverged > MOST_DIVERGED:
                raise RanksDiverged(difference)
            self.emit({"type": "warning", "what": f"{difference}: the round begins anew, from one state for all"})
            state.is_mid_round = False
            self._regroup()
            return
        first = state.votes[members[0]]
        state.is_mid_round, state.last, state.remembering = True, set(members), set(members)
        if first["what"] != STATE_SYNC:
            state.trouble.fruitless = 0
        state.ended = first["what"] == END
        if first["what"] == ROUND:
            state.diverged = 0
            samples = {host: vote["samples"] for host, vote in state.votes.items()}
            kind = "stopped" if first["cut_short"] else "commit"
            self.emit({"type": kind, "generation": generation, "round": first["round"], "samples": samples})
        regroup = (first["what"] == ROUND and self._should_regroup()) or (
            first["what"] == STATE_SYNC and self._has_handed_over()
        )
        for host in members:
            self.send(host, {"type": "commit", "generation": generation, "vote": state.vote, "regroup": regroup})
        state.votes, state.vote, state.apart_since = {}, state.vote + 1, None
        state.trouble.clear()
        if regroup:
            self._end_generation()

    def _difference(self, host: str) -> str | None:
        """Tell what this member's vote says that the first one's does not."""

        def place(of: dict[str, Any]) -> list[Any]:
            """Return where a vote's round ends: not the step, where a stop cuts it short."""
            return [of.get("round"), *(() if of.get("cut_short") else of.get("position", ()))]

        first = self.members[0]
        vote, ours = self.state.votes[host], self.state.votes[first]
        if vote["what"] != ours["what"]:
            return f"{host} is at {vote['what']}, {first} at {ours['what']}"
        if vote["digest"] != ours["digest"]:
            return f"the weights of {host} are not those of {first} before {ours['what']}"
        if place(vote) != place(ours):
            return f"{host} is at {place(vote)} in the work, {first} at {place(ours)}"
        return None
