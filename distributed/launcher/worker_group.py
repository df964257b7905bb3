"""The workers as the launcher sees them: a process each, here or over SSH, started again when it is lost."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from distributed.control.channel import BEAT_S, RESCUE_S
from distributed.control.endpoint import endpoint
from distributed.control.messages import split_line
from distributed.ssh.machine import Process
from exogym.errors import RanksDiverged
from exogym.membership.coordinator import Coordinator
from exogym.membership.waiting import UNREACHED_S
from whisper_tuner.errors import HostError, RunError, TunerError

from .audio_push import deliver
from .worker import Post, Worker

# A worker without a beat for this part of a round's time, within these limits, counts as lost: the longer the round,
# the more of its work is at stake, and the less it matters that the others wait. It may still be heard again.
SILENT_PART, SILENCE_S = 0.2, (3.0, 12.0)
LADEN_SILENCE_S = 6.0  # at least, while weights or clips travel: over a slow link beats have to wait behind them
LOADING_SILENCE_S = 15.0  # the same for one that still loads: reading libraries from a slow disk can hold up its beats
LONGEST_TURN_S = 1.0  # of the launcher's loop, unless it was asleep itself
REACH_S, LOOK_AGAIN_S = 1.0, 1.0  # when a silent one is looked for over another connection, and how often
RECLAIM_S = 12.0  # after which it is replaced, if its host can be reached and it is not heard
LISTEN_S = 3.0  # for a worker whose host has just been reached again: it may be there, and keep what it has in memory
DEAF_S = 6.0  # after which one is replaced that is heard, but does not hear
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # between tries to bring a worker back
MOST_FAILURES = 3  # of one worker in a row, without a round in between
GRACE_S = 2.0  # for last words
SAVE_S = 300.0  # for the model to be written
STUCK_FACTOR = 5.0  # nothing is stuck before it has taken so many times the slowest that was seen
SLOWEST_LINK = 250e3  # bytes/s: until a round has been seen, what an exchange of all weights is allowed to take

# Errors that a worker's own host has, and that another try may mend.
PASSING = {"PeerLost", "HostError"}
PASSING_LATER = {"TooLittleMemory"}  # once a run has begun: other programs may have taken it


class Crew:
    """All workers of a run. `events` gets their events with `host` and `rank`; `log` each other line, prefixed.

    One thread calls `work`; everything that may block has a thread of its own, and reports through the inbox.
    """

    def __init__(
        self,
        posts: Sequence[Post],
        *,
        events: Callable[[dict], None],
        log: Callable[[str], None],
        min_hosts: int = 1,
        patience_s: float = 120.0,
        resumed: bool = False,
    ):
        self.workers = {post.name: Worker(post) for post in posts}
        self.saver: Worker | None = None
        self._events, self._log, self._patience_s = events, log, patience_s
        self.roster = Coordinator(
            list(self.workers),
            self._send,
            self._roster_event,
            clock=time.monotonic,
            min_hosts=min_hosts,
            resumed=resumed,
        )
        self._inbox: queue.SimpleQueue[tuple[Worker, int, str, object]] = queue.SimpleQueue()
        self._attempts = 0
        self._slowest_step = self._slowest_round = 0.0
        self._rounds: deque[float] = deque(maxlen=5)  # seconds from one commit to the next
        self._last_commit = (0, 0.0)  # its generation, and when
        self._trainable = 0
        self._next_beat = 0.0
        self._last_look = time.monotonic()
        self._committed = self._ending = self._diverged = False

    def work(self, stopping: Callable[[], bool]) -> None:
        """Train until all work is done, or `stopping()` is true and they have agreed; then have one save the model.

        Raises RunError, HostError.
        """
        for worker in self.workers.values():
            self._start(worker)
        while self.saver is None:
            self._turn(stopping)
            if self.roster.ended:
                self._save()
            elif sum(not worker.given_up for worker in self.workers.values()) < self.roster.min_hosts:
                raise self._too_few()
            elif stopping() and not any(worker.alive or worker.attempt for worker in self.workers.values()):
                raise RunError("stopped while no host was there")

    def end(self, *, rescue: bool = False) -> None:
        """Leave no worker behind: ask, wait a moment, kill.

        rescue: the run broke off, so each first saves what was agreed, as if the launcher had died.
        """
        self._ending = True
        rescue = rescue and not self._diverged
        for worker in self.workers.values():
            worker.attempt = 0  # what still starts is killed by its own thread
        self._take(0)
        for worker in self.workers.values():
            if worker.process:
                if not rescue:
                    worker.tell("quit")
                worker.process.close_stdin()
        deadline = time.monotonic() + GRACE_S + (RESCUE_S if rescue else 0.0)
        for worker in self.workers.values():
            left = max(0.0, deadline - time.monotonic())
            if worker.process and (worker.silent or worker.process.wait(left) is None):
                worker.process.kill()

    # One turn.

    def _turn(self, stopping: Callable[[], bool]) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            for worker in self.workers.values():
                worker.tell("beat")
        if stopping() and not self.roster.stopping:
            self.roster.stop()
            for worker in self.workers.values():
                worker.tell("stop")
        self._take(0.25)
        self._look_for_silence()
        self._look_for_stuck()
        if blame := self.roster.tick():
            said = f" ({blame.said})" if blame.said else ""
            what = f"the others cannot connect to it: another network, or a firewall?{said}"
            self._drop(self.workers[blame.host], what)
        for worker in self.workers.values():
            if self._is_due(worker):
                self._start(worker)

    def _take(self, timeout: float) -> None:
        """Handle what has come in, waiting at most `timeout` seconds for the first of it."""
        try:
            self._handle(*self._inbox.get(timeout=timeout))
            while True:
                self._handle(*self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, worker: Worker, attempt: int, what: str, content: object) -> None:
        if what == "started":
            self._started(worker, attempt, content)
        elif self._ending:
            pass
        elif what == "not started" and attempt == worker.attempt:
            self._not_started(worker, content)
        elif what == "line" and attempt == worker.life:
            self._heard(worker, content)
        elif what == "not delivered" and attempt == worker.life and worker.alive:
            self._drop(worker, f"clips cannot be sent to it: {content}")
        elif what == "ended" and attempt == worker.life:
            self._ended(worker, content)

    # Starting.

    def _start(self, worker: Worker) -> None:
        self._attempts += 1
        attempt = worker.attempt = self._attempts
        worker.tries += 1
        worker.tried_at = time.monotonic()
        again, old = worker.life != 0, worker.process

        def may_replace(is_there: bool) -> bool:
            if is_there and worker.silent and time.monotonic() < worker.replaced_from:
                return False
            deadline = time.monotonic() + (LISTEN_S if is_there else 0.0)
            while time.monotonic() < max(deadline, worker.heard_until):
                if not worker.silent or worker.status is not None or attempt != worker.attempt:
                    break
                time.sleep(0.05)
            return attempt == worker.attempt

        def start() -> None:
            try:
                process = worker.post.start(again=again, may_replace=may_replace)
            except TunerError as error:  # the host's, or a file of the run that cannot be read here
                self._inbox.put((worker, attempt, "not started", error))
                return
            if attempt != worker.attempt:
                process.kill()
                return
            self._inbox.put((worker, attempt, "started", process))
            if old is not None:
                old.kill()  # its connection is of no use any more
            with contextlib.suppress(HostError):
                for line in process.lines():
                    self._inbox.put((worker, attempt, "line", line))
            self._inbox.put((worker, attempt, "ended", process.wait(GRACE_S)))

        threading.Thread(target=start, daemon=True).start()

    def _started(self, worker: Worker, attempt: int, process: Process) -> None:
        if attempt != worker.attempt:  # the old one was heard again in the last moment
            process.kill()
            return
        worker.process, worker.life, worker.attempt = process, attempt, 0
        worker.status = worker.error = worker.hello = worker.listens = None
        worker.silent = worker.ready = False
        worker.fresh = True
        worker.steps = worker.told = 0
        worker.unheard_s, worker.last_moved = 0.0, time.monotonic()
        worker.unreached = ""
        worker.tail.clear()
        if self.roster.stopping:
            worker.tell("stop")

    def _not_started(self, worker: Worker, error: TunerError) -> None:
        worker.attempt = 0
        if not self._committed and worker.life == 0:
            raise error
        pause = BACK_OFF_S[min(worker.tries, len(BACK_OFF_S)) - 1]
        worker.next_try = time.monotonic() + pause
        if worker.silent:  # it may wake up at any moment, and then does not wait for long
            worker.next_try = min(worker.next_try, worker.tried_at + LOOK_AGAIN_S)
        if worker.unreached != str(error):
            worker.unreached = str(error)
            self._log(str(error) if isinstance(error, HostError) else f"{worker.name}: {error}")

    def _is_due(self, worker: Worker) -> bool:
        if worker.attempt or worker.alive or worker.given_up or self.roster.stopping or self.roster.ended:
            return False
        return time.monotonic() >= worker.next_try

    # Losing.

    def _ended(self, worker: Worker, status: int | None) -> None:
        worker.status = 255 if status is None else status
        if worker.silent:  # and so lost already; what may have been heard were its last words
            worker.process = None
            worker.heard_until, worker.next_try = 0.0, time.monotonic()
        if worker.silent or (self.roster.ended and worker is not self.saver):
            return
        kind = worker.error.get("kind") if worker.error else None
        passing = PASSING | PASSING_LATER if self._committed else PASSING
        if kind and kind not in passing and (worker.error.get("foreseen") or not self._committed):
            raise self._failed(worker)
        waits = kind in PASSING_LATER
        worker.failures += not waits
        worker.given_up = worker.failures >= MOST_FAILURES
        worker.next_try = time.monotonic() + BACK_OFF_S[-1 if waits else min(worker.failures, len(BACK_OFF_S)) - 1]
        self._lose(worker, worker.describe_failure())
        worker.process = None

    def _look_for_silence(self) -> None:
        """Adds up turns and asks no clock: if this machine has slept, it was not the others who were silent."""
        now = time.monotonic()
        passed, self._last_look = min(now - self._last_look, LONGEST_TURN_S), now
        for worker in self.workers.values():
            worker.unheard_s += passed
            limit = self._silence_limit(worker) if worker.ready else LOADING_SILENCE_S
            if worker.alive and worker.unheard_s > limit:
                worker.silent, worker.silent_for, worker.deaf_until = True, limit, None
                worker.next_try, worker.tries, worker.replaced_from = now + REACH_S, 0, now + RECLAIM_S
                self._lose(worker, worker.describe_failure())

    def _silence_limit(self, worker: Worker) -> float:
        shortest, longest = SILENCE_S
        if not self._rounds:
            return longest
        if worker.exchanging or worker.delivering.locked():
            shortest = max(shortest, LADEN_SILENCE_S)
        return min(max(SILENT_PART * median(self._rounds), shortest), longest)

    def _look_for_stuck(self) -> None:
        """A process that still beats, while others have long been waiting for it."""
        generation = self.roster.generation
        if not generation or len(generation.members) < 2 or self.roster.ended:
            return
        members = [self.workers[name] for name in generation.members]
        quiet = time.monotonic() - max(worker.last_moved for worker in members)
        ahead = max(worker.steps for worker in members)
        behind = [worker for worker in members if worker.steps < ahead]
        if behind and quiet > max(self._patience_s, STUCK_FACTOR * self._slowest_step):
            self._drop(behind[0], f"made no step for {quiet:.0f} s while others were waiting for it")
        elif quiet > (self._patience_s if self.roster.is_syncing else self._round_limit()):
            for worker in members:
                worker.last_moved = time.monotonic()
            self.roster.stalled()

    def _round_limit(self) -> float:
        """Seconds that an exchange of all weights may take."""
        return max(self._patience_s, STUCK_FACTOR * self._slowest_round or 8 * self._trainable / SLOWEST_LINK)

    def _drop(self, worker: Worker, reason: str) -> None:
        """Give up a worker that still runs, and get another."""
        worker.failures += 1
        worker.given_up = worker.failures >= MOST_FAILURES
        worker.life = -1
        threading.Thread(target=worker.process.kill, daemon=True).start()
        worker.process, worker.next_try = None, time.monotonic() + BACK_OFF_S[0]
        self._lose(worker, reason)

    def _lose(self, worker: Worker, reason: str) -> None:
        worker.lost_for = reason
        about = {"reason": reason, "given_up": worker.given_up}
        if worker.silent:
            about["silent_for"] = worker.silent_for
        self._events({"type": "lost", "host": worker.name, "rank": worker.post.rank, **about})
        self._tell_roster(lambda: self.roster.lost(worker.name, for_good=worker.given_up))

    # Listening.

    def _heard(self, worker: Worker, line: str) -> None:
        worker.unheard_s = 0.0
        if worker.silent and worker.deaf_until is None:
            worker.deaf_until = worker.told + 1
            worker.heard_until = time.monotonic() + DEAF_S
            worker.next_try = time.monotonic()  # there is a way to it: TCP finds its own back much later
            worker.tell("beat")
        text, event = split_line(line)
        if text.strip():
            worker.tail.append(text)
            self._log(f"{worker.name}: {text}")
        if event:
            try:
                self._take_event(worker, event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._drop(worker, f"its message {event['type']!r} is incomplete: {error!r}")

    def _take_event(self, worker: Worker, event: dict) -> None:
        now, kind = time.monotonic(), event["type"]
        if kind == "beat":
            if worker.silent and event["heard"] >= worker.deaf_until:
                worker.silent, worker.attempt = False, 0
                self._events({"type": "back", "host": worker.name, "rank": worker.post.rank})
                self._offer(worker)
            return
        if kind in ("listens", "reach"):  # from a thread that says nothing about what the rank is at
            getattr(self, f"_take_{kind}")(worker, event)
            return
        if kind == "step":
            self._slowest_step = max(self._slowest_step, event["seconds"])
            worker.steps = event["step"]
        elif kind == "round":
            self._slowest_round = max(self._slowest_round, event["seconds"])
        elif kind == "start":
            self._trainable = event["trainable"]
        worker.last_moved, worker.exchanging = now, kind == "exchange"
        if kind == "ready":
            worker.ready = True
            self._offer(worker)
        elif kind in ("vote", "trouble"):
            self._tell_roster(lambda: getattr(self.roster, kind)(worker.name, event))
        elif kind in ("alive", "exchange"):
            pass
        elif kind == "want":
            files = [str(name) for name in event["files"]]
            threading.Thread(target=self._deliver, args=(worker, worker.life, files), daemon=True).start()
        else:
            if kind == "error":
                worker.error = event
            elif kind == "hello":
                worker.hello = event
                self._compare(worker)
            elif kind == "saved":
                self.saver = worker
            self._events({**event, "host": worker.name, "rank": worker.post.rank})

    def _take_listens(self, worker: Worker, event: dict) -> None:
        worker.listens = endpoint(event["address"], event["port"])
        for one in self.workers.values():
            others = [list(other.listens) for other in self.workers.values() if other is not one and other.listens]
            one.tell(json.dumps({"type": "peers", "peers": others}))

    def _take_reach(self, worker: Worker, event: dict) -> None:
        """Addresses that nobody has any more say nothing; a host that is not heard here either may just be lost."""
        unreached = {endpoint(*peer) for peer in event["unreached"]}
        others = [one for one in self.workers.values() if one.listens in unreached]
        doubtful = {one.name for one in others if one.unheard_s >= SILENCE_S[0]}
        # One that still computes is only waited for: connections that are there already outlive a new firewall.
        doubtful |= {one.name for one in others if time.monotonic() - one.last_moved < UNREACHED_S}
        about = {**event, "unreached": [one.name for one in others]}
        self._tell_roster(lambda: self.roster.reach(worker.name, about, doubtful=doubtful))

    def _offer(self, worker: Worker) -> None:
        """To the roster, once it is ready and there."""
        if worker.ready and not worker.silent:
            self._tell_roster(lambda: self.roster.ready(worker.name, anew=worker.fresh))
            worker.fresh = False

    def _compare(self, worker: Worker) -> None:
        """With another that is there: the one that has just come is to blame if they differ."""
        other = next((one for one in self.workers.values() if one is not worker and one.alive and one.hello), None)
        if other is None:
            return
        if worker.hello["system"] != other.hello["system"]:
            raise RunError(
                f"{worker.name} runs {worker.hello['system']}, {other.name} {other.hello['system']}",
                remedy="gloo cannot join Macs and other systems in one group: train on hosts of one kind.",
            )
        if worker.hello["source"] != other.hello["source"]:
            what = f"{worker.name} runs other code than {other.name}"
            if self._committed:  # changed during the run: no reason to end what the others do
                worker.failures = MOST_FAILURES
                self._drop(worker, what)
                return
            raise RunError(
                what, remedy="Start again without --no-sync; `multimac hosts check` shows each host's environment."
            )

    # Speaking.

    def _tell_roster(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except RanksDiverged as error:
            self._diverged = True
            remedy = "`multimac hosts check` compares code and packages; then start again, or resume."
            raise RunError(str(error), remedy=remedy) from error

    def _roster_event(self, event: dict) -> None:
        if event["type"] == "commit":
            self._committed = True
            now, (generation, before) = time.monotonic(), self._last_commit
            if event["generation"] == generation:
                self._rounds.append(now - before)
            self._last_commit = (event["generation"], now)
            for name in event["samples"]:
                self.workers[name].failures = self.workers[name].tries = 0
        self._events(event)

    def _send(self, name: str, message: dict) -> None:
        self.workers[name].tell(json.dumps(message))

    def _deliver(self, worker: Worker, life: int, files: list[str]) -> None:
        def wanted() -> bool:
            return worker.life == life and worker.status is None and not self._ending

        try:
            deliver(worker, files, wanted)
        except HostError as error:
            self._inbox.put((worker, life, "not delivered", error))

    # The end.

    def _save(self) -> None:
        """Have the model written by one of those who have it, on this machine if it is among them."""
        members = [self.workers[name] for name in self.roster.generation.members]
        for worker in members:
            if not worker.alive:
                continue
            worker.tell("save")
            deadline = time.monotonic() + SAVE_S
            while worker.alive and self.saver is None and time.monotonic() < deadline:
                self._turn(lambda: False)
            if self.saver and self._fetched(worker):
                return
            self.saver = None
        reasons = [
            f"{worker.name}: {worker.lost_for or worker.describe_failure()}" for worker in members if worker.status
        ]
        head = ["every host was lost before the model was saved"] if len(members) > 1 or not reasons else []
        raise RunError("\n".join([*head, *reasons]))

    def _fetched(self, worker: Worker) -> bool:
        """In a thread: the others must hear that this process is alive, for one of them may have to save."""
        outcome: queue.SimpleQueue[HostError | None] = queue.SimpleQueue()

        def fetch() -> None:
            try:
                worker.post.fetch("final")
                outcome.put(None)
            except HostError as error:
                outcome.put(error)

        threading.Thread(target=fetch, daemon=True).start()
        while outcome.empty():
            self._turn(lambda: False)
        if error := outcome.get():
            worker.lost_for = str(error)
            what = f"the model that it saved cannot be fetched: {error}"
            self._events({"type": "warning", "host": worker.name, "rank": worker.post.rank, "what": what})
        return error is None

    def _too_few(self) -> RunError:
        left = [worker.name for worker in self.workers.values() if not worker.given_up]
        told = [f"{worker.name}: {worker.lost_for}" for worker in self.workers.values() if worker.given_up]
        few = f"only {', '.join(left)} left, and min_hosts = {self.roster.min_hosts}" if left else "no host is left"
        return RunError("\n".join([few, *told]))

    def _failed(self, worker: Worker) -> RunError:
        return RunError(f"{worker.name}: {worker.describe_failure()}")
