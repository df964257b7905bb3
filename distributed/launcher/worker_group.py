"""The workers of a run: started, listened to, and brought back when they are lost.

    liveness.py      the states of a worker, and every way between them
    worker_group.py  carries out what the table says
    background.py    the inbox, and the threads that may block
    host_spawner.py  starts a worker over SSH, or connects to it again; local_spawner.py starts one here
    worker_link.py   what is written and read, over one connection after another

One thread, the one that calls `turn`, owns all of this. What may block runs in threads that only put messages.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from distributed.control.messages import split_line
from distributed.control.timeouts import Timeouts
from whisper_tuner.errors import HostError, TunerError

from . import liveness
from .audio_push import AudioPush
from .background import Background, Kind, Message
from .liveness import Action, Event, State
from .worker_record import Spawner, Worker

TURN_S = 0.25  # the longest wait for a message: what the clock brings is this late at most


class Listener(Protocol):
    """Who trains with the workers. What it raises ends the run."""

    def started(self, worker: Worker) -> None: ...

    def not_started(self, worker: Worker, error: TunerError) -> None: ...

    def heard(self, worker: Worker, event: dict) -> None:
        """May raise KeyError, TypeError, ValueError, AttributeError for an event that lacks what it must have."""

    def ready(self, worker: Worker) -> None:
        """It has loaded, and is there; also one that was lost, and has returned."""

    def lost(self, worker: Worker) -> None: ...

    def meaning_of_exit(self, worker: Worker) -> Event:
        """EXITED, SHORT_OF_MEMORY or FINISHED."""

    def silence_s(self, worker: Worker) -> float:
        """For how long this one may say nothing while it is ready."""

    def unsent(self, worker: Worker, files: Sequence[str]) -> None:
        """These clips cannot be sent to it."""

    def fetched(self, error: HostError | None) -> None:
        """What `fetch` was called for is there, or cannot be had."""

    def wants_workers(self) -> bool:
        """Whether lost ones are to be brought back."""


class WorkerGroup:
    """`events` gets what happens to workers; `log` each line that they print, prefixed with their host."""

    def __init__(
        self,
        spawners: Sequence[Spawner],
        listener: Listener,
        *,
        events: Callable[[dict], None],
        log: Callable[[str], None],
        background: Background,
        timeouts: Timeouts,
    ):
        self.workers = {spawner.name: Worker(spawner) for spawner in spawners}
        self.now = 0.0  # seconds that this process was awake
        self._listener, self._events, self._log = listener, events, log
        self._background, self._timeouts = background, timeouts
        self._last_look = background.now()
        self._next_beat = 0.0
        self._lives = 0

    def start(self) -> None:
        for worker in self.workers.values():
            self._advance(worker, Event.DUE)

    def turn(self) -> None:
        """Wait for messages, at most for TURN_S, and do what is due."""
        if self.now >= self._next_beat:
            self._next_beat = self.now + self._timeouts.heartbeat_s
            for worker in self.workers.values():
                if worker.liveness.is_there or worker.liveness.state is State.UNACKNOWLEDGED:
                    worker.beat()  # what is written to a silent one would only be kept for it
        messages = self._background.take(TURN_S)
        self._pass_time()
        for message in messages:
            self._handle(message)
        for worker in self.workers.values():
            self._look_at_clock(worker)

    def tell_all(self, line: str) -> None:
        for worker in self.workers.values():
            worker.tell(line)

    def blame(self, worker: Worker, reason: str, event: Event = Event.BLAMED) -> None:
        """Give up a worker that still runs; another one is started, unless the event is UNFIT."""
        self._advance(worker, event, reason)

    def counted(self, worker: Worker) -> None:
        """A round has counted in which it took part."""
        worker.liveness = liveness.counted(worker.liveness)

    def fetch(self, worker: Worker, folder: str) -> None:
        """Copy a folder of the run's from its host; the listener is told."""
        spawner, life = worker.spawner, worker.life

        def fetch() -> Message:
            error = None
            try:
                spawner.fetch(folder)
            except HostError as failure:
                error = failure
            return Message(spawner.name, life, Kind.FETCHED, error)

        self._background.run(fetch)

    def end(self, *, rescue: bool = False) -> None:
        """Leave no worker behind: ask, wait a moment, kill.

        rescue: the run broke off, so each first saves what was agreed, as if the launcher had died.
        """
        for message in self._background.close():
            if message.kind is Kind.STARTED:
                message.content.kill()
        running = [worker for worker in self.workers.values() if worker.process]
        for worker in running:
            worker.audio.end()
            worker.tell("rescue" if rescue else "quit")
        deadline = self._background.now() + self._timeouts.grace_s + (self._timeouts.rescue_s if rescue else 0.0)
        for worker in running:
            left = max(0.0, deadline - self._background.now())
            if worker.liveness.is_lost or worker.process.wait(left) is None:
                worker.process.kill()
            worker.process = None

    # What has happened.

    def _pass_time(self) -> None:
        """The group's clock stands still while this process is frozen, or its machine asleep."""
        now = self._background.now()
        self.now += min(now - self._last_look, self._timeouts.longest_turn_s)
        self._last_look = now

    def _look_at_clock(self, worker: Worker) -> None:
        limit = self._listener.silence_s(worker)
        event = liveness.due_event(worker.liveness, self.now, limit, self._timeouts)
        if event is Event.SILENCE:
            worker.silent_for = limit if worker.liveness.state is State.READY else self._timeouts.silence_loading_s
            reason = f"nothing heard for {worker.silent_for:.0f} s: asleep, or its network is gone"
            self._advance(worker, event, reason)
        elif event is Event.NOT_ACKNOWLEDGED or (event and self._listener.wants_workers()):
            self._advance(worker, event)

    def _handle(self, message: Message) -> None:
        if message.kind is Kind.BROKEN:
            raise message.content
        worker = self.workers[message.name]
        if message.life != worker.life:
            return
        if message.kind in (Kind.LINE, Kind.CUT_OFF, Kind.EXITED, Kind.UNSENT, Kind.NOT_SENT) and not worker.process:
            return
        getattr(self, f"_on_{message.kind.name.lower()}")(worker, message.content)

    def _on_started(self, worker: Worker, process) -> None:
        worker.begin(process, AudioPush(worker.spawner, worker.life, self._background))
        self._advance(worker, Event.STARTED)
        self._background.listen(worker.name, worker.life, process, self._timeouts.grace_s)
        self._listener.started(worker)

    def _on_not_started(self, worker: Worker, error: TunerError) -> None:
        self._listener.not_started(worker, error)
        self._report_unreached(worker, error)
        self._advance(worker, Event.FAILED)

    def _on_reconnected(self, worker: Worker, _) -> None:
        self._advance(worker, Event.RECONNECTED)

    def _on_not_reconnected(self, worker: Worker, error: HostError) -> None:
        self._report_unreached(worker, error)
        self._advance(worker, Event.FAILED)

    def _on_nobody_there(self, worker: Worker, _) -> None:
        self._advance(worker, Event.NOBODY_THERE)

    def _on_line(self, worker: Worker, line: str) -> None:
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
            self._listener.heard(worker, event)
            if event["type"] == "ready":
                self._advance(worker, Event.LOADED)

    def _on_cut_off(self, worker: Worker, _) -> None:
        worker.silent_for = None
        self._advance(worker, Event.CUT_OFF, "the SSH connection was lost")

    def _on_exited(self, worker: Worker, status: int | None) -> None:
        worker.status = status
        worker.lost_for = worker.describe_failure()
        event = Event.EXITED if worker.liveness.is_lost else self._listener.meaning_of_exit(worker)
        self._advance(worker, event, worker.lost_for)

    def _on_unsent(self, worker: Worker, files: list[str]) -> None:
        self._listener.unsent(worker, files)

    def _on_fetched(self, worker: Worker, error: HostError | None) -> None:
        self._listener.fetched(error)

    def _on_not_sent(self, worker: Worker, error: HostError) -> None:
        if worker.liveness.is_there:
            self.blame(worker, f"clips cannot be sent to it: {error}")

    # What is done about it.

    def _advance(self, worker: Worker, event: Event, reason: str = "") -> None:
        before = worker.liveness
        worker.liveness, action = liveness.advance(before, event, self.now, self._timeouts)
        state = worker.liveness.state
        if state is State.UNACKNOWLEDGED and before.state is State.SILENT:
            worker.first_beat = worker.beats + 1
            worker.beat()
        if worker.process and state in (State.WAITING, State.STARTING, State.GIVEN_UP):
            self._retire(worker)
        if action is Action.START:
            self._start(worker)
        elif action is Action.RECONNECT:
            self._reconnect(worker)
        elif action is Action.REPORT_LOSS:
            self._report_loss(worker, reason)
        elif action is Action.REPORT_RETURN:
            worker.unreached = ""
            worker.audio.set_silent(False)
            self._events({"type": "back", "host": worker.name, "rank": worker.spawner.rank})
        if state is State.READY and before.state is not State.READY:
            self._listener.ready(worker)

    def _start(self, worker: Worker) -> None:
        again, spawner = worker.had_process, worker.spawner
        self._lives += 1
        life = worker.life = self._lives

        def start() -> Message:
            return Message(spawner.name, life, Kind.STARTED, spawner.start(again=again))

        self._background.run(lambda: _attempt(spawner.name, life, start, failed=Kind.NOT_STARTED))

    def _reconnect(self, worker: Worker) -> None:
        spawner, life = worker.spawner, worker.life

        def reconnect() -> Message:
            return Message(spawner.name, life, Kind.RECONNECTED if spawner.reconnect() else Kind.NOBODY_THERE)

        self._background.run(lambda: _attempt(spawner.name, life, reconnect, failed=Kind.NOT_RECONNECTED))

    def _retire(self, worker: Worker) -> None:
        """Nothing more is heard of this process."""
        process, worker.process = worker.process, None
        worker.audio.end()
        self._background.run(process.kill)

    def _report_loss(self, worker: Worker, reason: str) -> None:
        worker.lost_for = reason
        about = {"reason": reason, "given_up": worker.liveness.state is State.GIVEN_UP}
        if worker.liveness.state is State.SILENT:
            worker.audio.set_silent(True)
            about |= {"silent_for": worker.silent_for} if worker.silent_for else {}
        self._events({"type": "lost", "host": worker.name, "rank": worker.spawner.rank, **about})
        self._listener.lost(worker)

    def _report_unreached(self, worker: Worker, error: TunerError) -> None:
        """Once for each reason."""
        if worker.unreached != str(error):
            worker.unreached = str(error)
            self._log(str(error) if isinstance(error, HostError) else f"{worker.name}: {error}")


def _attempt(name: str, life: int, work: Callable[[], Message], *, failed: Kind) -> Message:
    """To reach a host. Whatever comes in between, the others go on, and it is tried again."""
    try:
        return work()
    except TunerError as error:  # the host's, or a file of the run that cannot be read here
        return Message(name, life, failed, error)
    except Exception as error:
        traceback.print_exc()
        return Message(name, life, failed, HostError(name, f"{type(error).__name__}: {error}"))
