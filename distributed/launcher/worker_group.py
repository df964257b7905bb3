"""The workers of a run: started, listened to, and brought back when they are lost.

    liveness.py      the states of a worker, and every way between them
    worker_group.py  carries out what the table says
    background.py    the inbox, and the threads that may block
    spawner.py       starts a worker, here or over SSH, and connects to it again

One thread, the one that calls `turn`, owns all of this. What may block runs in threads that only tell what comes of it.
What a run has to decide about, `turn` yields as News: training.py reacts to it before the next is looked at.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from distributed.control.channel import LAUNCHER_GONE
from distributed.control.messages import Endpoint, split_line
from distributed.control.timeouts import Timeouts
from distributed.ssh.local_network import NO_ROUTE  # also what a program gets that may not use the local network
from whisper_tuner.errors import HostError, TunerError

from . import liveness
from .background import AudioPush, Background, Takes, side_by_side
from .liveness import Action, Event, Liveness, Pace, State
from .spawner import Spawner, WorkerProcess

KILL_S = 3.0  # what is not killed by then is out of reach, and ends by itself
TAIL_LINES = 20
TURN_S = 0.25  # the longest wait for what threads tell: what the clock brings is this late at most
TRIES = 10  # to reach a host, before a hint: by then one that only sleeps or starts has had half a minute
TERMINAL_CLOSED = (
    "no route to it (errno 65). Was the terminal closed in which this run was started? macOS may then keep the run off"
    " the local network: docs/lost-hosts.md#the-terminal-was-closed-and-no-host-is-found"
)
BY_ADDRESS = (
    "still not reached; it is tried again and again, and taken back when it answers. Only if it has another address"
    " now: stop with Ctrl-C, write its name, such as mac-mini.local, into the hosts file, and go on with --resume RUN"
    " --hosts FILE"
)


@dataclass
class Worker:
    """One host's worker. Only the thread of the worker group reads and writes it."""

    spawner: Spawner
    liveness: Liveness = field(default_factory=Liveness)
    had_process: bool = False
    process: WorkerProcess | None = None
    audio: AudioPush | None = None  # of this process
    beats: int = 0  # heartbeats that were sent to this process
    first_beat: int = 0  # of those that one which is heard again may acknowledge
    is_busy_link: bool = False  # it exchanges weights with others
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    error: dict | None = None
    listens: Endpoint | None = None  # where the others can try whether they reach it
    hello: dict | None = None  # what it said of itself: pid, system, hash of the code that it loaded
    is_known: bool = False  # the coordinator has been told of this process
    lost_for: str = ""  # why, the last time
    in_use: str = ""  # why it asks to be left out, one of YIELD_WHEN
    unreached: str = ""  # why its host could not be reached, the last time

    @property
    def name(self) -> str:
        return self.spawner.name

    def begin(self, process: WorkerProcess, audio: AudioPush) -> None:
        """Begin with another process: nothing of the one before holds."""
        self.process, self.audio, self.had_process = process, audio, True
        self.beats = self.first_beat = 0
        self.is_busy_link = self.is_known = False
        self.error = self.listens = self.hello = None
        self.unreached = self.in_use = ""
        self.tail.clear()

    def tell(self, line: str) -> None:
        """Write a line to it; nothing if it is gone."""
        if self.process:
            with contextlib.suppress(HostError):  # what has to arrive is kept, and repeated over the next connection
                self.process.write(f"{line}\n".encode())

    def beat(self) -> None:
        self.beats += 1
        self.tell(f"beat {self.beats}")

    def describe_failure(self, status: int | None) -> str:
        """Say why it has ended."""
        if self.error:
            return str(self.error.get("message"))
        if status is None:
            reason = "the worker ended for an unknown reason"
        elif status < 0 or status >= 128:
            number = -status if status < 0 else status - 128
            reason = f"the worker was killed by {f'signal {number}' if number else 'a signal'}"
            if number in (0, 9):
                reason += " (usually because the system ran out of memory)"
        elif status == LAUNCHER_GONE:
            return "it lost touch with the master and ended on its own"
        else:
            reason = f"the worker ended with status {status}"
        last = "\n".join(f"  {self.name}: {line}" for line in self.tail)
        return f"{reason}; its last lines:\n{last}" if last else f"{reason}, and printed nothing"


@dataclass(frozen=True)
class News:
    """Something that has happened to a worker."""

    worker: Worker


class Started(News):
    """A process of its own runs."""


class Ready(News):
    """The worker has loaded, and is there; also one that was lost, and has returned."""


@dataclass(frozen=True)
class Lost(News):
    """The others have to do without it."""

    for_good: bool


@dataclass(frozen=True)
class Heard(News):
    """The worker has told an event."""

    event: dict


