"""Workers in memory, on a clock of their own: hours of a run take milliseconds, and no process is started."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import partial

from distributed.control.messages import event_line
from distributed.launcher.background import Act, Takes, ignore, outcome_of, throw
from distributed.launcher.training import Training
from exogym.membership import END, ROUND, STATE_SYNC
from whisper_tuner.errors import HostError

NAMES = "host{}"
STEP_S, BEAT_S, LATENCY_S = 0.2, 0.5, 0.01


class Clock:
    """Time that passes when somebody waits for it."""

    def __init__(self):
        self.time, self._due, self._order = 0.0, [], itertools.count()

    def at(self, delay: float, act: Act) -> None:
        heapq.heappush(self._due, (self.time + delay, next(self._order), act))

    def pass_until(self, when: float, enough: Callable[[], object]) -> None:
        while not enough() and self._due and self._due[0][0] <= when:
            due, _, act = heapq.heappop(self._due)
            self.time = max(self.time, due)
            act()
        if not enough():
            self.time = max(self.time, when)


class SimulatedBackground(Clock):
    """A Background without threads: what blocks is done at once, and is said to have taken its time."""

    def __init__(self):
        super().__init__()
        self.inbox, self.took, self.closed = [], 0.0, False

    def now(self) -> float:
        return self.time + self.took

    def sleep(self, seconds: float) -> None:
        self.took += seconds

    def put(self, tell: Act, instead: Act | None = None) -> None:
        if not self.closed:
            self.inbox.append((tell, instead))
        elif instead:
            instead()

    def take(self, timeout: float) -> list[Act]:
        self.pass_until(self.time + timeout, lambda: self.inbox)
        taken, self.inbox = self.inbox, []
        return [tell for tell, _ in taken]

    def close(self) -> None:
        self.closed = True
        for _, instead in self.inbox:
            if instead:
                instead()

    def run(self, work, then=ignore, failed=throw, late=ignore) -> None:
        told = outcome_of(work, then, failed, late)
        took, self.took = self.took, 0.0
        self.at(took, lambda: self.put(*told))

    def listen(self, process, hear, ended, grace_s) -> None:
        process.hear = lambda line: self.put(partial(hear, line))
        process.ended = lambda status: self.put(partial(ended, status))
        process.begin()


class Host:
    """A Spawner, with switches for what may go wrong on its way."""

    def __init__(self, rank: int, body: Callable[[Toy], None], run: Run):
        self.name, self.rank, self.host, self.own_address = NAMES.format(rank), rank, None, None
        self.body, self.run = body, run
        self.is_cut = False  # nobody can connect
        self.start_errors: dict[int, Exception] = {}  # of which start
        self.start_s = 0.0
        self.starts: list[tuple[float, bool]] = []  # when, and `again`
        self.connects: list[float] = []
        self.toys: list[Toy] = []
        self.connect_s = 0.0
        self.wanted, self.unsendable, self.fetched = [], [], []
        self.fetch_error: HostError | None = None
        self.fetch_s = 0.0
        self.left = ""

    @property
    def toy(self) -> Toy:
        return self.toys[-1]

    @property
    def again(self) -> list[bool]:
        return [again for _, again in self.starts]

    def start(self, *, again: bool):
        self.run.background.took += self.start_s
        self.starts.append((self.run.background.time, again))
        if error := self.start_errors.get(len(self.starts)):
            raise error
        self._reach()
        if self.toys:
            self.toy.kill()
        self.toys.append(Toy(self))
        return self.toy

    def reconnect(self) -> bool:
        self.connects.append(self.run.background.time)
        self.run.background.took += self.connect_s
        self._reach()
        if self.toy.status is None:
            self.run.background.at(self.connect_s, self.toy.connect)
        return self.toy.status is None

    def _reach(self) -> None:
        if self.is_cut:
            raise HostError(self.name, "no route to host")

    def send(self, files, wanted):
        self.wanted.append(files)
        for name in files:
            yield 1, [name] if name in self.unsendable else []

    def leave(self, *, finished: bool) -> None:
        self.left = "finished" if finished else "left"

    def fetch(self, folder: str) -> None:
        self.run.background.took += self.fetch_s
        self.fetched.append(folder)
        if self.fetch_error:
            raise self.fetch_error


class Toy:
    """A worker that speaks the protocol and trains nothing. `body(toy)` says what it does when it has started."""

    def __init__(self, host: Host):
        self.host, self.life = host, len(host.toys) + 1
        self.background = host.run.background
        self.status: int | None = None
        self.hear: Takes = lambda line: None  # of the launcher, once it listens
        self.ended: Takes = lambda status: None
        self.is_frozen = self.is_cut = self.is_deaf = False
        self._waiting: list[Act] = []  # until it thaws
        self._unsaid: list[str] = []  # until it is connected again
        self._unheard: list[bytes] = []
        self.last_beat, self.heard = 0, []
        self.stopping = self.saved = False
        self.rounds: int | None = None
        self.then: Callable[[Toy], None] = lambda toy: None
        self.saves: Callable[[Toy], None] = lambda toy: toy.say({"type": "saved"})
        self.generation = self.vote = self.made = 0
        self.members: list[str] = []
        self.what = STATE_SYNC
        self.is_stuck: Callable[[Toy], bool] = lambda toy: False

    def begin(self) -> None:
        self.host.body(self)
        self._beat()

    # What it does.

    def later(self, delay: float, act: Act) -> None:
        def do() -> None:
            if self.is_frozen:
                self._waiting.append(do)
            elif self.status is None:
                act()

        self.background.at(delay, do)

    def say(self, event: dict) -> None:
        self.print(event_line(event).decode().rstrip("\n"))

    def print(self, text: str) -> None:
        if self.is_cut:
            self._unsaid.append(text)
        elif self.status is None:
            self.hear(text)

    def exit(self, status: int) -> None:
        if self.status is None:
            self.status = status
            if not self.is_cut:
                self.ended(status)

    def train(self, *, rounds: int | None = None, then: Callable[[Toy], None] = lambda toy: None) -> None:
        """Until the end, or until so many rounds have counted; then something else."""
        self.rounds, self.then = rounds, then
        self.say({"type": "ready"})

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()

    def cut(self) -> None:
        """Nothing passes, in either direction, and nobody is told."""
        self.is_cut = self.host.is_cut = True

    def connect(self) -> None:
        """Over a new connection, with all that has not arrived."""
        self.is_cut = self.is_deaf = False
        unsaid, self._unsaid = self._unsaid, []
        for text in unsaid:
            self.print(text)
        unheard, self._unheard = self._unheard, []
        for data in unheard:
            self.write(data)

    # The protocol.

    def _beat(self) -> None:
        self.say({"type": "beat", "heard": self.last_beat})
        self.later(BEAT_S, self._beat)

    def write(self, data: bytes) -> None:
        if self.is_cut or self.is_deaf:
            self._unheard.append(data)
        else:
            self.later(LATENCY_S, lambda: self._hear(data.decode().strip()))

    def _hear(self, line: str) -> None:
        self.heard.append(line)
        word, *about = line.split()
        if word == "beat":
            self.last_beat = int(about[0])
        elif word == "stop":
            self.stopping = True
        elif word == "save":
            self.saves(self)
        elif word in ("quit", "rescue"):
            self.saved = word == "rescue"
            self.exit(75)
        else:
            self._take(json.loads(line))

    def _take(self, message: dict) -> None:
        if message["type"] == "generation":
            self.generation, self.members, self.vote = message["number"], message["members"], 0
            self._cast(STATE_SYNC)
        elif message["type"] == "commit" and (message["generation"], message["vote"]) == (self.generation, self.vote):
            self._go_on(message["regroup"])

    def _go_on(self, regroup: bool) -> None:
        if self.host.run.agrees_each_step and self.what == ROUND:
            self._say_step()
        self.made += self.what == ROUND
        if self.what == END:
            self.say({"type": "done", "stopped": self.stopping})
        if self.what == END or self.made == self.rounds:
            self.then(self)
        elif not regroup:
            self.vote += 1
            generation = self.generation
            self.later(self.host.run.step_s, lambda: self._step(generation))

    def _step(self, generation: int) -> None:
        if generation != self.generation:
            return
        if self.is_stuck(self):
            self.later(STEP_S, lambda: self._step(generation))
            return
        if not self.host.run.agrees_each_step:
            self._say_step()
        self._cast(self.host.run.decide(self))

    def _say_step(self) -> None:
        self.say({"type": "step", "step": self.made + 1, "seconds": STEP_S})

    def _cast(self, what: str) -> None:
        self.what = what
        about = {"digest": 1, "round": self.vote, "samples": {}, "cut_short": False}
        self.say({"type": "vote", "generation": self.generation, "vote": self.vote, "what": what, **about})

    # What the launcher does with it.

    def wait(self, timeout=None) -> int | None:
        self.background.pass_until(self.background.time + (timeout or 0), lambda: self.status is not None)
        return self.status

    def kill(self) -> None:
        self.exit(-9)


class Run:
    """A training, what it said, and what is to happen meanwhile."""

    def __init__(self, *bodies: Callable[[Toy], None], all_rounds: int | None = None, **settings):
        self.background, self.step_s = SimulatedBackground(), STEP_S
        self.agrees_each_step = False  # as AllReduce does: a step is told when all have made it
        self.all_rounds, self._decisions = all_rounds, {}
        self.hosts = [Host(rank, body, self) for rank, body in enumerate(bodies)]
        self.events, self.times, self.log, self.stopping = [], [], [], False
        self._planned: dict[tuple[str, int], Act] = {}
        self._count: Counter = Counter()
        self.training = Training(
            self.hosts, events=self._hear, log=self.log.append, background=self.background, **settings
        )

    def at(self, kind: str, number: int, act: Act) -> None:
        """act() at the event of this type that is number so many."""
        self._planned[kind, number] = act

    def stop(self) -> None:
        self.stopping = True

    def run(self, at_most_s: float = 3600) -> None:
        def stopping() -> bool:
            assert self.background.time < at_most_s, (self.generations(), self.of("lost"), self.log)
            return self.stopping

        self.exporter = self.training.run(stopping)
        assert not self._planned, "this has not happened"

    def until(self, kind: str, number: int, at_most_s: float = 3600) -> None:
        """Run, and be asked to stop at the event of this type that is number so many."""
        self.at(kind, number, self.stop)
        self.run(at_most_s)

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["type"] == kind]

    def time_of(self, kind: str, number: int = 1) -> float:
        return [when for when, event in zip(self.times, self.events, strict=True) if event["type"] == kind][number - 1]

    def generations(self) -> list[str]:
        """The numbers of the hosts of each."""
        return ["".join(host[-1] for host in event["hosts"]) for event in self.of("generation")]

    def decide(self, toy: Toy) -> str:
        """What all members do next: whoever comes first decides."""
        is_over = toy.stopping or (self.all_rounds is not None and toy.vote > self.all_rounds)
        return self._decisions.setdefault((toy.generation, toy.vote), END if is_over else ROUND)

    def _hear(self, event: dict) -> None:
        self.events.append(event)
        self.times.append(self.background.time)
        self._count[event["type"]] += 1
        self._planned.pop((event["type"], self._count[event["type"]]), lambda: None)()
