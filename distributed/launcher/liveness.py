"""Whether a worker is there, and what is done about it: every state that it can be in, and every way between them.

Pace, below, knows how fast a run goes: after what silence a worker is lost, and when one holds up the others.

    WAITING --DUE--> STARTING --STARTED--> LOADING --LOADED--> READY        the way in
       ^  <--FAILED--                         |                  |
       |                                      +--------+---------+
       |                                 EXITED,       |  SILENCE, CUT_OFF
       +---------------------------------BLAMED        |
       |                                               v
       +--NOBODY_THERE, EXITED, BLAMED-------------- SILENT <---+            the way back
                                                     |    |     | NOT_ACKNOWLEDGED, CUT_OFF
       STARTING <--NO_ANSWER-------------------------+    v HEARD
       (its host answers, and the worker does not)     UNACKNOWLEDGED --ACKNOWLEDGED--> LOADING or READY

    A third failure in a row leads to GIVEN_UP instead of WAITING, and so does UNFIT.

`advance` is the table, `due_event` says what the clock brings. Both are pure: no threads, no clock of their own. The
worker group carries out the actions. `busy` holds while a thread starts a worker or connects to it: so there is never
more than one for a worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from statistics import median

from distributed.control.timeouts import Timeouts

MOST_FAILURES = 3  # of one worker in a row, without a round in between
STUCK_FACTOR = 5.0  # nothing is stuck before it has taken so many times the slowest that was seen
SLOWEST_LINK = 250e3  # bytes/s: until a round has been seen, what an exchange of all weights is allowed to take
TRAVELS = 8  # bytes of each trained weight in an exchange: float32, there and back


class State(Enum):
    WAITING = "there is no worker; one is started when it is due"
    STARTING = "a thread connects to the host and starts a worker there"
    LOADING = "the worker runs, and loads its model and data"
    READY = "it has loaded; the coordinator may call it"
    SILENT = "lost to the others; its host is tried over new connections, for the worker may still be there"
    UNACKNOWLEDGED = "heard again; it counts as reconnected once it has acknowledged a heartbeat"
    GIVEN_UP = "it failed too often in a row; nothing more is tried"


class Event(Enum):
    # from the clock
    DUE = auto()
    SILENCE = auto()
    NO_ANSWER = auto()
    NOT_ACKNOWLEDGED = auto()
    # from the thread that starts a worker, or connects to it
    STARTED = auto()
    FAILED = auto()  # the host cannot be reached
    RECONNECTED = auto()
    NOBODY_THERE = auto()
    # from the worker
    HEARD = auto()
    IMPORTED = auto()
    LOADED = auto()
    ACKNOWLEDGED = auto()
    CUT_OFF = auto()  # its connection has ended; it may live
    EXITED = auto()
    FINISHED = auto()  # it has exited, and is not needed any more
    SHORT_OF_MEMORY = auto()  # it has exited for that; other programs may end
    ABORTED = auto()  # while its group formed, as anybody who reaches gloo's port can make it
    # from those who train with it, or cannot
    BLAMED = auto()  # another worker may do better
    UNFIT = auto()  # no other worker would


class Action(Enum):
    START = auto()
    RECONNECT = auto()
    REPORT_LOSS = auto()
    REPORT_RETURN = auto()


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """All that is known of one worker. Times are the group's."""

    state: State = State.WAITING
    imported: bool = False  # its libraries, which may hold up its heartbeats for longer than anything later
    loaded: bool = False
    busy: bool = False
    due: float = 0.0  # when to start it, or to connect to it again
    heard: float = 0.0  # when it last was
    lost: float = 0.0  # when it fell silent
    reached: float | None = None  # since when its host has answered each try, while it is silent
    heard_again: float = 0.0
    failures: int = 0  # of its own, in a row
    tries: int = 0  # to reach its host, in a row

    @property
    def is_there(self) -> bool:
        return self.state in (State.LOADING, State.READY)

    @property
    def is_lost(self) -> bool:
        """Silent, in the eyes of the others."""
        return self.state in (State.SILENT, State.UNACKNOWLEDGED)


WAITING, STARTING, LOADING, READY = State.WAITING, State.STARTING, State.LOADING, State.READY
SILENT, UNACKNOWLEDGED, GIVEN_UP = State.SILENT, State.UNACKNOWLEDGED, State.GIVEN_UP

THERE, LOST = (LOADING, READY), (SILENT, UNACKNOWLEDGED)

# What is not in the table changes no state. A failure leads to GIVEN_UP instead of WAITING where it is one too many,
# and a worker that had not loaded returns to LOADING instead of READY.
ROWS: list[tuple[tuple[State, ...], Event, State, Action | None]] = [
    ((WAITING,), Event.DUE, STARTING, Action.START),
    ((STARTING,), Event.STARTED, LOADING, None),
    ((STARTING,), Event.FAILED, WAITING, None),
    ((LOADING,), Event.LOADED, READY, None),
    (THERE, Event.SILENCE, SILENT, Action.REPORT_LOSS),
    (THERE, Event.CUT_OFF, SILENT, Action.REPORT_LOSS),
    (THERE, Event.EXITED, WAITING, Action.REPORT_LOSS),
    (THERE, Event.SHORT_OF_MEMORY, WAITING, Action.REPORT_LOSS),
    (THERE, Event.ABORTED, WAITING, Action.REPORT_LOSS),
    (THERE, Event.FINISHED, WAITING, None),
    (THERE + LOST, Event.BLAMED, WAITING, Action.REPORT_LOSS),
    (THERE + LOST, Event.UNFIT, GIVEN_UP, Action.REPORT_LOSS),
    ((SILENT,), Event.DUE, SILENT, Action.RECONNECT),
    ((SILENT,), Event.HEARD, UNACKNOWLEDGED, None),
    ((UNACKNOWLEDGED,), Event.DUE, UNACKNOWLEDGED, Action.RECONNECT),
    ((UNACKNOWLEDGED,), Event.ACKNOWLEDGED, READY, Action.REPORT_RETURN),
    ((UNACKNOWLEDGED,), Event.NOT_ACKNOWLEDGED, SILENT, None),
    ((UNACKNOWLEDGED,), Event.CUT_OFF, SILENT, None),
    (LOST, Event.NO_ANSWER, STARTING, Action.START),
    (LOST, Event.NOBODY_THERE, WAITING, None),
    (LOST, Event.EXITED, WAITING, None),
]
TABLE = {(state, event): (after, action) for states, event, after, action in ROWS for state in states}


