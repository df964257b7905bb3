"""A run's training, from the first worker to the saved model: what workers say, and what the coordinator decides."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from distributed.control.messages import endpoint
from distributed.control.timeouts import Timeouts
from distributed.hosts.interfaces import address_on
from distributed.plan.job import YIELD_WHEN
from distributed.run_dir.away import ASKED
from exogym.errors import RanksDiverged
from exogym.membership.client import UNREACHED_S
from exogym.membership.coordinator import Coordinator
from whisper_tuner.errors import HostError, RunError

from .background import Background
from .liveness import Event, Pace, State, counted
from .spawner import Spawner
from .worker_group import Exited, Heard, Lost, News, Ready, Started, Unreached, Worker, WorkerGroup

# Errors that a worker's own host has, and that another try may mend.
RETRYABLE = {"PeerLost", "HostError"}
RETRYABLE_LATER = {"TooLittleMemory"}  # once a run has begun: other programs may have taken it
# Errors that come again when the run goes on from its checkpoints: they are the reason, or lead to it once more.
FATAL = {"CheckpointError", "NotFinite"}
ABORTS = (-signal.SIGABRT, 128 + signal.SIGABRT)
STAYS_S = 30.0  # in one network, before hosts that do not reach each other meet in another: they may find their way

AWAY_EVERY_S = 1.0  # between two looks at who is to be left out


class Refused(RunError):
    """The run cannot be resumed."""


class Training:
    """Leads a WorkerGroup. `events` gets workers' events with `host` and `rank`; `log` all other lines.

    asked_away: the hosts that a person wants to be left out at present.
    """

    def __init__(
        self,
        spawners: Sequence[Spawner],
        *,
        events: Callable[[dict], None],
        log: Callable[[str], None],
        min_hosts: int = 1,
        patience_s: float = 120.0,
        resumed: bool = False,
        background: Background | None = None,
        meeting: Meeting | None = None,
        asked_away: Callable[[], Collection[str]] = tuple,
    ):
        self._exporter: Worker | None = None
        self._events, self._timeouts, self._meeting = events, Timeouts(), meeting
        self._background = background or Background()
        self._pace = Pace(patience_s, self._timeouts)
        self.group = WorkerGroup(spawners, pace=self._pace, events=events, log=log, background=self._background)
        self.workers = self.group.workers
        self._all = self.workers.values()
        self.coordinator = Coordinator(
            list(self.workers),
            lambda name, message: self.workers[name].tell(json.dumps(message)),
            self._on_decision,
            clock=lambda: self.group.now,
            min_hosts=min_hosts,
            resumed=resumed,
        )
        self._entering = 0  # the generation that has not come to one state yet
        self._committed = self._diverged = False
        self.was_stopped = False  # before all work was done
        self._asked_away, self._next_look = asked_away, 0.0
        self._stays_until = 0.0  # where hosts meet that do not reach each other

    def run(self, stopping: Callable[[], bool]) -> Worker:
        """Train until all work is done, or `stopping()` is true and they have agreed; then have one save the model.

        Returns that one. Raises RunError, HostError.
        """
        self.group.start()
        while not self.coordinator.ended:
            if stopping() and not self.coordinator.stopping:
                with self._telling_coordinator():
                    self.coordinator.stop()
                for worker in self._all:
                    worker.tell("stop")
            self._turn()
            if self.coordinator.ended:
                break
            given_up = [worker for worker in self._all if worker.liveness.state is State.GIVEN_UP]
            if len(self._all) - len(given_up) < self.coordinator.min_hosts:
                left = ", ".join(worker.name for worker in self._all if worker not in given_up)
                what = f"only {left} left, and min_hosts = {self.coordinator.min_hosts}" if left else "no host is left"
                raise RunError("\n".join([what, *(f"{worker.name}: {worker.lost_for}" for worker in given_up)]))
            if stopping() and not any(worker.liveness.is_there or worker.liveness.busy for worker in self._all):
                raise RunError("stopped while no host was connected")
        return self._save()

    def end(self, *, rescue: bool = False) -> None:
        """Leave no worker behind. What ranks that differ have is not worth saving."""
        self.group.end(rescue=rescue and not self._diverged)

    def _turn(self) -> None:
        self.group.restarting = not (self.coordinator.stopping or self.coordinator.ended)
        self.follow(self.group.turn())
        self._follow_own_address()
        self._follow_away()
        self._look_for_stuck()
        if blame := self.coordinator.tick():
            said = f" ({blame.said})" if blame.said else ""
            what = f"the others cannot connect to it: another network, or a firewall?{said}"
            self._advance(self.workers[blame.host], Event.BLAMED, what)

    # What the worker group tells.

    def follow(self, news: Iterable[News]) -> None:
        """React to each piece of news. Raises what ends the run."""
        for one in news:
            worker = one.worker
            match one:
                case Started():
                    self._pace.moved(worker.name, self.group.now)
                    if self._meeting and self._meeting.line:  # its RunSpec tells where they met when the run began
                        worker.tell(self._meeting.line)
                    if self.coordinator.stopping:
                        worker.tell("stop")
                case Unreached(error=error):
                    if not self._committed and not worker.had_process:
                        raise error  # a new start by the user is the better try
                    self.group.try_again(worker, error)
                case Ready():
                    with self._telling_coordinator():
                        self.coordinator.ready(worker.name, anew=not worker.is_known)
                    worker.is_known = True
                case Lost(for_good=for_good):
                    with self._telling_coordinator():
                        self.coordinator.lost(worker.name, for_good=for_good)
                case Exited(reason=reason, status=status):
                    self._advance(worker, self._meaning_of_exit(worker, reason, status), reason)
                case Heard(event=event):
                    with self.group.blamed_if_incomplete(worker, event):
                        self._hear(worker, event)

    def _advance(self, worker: Worker, event: Event, reason: str) -> None:
        """Have the group act on an event that is decided here, and follow what comes of it."""
        self.group.advance(worker, event, reason)
        self.follow(self.group.news())

    def _meaning_of_exit(self, worker: Worker, reason: str, status: int | None) -> Event:
        """Tell EXITED, ABORTED, SHORT_OF_MEMORY and FINISHED apart. Raises RunError for an error that would recur."""
        if self.coordinator.ended and worker is not self._exporter:
            return Event.FINISHED
        generation = self.coordinator.generation
        members = generation.members if generation and self.coordinator.is_syncing else ()
        if status in ABORTS and worker.name in members and len(members) > 1:
            return Event.ABORTED
        error = worker.error or {}
        kind, retryable = error.get("kind"), RETRYABLE | RETRYABLE_LATER if self._committed else RETRYABLE
        if kind and kind not in retryable and (error.get("foreseen") or not self._committed):
            raise (Refused if kind in FATAL else RunError)(f"{worker.name}: {reason}")
        is_short = kind in RETRYABLE_LATER and not worker.liveness.loaded  # it costs the others nothing to try it again
        return Event.SHORT_OF_MEMORY if is_short else Event.EXITED

    def _hear(self, worker: Worker, event: dict) -> None:
        """React to a worker's event. Raises KeyError and the like for one that lacks what it must have."""
        kind = event["type"]
        if kind == "listens":  # this and the next two come from threads that say nothing about what the rank is at
            return self._on_listens(worker, event)
        if kind == "reach":
            return self._on_reach(worker, event)
        told = {**event, "host": worker.name, "rank": worker.spawner.rank}
        if kind == "machine":
            return self._events(told)
        if kind == "in_use":
            worker.in_use = YIELD_WHEN[event["why"]] if event["why"] else ""
            return
        self._pace.moved(worker.name, self.group.now)
        # From "exchange" until the vote after it weights are on this worker's link. Hidden rounds train meanwhile.
        worker.is_busy_link = kind == "exchange" or (worker.is_busy_link and kind in ("step", "checkpoint"))
        if kind == "step":
            self._pace.step(worker.name, event["step"], event["seconds"])
        elif kind == "round":
            self._pace.round(max(event["seconds"], event.get("seconds_travelling") or 0.0))
        elif kind == "start":
            self._pace.trainable = event["trainable"]
        elif kind == "error":
            worker.error = event
        elif kind == "saved":
            self._exporter = worker
        elif kind == "done":
            self.was_stopped |= bool(event["stopped"])
        if kind in ("vote", "round_end", "set", "trouble"):
            with self._telling_coordinator():
                getattr(self.coordinator, kind)(worker.name, event)
        elif kind not in ("ready", "alive", "exchange"):
            if kind == "hello":
                worker.hello = event
                self._compare(worker, event)
            self._events(told)

    # Who is left out.

    @property
    def away(self) -> set[str]:
        """Return the hosts that are left out, or about to be."""
        return {*self.coordinator.state.away}

    def _follow_away(self) -> None:
        """Have hosts leave and return as a person has asked, or as they ask by themselves."""
        if self.group.now < self._next_look or self.coordinator.ended:
            return
        self._next_look = self.group.now + AWAY_EVERY_S
        asked = self._asked_away()
        for worker in self._all:
            reason = ASKED if worker.name in asked else worker.in_use
            if reason == self.coordinator.state.away.get(worker.name, ""):
                continue
            with self._telling_coordinator():
                if reason:
                    self.coordinator.leave(worker.name, reason)
                else:
                    self.coordinator.come_back(worker.name)

    # Where they reach this machine, and each other.

    def _follow_own_address(self) -> None:
        """Tell all at once of a new address: whoever knows only the old one reaches nobody, and would not be called."""
        if self._meeting is None:
            return
        connected = [address for one in self._all if (address := one.spawner.own_address)]
        if what := self._meeting.moved(connected):
            self.coordinator.stalled()  # connections from an address that is gone are dead, and gloo does not say so
        elif self.coordinator.is_apart and self.group.now >= self._stays_until:
            what = self._meeting.left(connected)
        if what:
            self._stays_until = self.group.now + STAYS_S
            for worker in self._all:
                worker.tell(self._meeting.line)
            self._events({"type": "warning", "what": what})

    def _on_listens(self, worker: Worker, event: dict) -> None:
        before, worker.listens = worker.listens, endpoint(event["address"], event["port"])
        generation = self.coordinator.generation
        if before and before[0] != worker.listens[0] and generation and worker.name in generation.members:
            # Connections to an address that is gone are dead. Where it is still good, a vote comes before this counts.
            self.coordinator.stalled()
        for one in self._all:
            others = [list(other.listens) for other in self._all if other is not one and other.listens]
            one.tell(json.dumps({"type": "peers", "peers": others}))

    def _on_reach(self, worker: Worker, event: dict) -> None:
        """Pass on who is not reached. Addresses that nobody has say nothing; one not heard here either may be lost."""
        unreached = {endpoint(*peer) for peer in event["unreached"]}
        others = [one for one in self._all if one.listens in unreached]
        doubtful = {
            one.name
            for one in others
            # One that still computes is only waited for: connections that are there already outlive a new firewall.
            if self.group.now - one.liveness.heard >= self._timeouts.silence_min_s
            or self._pace.since_moved(one.name, self.group.now) < UNREACHED_S
        }
        about = {**event, "unreached": [one.name for one in others]}
        with self._telling_coordinator():
            self.coordinator.reach(worker.name, about, doubtful=doubtful)

    def _compare(self, worker: Worker, hello: dict) -> None:
        """Compare a worker with another that is there: the one that has just come is to blame if they differ."""
        there = ((one, one.hello) for one in self._all if one is not worker and one.liveness.is_there and one.hello)
        other, its = next(there, (None, {}))
        if other is None:
            return
        if hello["system"] != its["system"]:
            raise RunError(
                f"{worker.name} runs {hello['system']}, {other.name} {its['system']}",
                remedy="gloo cannot mix Macs with other systems: use hosts of one kind.",
            )
        if hello["source"] != its["source"]:
            what = f"{worker.name} runs different code from {other.name}"
            if not self._committed:
                raise RunError(
                    what, remedy="Start again without --no-sync; `multimac hosts check` shows each host's environment."
                )
            self._advance(worker, Event.UNFIT, what)  # changed during the run: no reason to end what the others do

    # The coordinator.

    @contextlib.contextmanager
    def _telling_coordinator(self) -> Iterator[None]:
        """Note what it has decided of what it is told inside. Raises RunError."""
        try:
            yield
        except RanksDiverged as error:
            self._diverged = True
            remedy = "`multimac hosts check` compares code and packages; then start again, or resume."
            raise RunError(str(error), remedy=remedy) from error
        self.group.restarting = not (self.coordinator.stopping or self.coordinator.ended)
        generation = self.coordinator.generation
        if generation and self.coordinator.is_syncing:
            self._entering = 0 if generation.continues_round else generation.number
        elif generation and generation.number == self._entering:
            self._entering = 0  # they begin a round together: all are as far, whatever they did before
            self._pace.entered(generation.members)

    def _on_decision(self, event: dict) -> None:
        if event["type"] == "commit":
            self._committed = True
            self._pace.commit(event["generation"], self.group.now)
            for name in event["samples"]:
                worker = self.workers[name]
                worker.liveness = counted(worker.liveness)
        self._events(event)

    def _look_for_stuck(self) -> None:
        """Give up a process whose heartbeats come, while others have long been waiting for it."""
        generation = self.coordinator.generation
        if not generation or len(generation.members) < 2 or self.coordinator.ended:
            return
        stuck = self._pace.stuck(generation.members, self.group.now, entering=self.coordinator.is_syncing)
        if stuck is None:
            return
        host, seconds = stuck
        if host:
            what = f"made no step for {seconds:.0f} s while others were waiting for it"
            self._advance(self.workers[host], Event.BLAMED, what)
        else:
            self.coordinator.stalled()

    # The end.

    def _save(self) -> Worker:
        """Have the model written by one of those who have it, on this machine if it is among them. Raises RunError."""
        assert self.coordinator.generation  # it has ended
        members = [self.workers[name] for name in self.coordinator.generation.members]
        for worker in members:
            if not worker.liveness.is_there:
                continue
            worker.tell("save")
            deadline = self.group.now + self._timeouts.save_s
            while worker.liveness.is_there and self._exporter is None and self.group.now < deadline:
                self._turn()
            # Perhaps another has saved it, which was asked before, and was late.
            if (exporter := self._exporter) and self._fetch(exporter):
                return exporter
            self._exporter = None
        reasons = [f"{worker.name}: {worker.lost_for}" for worker in members if worker.lost_for]
        head = ["every host was lost before the model was saved"] if len(members) > 1 or not reasons else []
        raise RunError("\n".join([*head, *reasons]))

    def _fetch(self, worker: Worker) -> bool:
        """Copy its model in a thread: the others must hear that this process lives, as one of them may have to save."""
        outcome: list[Exception | None] = []
        self._background.run(lambda: worker.spawner.fetch("final"), then=outcome.append, failed=outcome.append)
        while not outcome:
            self._turn()
        if error := outcome[0]:
            worker.lost_for = str(error)
            what = f"the model it saved cannot be fetched: {error}"
            self._events({"type": "warning", "host": worker.name, "rank": worker.spawner.rank, "what": what})
        return error is None


