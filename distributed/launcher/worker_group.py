"""The workers of a run: started, listened to, and brought back when they are lost.

    liveness.py      the states of a worker, and every way between them
    worker_group.py  carries out what the table says
    background.py    the inbox, and the threads that may block
    spawner.py       starts a worker here; host_spawner.py starts one over SSH, or connects to it again
    worker_link.py   what is written and read, over one connection after another

One thread, the one that calls `turn`, owns all of this. What may block runs in threads that only tell what comes of it.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from distributed.control.channel import LAUNCHER_GONE
from distributed.control.messages import Endpoint, split_line
from distributed.control.timeouts import Timeouts
from whisper_tuner.errors import HostError, TunerError

from . import liveness
from .audio_push import AudioPush
from .background import Background, Takes, side_by_side
from .liveness import Action, Event, Liveness, State
from .spawner import Spawner, WorkerProcess
from .unreached import advice

if TYPE_CHECKING:
    from .training import Training

KILL_S = 3.0  # what is not killed by then is out of reach, and ends by itself
TAIL_LINES = 20
TURN_S = 0.25  # the longest wait for what threads tell: what the clock brings is this late at most


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
    unreached: str = ""  # why its host could not be reached, the last time

    @property
    def name(self) -> str:
        return self.spawner.name

    def begin(self, process: WorkerProcess, audio: AudioPush) -> None:
        """Another process: nothing of the one before holds."""
        self.process, self.audio, self.had_process = process, audio, True
        self.beats = self.first_beat = 0
        self.is_busy_link = self.is_known = False
        self.error = self.listens = self.hello = None
        self.unreached = ""
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
        """Why it has ended."""
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


class WorkerGroup:
    """`training` is told of the workers, and decides; what it raises ends the run.

    `events` gets what happens to workers; `log` each line that they print, prefixed with their host.
    """

    def __init__(
        self,
        spawners: Sequence[Spawner],
        training: Training,
        *,
        events: Callable[[dict], None],
        log: Callable[[str], None],
        background: Background,
    ):
        self.workers = {spawner.name: Worker(spawner) for spawner in spawners}
        self.now = 0.0  # seconds that this process was awake
        self._training, self._events, self._log = training, events, log
        self._background, self._timeouts = background, Timeouts()
        self._last_look = background.now()
        self._next_beat = 0.0

    def start(self) -> None:
        for worker in self.workers.values():
            self._advance(worker, Event.DUE)

    def turn(self) -> None:
        """Wait for news, at most for TURN_S, and do what is due."""
        if self.now >= self._next_beat:
            self._next_beat = self.now + self._timeouts.heartbeat_s
            for worker in self.workers.values():
                if worker.liveness.is_there or worker.liveness.state is State.UNACKNOWLEDGED:
                    worker.beat()  # what is written to a silent one would only be kept for it
        news = self._background.take(TURN_S)
        self._pass_time()
        for tell in news:
            tell()
        for worker in self.workers.values():
            self._look_at_clock(worker)

    def blame(self, worker: Worker, reason: str, event: Event = Event.BLAMED) -> None:
        """Give up a worker that still runs; another one is started, unless the event is UNFIT."""
        self._advance(worker, event, reason)

    def end(self, *, rescue: bool = False) -> None:
        """Leave no worker behind: ask, wait a moment, kill.

        rescue: the run broke off, so each first saves what was agreed, as if the launcher had died.
        """
        self._background.close()
        running = [worker for worker in self.workers.values() if worker.process]
        for worker in running:
            worker.audio.over.set()
            worker.tell("rescue" if rescue else "quit")
        deadline = self._background.now() + self._timeouts.grace_s + (self._timeouts.rescue_s if rescue else 0.0)

        def has_ended(worker: Worker) -> bool:
            left = max(0.0, deadline - self._background.now())
            return not worker.liveness.is_lost and worker.process.wait(left) is not None

        side_by_side([worker.process.kill for worker in running if not has_ended(worker)], KILL_S)
        for worker in running:
            worker.process = None

    # What the clock brings.

    def _pass_time(self) -> None:
        """The group's clock stands still while this process is frozen, or its machine asleep."""
        now = self._background.now()
        self.now += min(now - self._last_look, self._timeouts.longest_turn_s)
        self._last_look = now

    def _look_at_clock(self, worker: Worker) -> None:
        limit = self._training.silence_s(worker)
        event = liveness.due_event(worker.liveness, self.now, limit, self._timeouts)
        if event is Event.SILENCE:
            seconds = liveness.silence_limit(worker.liveness, limit, self._timeouts)
            reason = f"nothing heard for {seconds:.0f} s: asleep, or its network is gone"
            self._advance(worker, event, reason, silent_for=seconds)
        elif event is Event.NOT_ACKNOWLEDGED or (event and self._training.wants_workers()):
            self._advance(worker, event)

    # What threads tell.

    def _on_started(self, worker: Worker, process: WorkerProcess) -> None:
        def of_this(act: Callable[..., None]) -> Takes:
            """What is told of a process that was given up meanwhile is void."""
            return lambda content: act(worker, content) if worker.process is process else None

        unsent, not_sent = of_this(self._on_unsent), of_this(self._on_not_sent)
        worker.begin(process, AudioPush(worker.spawner, self._background, unsent=unsent, failed=not_sent))
        self._advance(worker, Event.STARTED)
        self._background.listen(process, of_this(self._on_line), of_this(self._on_exited), self._timeouts.grace_s)
        self._training.started(worker)

    def _on_reconnected(self, worker: Worker, is_there: bool) -> None:
        self._advance(worker, Event.RECONNECTED if is_there else Event.NOBODY_THERE)

    def _on_unreached(self, worker: Worker, error: Exception) -> None:
        """Whatever comes in between on the way to a host, the others go on, and it is tried again."""
        if not isinstance(error, TunerError):  # which is the host's, or of a file that cannot be read here
            traceback.print_exception(error)
            error = HostError(worker.name, f"{type(error).__name__}: {error}")
        self._training.unreached(worker, error)
        is_new = worker.unreached != str(error)
        if is_new:
            worker.unreached = str(error)
            self._log(str(error) if isinstance(error, HostError) else f"{worker.name}: {error}")
        if what := advice(worker.name, error, worker.liveness.tries, is_new=is_new):
            self._events({"type": "warning", "host": worker.name, "rank": worker.spawner.rank, "what": what})
        self._advance(worker, Event.FAILED)

    def _on_line(self, worker: Worker, line: str | None) -> None:
        if line is None:
            self._advance(worker, Event.CUT_OFF, "the SSH connection was lost")
            return
        self._advance(worker, Event.HEARD)
        text, event = split_line(line)
        if text.strip():
            worker.tail.append(text)
            self._log(f"{worker.name}: {text}")
        if event:
            try:
                self._on_event(worker, event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self.blame(worker, f"its message {event['type']!r} is incomplete: {error!r}")

    def _on_event(self, worker: Worker, event: dict) -> None:
        if event["type"] == "beat":
            if event["heard"] >= worker.first_beat:
                self._advance(worker, Event.ACKNOWLEDGED)
        elif event["type"] == "want":
            worker.audio.start([str(name) for name in event["files"]])
        else:
            self._training.heard(worker, event)
            if event["type"] == "hello":
                self._advance(worker, Event.IMPORTED)
            elif event["type"] == "ready":
                self._advance(worker, Event.LOADED)

    def _on_exited(self, worker: Worker, status: int | None) -> None:
        reason = worker.lost_for = worker.describe_failure(status)
        event = Event.EXITED if worker.liveness.is_lost else self._training.meaning_of_exit(worker, reason, status)
        self._advance(worker, event, reason)

    def _on_unsent(self, worker: Worker, files: Sequence[str]) -> None:
        worker.tell(json.dumps({"type": "unsent", "files": files}))

    def _on_not_sent(self, worker: Worker, error: HostError) -> None:
        if worker.liveness.is_there:
            self.blame(worker, f"clips cannot be sent to it: {error}")

    # What is done about it.

    def _advance(self, worker: Worker, event: Event, reason: str = "", **about: float) -> None:
        """about: more for the event that tells of a loss."""
        before = worker.liveness
        worker.liveness, action = liveness.advance(before, event, self.now, self._timeouts)
        state = worker.liveness.state
        if state is State.UNACKNOWLEDGED and before.state is State.SILENT:
            worker.first_beat = worker.beats + 1
            worker.beat()
        if worker.process and state in (State.WAITING, State.STARTING, State.GIVEN_UP):
            self._retire(worker)
        unreached = partial(self._on_unreached, worker)
        if action is Action.START:
            start = partial(worker.spawner.start, again=worker.had_process)
            then = partial(self._on_started, worker)
            self._background.run(start, then, unreached, late=lambda process: process.kill())
        elif action is Action.RECONNECT:
            self._background.run(worker.spawner.reconnect, partial(self._on_reconnected, worker), unreached)
        elif action is Action.REPORT_LOSS:
            self._report_loss(worker, reason, about)
        elif action is Action.REPORT_RETURN:
            worker.unreached = ""
            worker.audio.silent.clear()
            self._events({"type": "back", "host": worker.name, "rank": worker.spawner.rank})
        if state is State.READY and before.state is not State.READY:
            self._training.ready(worker)

    def _retire(self, worker: Worker) -> None:
        """Nothing more is heard of this process."""
        process, worker.process = worker.process, None
        worker.audio.over.set()
        self._background.run(process.kill)

    def _report_loss(self, worker: Worker, reason: str, about: dict) -> None:
        worker.lost_for = reason
        if worker.liveness.state is State.SILENT:
            worker.audio.silent.set()
        about |= {"reason": reason, "given_up": worker.liveness.state is State.GIVEN_UP}
        self._events({"type": "lost", "host": worker.name, "rank": worker.spawner.rank, **about})
        self._training.lost(worker)