@dataclass(frozen=True)
class Exited(News):
    """The process has ended, though it was not lost: `advance` is to be called with what that means."""

    reason: str
    status: int | None


@dataclass(frozen=True)
class Unreached(News):
    """The host cannot be reached: `try_again` is to be called, unless the run ends for that."""

    error: TunerError


class WorkerGroup:
    """`events` gets what happens to workers; `log` each line that they print, prefixed with their host.

    pace: how long a worker may be silent. restarting: whether lost workers are to be brought back.
    """

    def __init__(
        self,
        spawners: Sequence[Spawner],
        *,
        pace: Pace,
        events: Callable[[dict], None],
        log: Callable[[str], None],
        background: Background,
    ):
        self.workers = {spawner.name: Worker(spawner) for spawner in spawners}
        self.now = 0.0  # seconds that this process was awake
        self.restarting = True
        self._pace, self._events, self._log = pace, events, log
        self._news: deque[News] = deque()
        self._background, self._timeouts = background, Timeouts()
        self._last_look = background.now()
        self._next_beat = 0.0

    def start(self) -> None:
        for worker in self.workers.values():
            self.advance(worker, Event.DUE)

    def turn(self) -> Iterator[News]:
        """Wait for what threads tell, at most for TURN_S, and do what is due."""
        if self.now >= self._next_beat:
            self._next_beat = self.now + self._timeouts.heartbeat_s
            for worker in self.workers.values():
                if worker.liveness.is_there or worker.liveness.state is State.UNACKNOWLEDGED:
                    worker.beat()  # what is written to a silent one would only be kept for it
        told = self._background.take(TURN_S)
        # The group's clock stands still while this process is frozen, or its machine asleep.
        now = self._background.now()
        self.now += min(now - self._last_look, self._timeouts.longest_turn_s)
        self._last_look = now
        for tell in told:
            tell()
            yield from self.news()
        for worker in self.workers.values():
            self._look_at_clock(worker)
            yield from self.news()

    def news(self) -> Iterator[News]:
        """Yield what has happened since, as by a call of `advance`."""
        while self._news:
            yield self._news.popleft()

    def end(self, *, rescue: bool = False) -> None:
        """Leave no worker behind: ask, wait a moment, kill.

        rescue: the run broke off, so each first saves what was agreed, as if the launcher had died.
        """
        self._background.close()
        running = [(worker, worker.process) for worker in self.workers.values() if worker.process]
        for worker, _ in running:
            assert worker.audio
            worker.audio.over.set()
            worker.tell("rescue" if rescue else "quit")
        deadline = self._background.now() + self._timeouts.grace_s + (self._timeouts.rescue_s if rescue else 0.0)
        stays = []
        for worker, process in running:
            left = max(0.0, deadline - self._background.now())
            if worker.liveness.is_lost or process.wait(left) is None:
                stays.append(process)
        side_by_side([process.kill for process in stays], KILL_S)
        for worker, _ in running:
            worker.process = None

    def _look_at_clock(self, worker: Worker) -> None:
        is_sending = worker.audio is not None and worker.audio.is_sending
        limit = self._pace.silence_s(is_busy_link=worker.is_busy_link or is_sending)
        if len(self.workers) == 1 and worker.spawner.host is None:
            limit = self._timeouts.silence_alone_s
        event = liveness.due_event(worker.liveness, self.now, limit, self._timeouts)
        if event is Event.SILENCE:
            seconds = liveness.silence_limit(worker.liveness, limit, self._timeouts)
            reason = f"nothing heard for {seconds:.0f} s: asleep, or its network is gone"
            self.advance(worker, event, reason, silent_for=seconds)
        elif event is Event.NOT_ACKNOWLEDGED or (event and self.restarting):
            self.advance(worker, event)

    # What threads tell.

    def _on_started(self, worker: Worker, process: WorkerProcess) -> None:
        def of_this(act: Callable[..., None]) -> Takes:
            """Drop what is told of a process that was given up meanwhile."""
            return lambda content: act(worker, content) if worker.process is process else None

        def tell_unsent(worker: Worker, files: Sequence[str]) -> None:
            worker.tell(json.dumps({"type": "unsent", "files": files}))

        worker.begin(process, AudioPush(worker.spawner, self._background, of_this(tell_unsent)))
        self.advance(worker, Event.STARTED)
        self._background.listen(process, of_this(self._on_line), of_this(self._on_exited), self._timeouts.grace_s)
        self._news.append(Started(worker))

    def _on_unreached(self, worker: Worker, error: Exception) -> None:
        if not isinstance(error, TunerError):  # which is the host's, or of a file that cannot be read here
            traceback.print_exception(error)
            error = HostError(worker.name, f"{type(error).__name__}: {error}")
        self._news.append(Unreached(worker, error))

    def try_again(self, worker: Worker, error: TunerError) -> None:
        """Whatever comes in between on the way to a host, go on with the others, and try it again."""
        is_new = worker.unreached != str(error)
        if is_new:
            worker.unreached = str(error)
            self._log(str(error) if isinstance(error, HostError) else f"{worker.name}: {error}")
        if what := advice(worker.name, error, worker.liveness.tries, is_new=is_new):
            self._events({"type": "notice", "host": worker.name, "rank": worker.spawner.rank, "what": what})
        self.advance(worker, Event.FAILED)

    def _on_line(self, worker: Worker, line: str | None) -> None:
        if line is None:
            self.advance(worker, Event.CUT_OFF, "the SSH connection was lost")
            return
        self.advance(worker, Event.HEARD)
        text, event = split_line(line)
        if text.strip():
            worker.tail.append(text)
            self._log(f"{worker.name}: {text}")
        if event:
            with self.blamed_if_incomplete(worker, event):
                self._on_event(worker, event)

    def _on_event(self, worker: Worker, event: dict) -> None:
        if event["type"] == "beat":
            if event["heard"] >= worker.first_beat:
                self.advance(worker, Event.ACKNOWLEDGED)
        elif event["type"] == "want":
            assert worker.audio
            files, process = [str(name) for name in event["files"]], worker.process

            def not_sent(error: HostError | None) -> None:
                if error and worker.process is process and worker.liveness.is_there:
                    self.advance(worker, Event.BLAMED, f"clips cannot be sent to it: {error}")

            self._background.run(partial(worker.audio.send, files), not_sent)
        else:
            self._news.append(Heard(worker, event))
            if event["type"] == "hello":
                self.advance(worker, Event.IMPORTED)
            elif event["type"] == "ready":
                self.advance(worker, Event.LOADED)

    @contextlib.contextmanager
    def blamed_if_incomplete(self, worker: Worker, event: dict) -> Iterator[None]:
        """Give up a worker whose event lacks what it must have."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.advance(worker, Event.BLAMED, f"its message {event['type']!r} is incomplete: {error!r}")

    def _on_exited(self, worker: Worker, status: int | None) -> None:
        reason = worker.lost_for = worker.describe_failure(status)
        if worker.liveness.is_lost:
            self.advance(worker, Event.EXITED, reason)
        else:
            self._news.append(Exited(worker, reason, status))

    # What is done about it.

    def advance(self, worker: Worker, event: Event, reason: str = "", *, silent_for: float | None = None) -> None:
        """Look up in the table of liveness.py what an event makes of a worker, and do it.

        reason, silent_for: told if the worker is lost by that.
        """
        before = worker.liveness
        worker.liveness, action = liveness.advance(before, event, self.now, self._timeouts)
        state, audio, host = worker.liveness.state, worker.audio, {"host": worker.name, "rank": worker.spawner.rank}
        if state is State.UNACKNOWLEDGED and before.state is State.SILENT:
            worker.first_beat = worker.beats + 1
            worker.beat()
        if worker.process and audio and state in (State.WAITING, State.STARTING, State.GIVEN_UP):
            process, worker.process = worker.process, None  # nothing more is heard of it
            audio.over.set()
            self._background.run(process.kill)
        unreached = partial(self._on_unreached, worker)
        if action is Action.START:
            start = partial(worker.spawner.start, again=worker.had_process)
            then = partial(self._on_started, worker)
            self._background.run(start, then, unreached, late=lambda process: process.kill())
        elif action is Action.RECONNECT:

            def reconnected(is_there: bool) -> None:
                self.advance(worker, Event.RECONNECTED if is_there else Event.NOBODY_THERE)

            self._background.run(worker.spawner.reconnect, reconnected, unreached)
        elif action is Action.REPORT_LOSS:
            worker.lost_for, for_good = reason, state is State.GIVEN_UP
            if state is State.SILENT and audio:
                audio.silent.set()
            silence = {} if silent_for is None else {"silent_for": silent_for}
            self._events({"type": "lost", **host, **silence, "reason": reason, "given_up": for_good})
            self._news.append(Lost(worker, for_good=for_good))
        elif action is Action.REPORT_RETURN and audio:
            worker.unreached = ""
            audio.silent.clear()
            self._events({"type": "back", **host})
        if state is State.READY and before.state is not State.READY:
            self._news.append(Ready(worker))


def advice(name: str, error: Exception, tries: int, *, is_new: bool) -> str:
    """Say what the user may have to do about a host that is not found again, or "".

    name: as in the hosts file. is_new: the reason differs from the last.
    """
    if is_new and getattr(error.__cause__, "errno", None) == NO_ROUTE:
        return TERMINAL_CLOSED
    if tries == TRIES:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return BY_ADDRESS
    return ""