class Meeting:
    """The address of this machine towards which ranks form their groups.

    It changes when the machine gets another one: by DHCP, or by waking elsewhere. interface: the one to be on, or "".
    line: what tells a worker of the address; "" before it has changed.
    """

    def __init__(self, address: str, interface: str = ""):
        self._interface, self._first, self.line = interface, address, ""
        self.address = address

    def moved(self, connected: Iterable[str]) -> str:
        """Move if this machine has just lost its address and has another that leads to a host; say where to, or "".

        connected: its own addresses on the connections to hosts, best first. To be called often.
        """
        before = self.address
        if is_own(before) or not self._move(connected):
            return ""
        return f"the address of this machine was {before}, and is now {self.address}: the hosts meet there"

    def left(self, connected: Iterable[str]) -> str:
        """Move if hosts do not reach each other where they meet: to the usual network, and back from there.

        The fastest one, where a run begins, may be a cable that somebody pulls.
        """
        before = self.address
        if not self._move(connected):
            return ""
        return f"not all hosts reach each other by {before}: they meet at {self.address} now"

    def _move(self, connected: Iterable[str]) -> bool:
        """Move to another address: that of the host first in the file, or where the run began."""
        if self._interface:
            try:
                found = [address_on(self._interface, self._interface)]
            except HostError:  # the network may be on its way up
                return False
        else:
            found = [*[address for address in connected if is_own(address)][:1], self._first]
        for address in found:
            if address != self.address and is_own(address):
                self.address, self.line = address, json.dumps({"type": "meeting", "address": address})
                return True
        return False


def is_own(address: str) -> bool:
    """Tell whether this machine has this address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