def advance(before: Liveness, event: Event, now: float, timeouts: Timeouts) -> tuple[Liveness, Action | None]:
    """Return the worker after an event, and what is to be done. An exit or blame of one that was there is a failure."""
    worker = _noted(before, event, now, timeouts)
    state, action = TABLE.get((before.state, event), (before.state, None))
    if state is READY and not worker.loaded:
        state = LOADING
    if state is before.state:
        return worker, action
    worker = replace(worker, state=state)
    if state is STARTING:
        worker = replace(worker, imported=False, loaded=False)
    elif state is LOADING and event is Event.STARTED:
        worker = replace(worker, heard=now)
    elif state is SILENT and before.is_there:
        due = now if event is Event.CUT_OFF else now + timeouts.reconnect_s
        worker = replace(worker, lost=now, reached=None, tries=0, due=due)
    elif state is UNACKNOWLEDGED:
        # There is a way to it: TCP finds its own back much later. What has just been connected need not be once more.
        worker = replace(worker, heard_again=now, due=now if worker.reached is None else worker.due)
    elif state is WAITING:
        worker = _waiting(worker, event, now, timeouts, failed=before.is_there or event is Event.BLAMED)
    return worker, action


def _noted(worker: Liveness, event: Event, now: float, timeouts: Timeouts) -> Liveness:
    """Note what an event tells, in whatever state."""
    if event is Event.DUE:
        return replace(worker, busy=True, tries=worker.tries + 1, due=now + timeouts.reconnect_s)
    if event is Event.NO_ANSWER:
        return replace(worker, busy=True, tries=1)
    if event is Event.RECONNECTED:
        reached = now if worker.reached is None else worker.reached
        return replace(worker, busy=False, reached=reached, due=max(worker.due, now + timeouts.listen_s))
    if event is Event.FAILED:
        return replace(worker, busy=False, reached=None)
    if event in (Event.STARTED, Event.NOBODY_THERE):
        return replace(worker, busy=False, reached=None, tries=0)
    if event is Event.HEARD:
        return replace(worker, heard=now)
    if event is Event.IMPORTED:
        return replace(worker, imported=True)
    if event is Event.LOADED:
        return replace(worker, loaded=True)
    if event is Event.CUT_OFF:
        return replace(worker, due=min(worker.due, now))
    return worker


def _waiting(worker: Liveness, event: Event, now: float, timeouts: Timeouts, *, failed: bool) -> Liveness:
    back_off = timeouts.back_off_s
    if event is Event.FAILED:
        return replace(worker, due=now + back_off[min(worker.tries, len(back_off)) - 1])
    if event in (Event.SHORT_OF_MEMORY, Event.ABORTED):  # by an abort a stranger could have every host given up
        return replace(worker, due=now + back_off[2 if event is Event.ABORTED else -1])
    if not failed:  # its loss has been told already
        return replace(worker, due=now)
    failures = worker.failures + 1
    state = GIVEN_UP if failures >= MOST_FAILURES else WAITING
    pause = back_off[min(failures, len(back_off)) - 1]
    return replace(worker, state=state, failures=failures, due=now + pause)


def silence_limit(worker: Liveness, silence_s: float, timeouts: Timeouts) -> float:
    """Return for how long this worker, which is there, may say nothing."""
    if worker.state is READY:
        return silence_s
    return max(silence_s, timeouts.silence_loading_s if worker.imported else timeouts.silence_importing_s)


def due_event(worker: Liveness, now: float, silence_s: float, timeouts: Timeouts) -> Event | None:
    """Look up what the clock brings. silence_s: for how long this worker may say nothing while it is ready."""
    if worker.is_there:
        return Event.SILENCE if now - worker.heard > silence_limit(worker, silence_s, timeouts) else None
    has_time = worker.state is UNACKNOWLEDGED and now < worker.heard_again + timeouts.acknowledge_s
    if worker.is_lost and not has_time and not worker.busy and worker.reached is not None:
        may_answer_until = max(worker.lost + timeouts.replace_s, worker.reached + timeouts.listen_s)
        if now >= may_answer_until:
            return Event.NO_ANSWER
    if worker.state is UNACKNOWLEDGED and not has_time:
        return Event.NOT_ACKNOWLEDGED
    if worker.busy or worker.state in (STARTING, GIVEN_UP):
        return None
    return Event.DUE if now >= worker.due else None


def counted(worker: Liveness) -> Liveness:
    """Forget earlier failures: a round has counted in which it took part."""
    return replace(worker, failures=0, tries=0)


@dataclass
class Pace:
    """The known speed of a run. patience_s: for how long it may always stand still (`round_timeout_s`)."""

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
        limit = self.patience_s
        if not entering:  # they may be exchanging all weights
            limit = max(limit, STUCK_FACTOR * self._slowest_round or TRAVELS * self.trainable / SLOWEST_LINK)
        if quiet > limit:
            for host in members:
                self.moved(host, now)
            return None, quiet
        return None
