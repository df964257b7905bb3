"""Hosts, their disks, their links and the coordinator in one process. A seed decides the order of all events.

Each worker is a thread, but only one runs at a time: wherever it would wait (for a peer, for the coordinator), and at
every point where a fault is of interest, it hands the turn back. Time passes only when nobody can move. So a run of
minutes takes a tenth of a second, and a seed repeats it event by event.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from exogym_toys import train_node
from torch import nn

from exogym import Checkpoints, ElasticSampler, TrainNode
from exogym.comm.comm import Background, Comm, SingleComm
from exogym.comm.elastic import ElasticComm
from exogym.errors import PeerLost
from exogym.membership.client import UNREACHED_S, CoordinatorClient
from exogym.membership.coordinator import Coordinator
from exogym.rounds.shares import UNKNOWN, Measured, Speed
from exogym.samplers.batches import DatasetSamples

torch.set_num_threads(1)

SILENCE_S = 3.0  # after which the coordinator is told that a host is lost
STEP_S = 0.2  # of virtual time that each turn takes, on average
RESCUE_LINES = 2500  # a rescue comes within so many lines of the training loop
MOST_TURNS = 60_000
FOREVER_S = 4000.0  # of virtual time without a commit
TRACED = (
    *("train_node.py", "micro_batches.py"),
    *("rounds/round.py", "rounds/shares.py", "rounds/progress.py", "node_state.py", "state_sync.py", "elastic.py"),
    *(
        "diloco.py",
        "in_pieces.py",
        "all_reduce.py",
        "sharded.py",
        "strategy.py",
        "optim.py",
        "communicate_optimize.py",
        "in_flight.py",
    ),
    *("federated_averaging.py", "sparta.py", "parameter_server.py", "demo.py"),
)


class Killed(BaseException):
    pass


class Hangs(AssertionError):
    pass


_this_thread = threading.local()


class Actor:
    """A thread that runs only when it is given the turn."""

    def __init__(self, body: Callable[[Actor], None]):
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ready: Callable[[], bool] = lambda: True
        self.killed = self.done = self.frozen = False
        self.error: BaseException | None = None
        self._body = body
        threading.Thread(target=self._main, daemon=True).start()

    def can_run(self) -> bool:
        return not self.done and not self.frozen and (self.killed or self._ready())

    def run(self) -> None:
        self._go.release()
        self._back.acquire()

    def kill(self) -> None:
        self.killed, self.frozen = True, False
        if not self.done:
            self.run()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Of the thread itself: hand the turn back, until it is given again."""
        if self.killed:
            raise Killed
        self._ready = ready
        self._back.release()
        self._go.acquire()
        if self.killed:
            sys.settrace(None)
            raise Killed

    def _main(self) -> None:
        self._go.acquire()
        _this_thread.actor = self
        try:
            if not self.killed:
                self._body(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()


class Waiting(CoordinatorClient):
    """A client whose reader hands back the turn."""

    def __init__(self, actor: Actor):
        super().__init__()
        self._actor = actor

    def next_generation(self, after):
        self._actor.wait(lambda: self.is_superseded(after) and not self._excluded)
        return self._generation

    def wait_for_commit(self, number, vote):
        self._actor.wait(lambda: (number, vote) in self._commits or self.is_superseded(number))
        return self._commits.get((number, vote))

    def wait_for_round_end(self, number, round_number):
        self._actor.wait(lambda: (number, round_number) in self._round_ends or self.is_superseded(number))
        return self._round_ends.get((number, round_number))


class Group:
    """What the members of one generation have put into each of its collectives."""

    def __init__(self, members: tuple[str, ...]):
        self.slots: list[list[torch.Tensor | None]] = []
        self.messages: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self.members = members


class GroupComm(Comm):
    """A collective is complete once all have come; who has not looked by the time that the group ends may miss it."""

    def __init__(self, rank: int, group: Group, host: Host, is_over: Callable[[], bool]):
        super().__init__()
        self.rank, self.world_size = rank, len(group.members)
        self._group, self._host, self._is_over, self._count = group, host, is_over, 0

    def all_reduce_(self, flat):
        flat.copy_(torch.stack(self._exchange(flat)).sum(0))

    def broadcast_(self, flat, src=0):
        flat.copy_(self._exchange(flat)[src])

    def all_gather(self, flat):
        return self._exchange(flat)

    def send(self, flat, dst):
        self._messages(self.rank, dst).append(flat.clone())

    def recv(self, flat, src):
        messages = self._messages(src, self.rank)
        self._wait(lambda: bool(messages))
        flat.copy_(messages.popleft())

    def _messages(self, src: int, dst: int) -> deque[torch.Tensor]:
        return self._group.messages.setdefault((src, dst), deque())

    def _exchange(self, flat: torch.Tensor) -> list[torch.Tensor]:
        number, self._count = self._count, self._count + 1
        while len(self._group.slots) <= number:
            self._group.slots.append([None] * self.world_size)
        slots = self._group.slots[number]
        slots[self.rank] = flat.clone()
        self._wait(lambda: all(slot is not None for slot in slots))
        shapes = {(tuple(slot.shape), slot.dtype) for slot in slots}
        assert len(shapes) == 1, f"ranks met in different collectives: {shapes}"
        return slots

    def _is_cut(self) -> bool:
        apart = self._host.world.apart
        return self._host.cut or bool(apart and {host.name for host in apart} <= set(self._group.members))

    def _wait(self, is_complete: Callable[[], bool]) -> None:
        host = self._host
        _this_thread.actor.wait(lambda: (is_complete() and not self._is_cut()) or self._is_over())
        if not is_complete() or (self._is_over() and host.world.chance.random() < 0.5):
            raise PeerLost("the group is over")


class SimulatedBackground(Background):
    """Its thread has turns as all others have. A turn of the other one ends where something is put."""

    def __init__(self, waiting, interrupt, host: Host):
        super().__init__(waiting, interrupt)
        self._host = host

    def put(self, job):
        host = self._host
        if host.beside is None:
            host.beside = Actor(lambda actor: self._run())
        self._jobs.put(job)
        host.world.faults.point(host.world, host, "as it sends")
        host.actor.wait()

    def wait(self):
        self._host.actor.wait(lambda: not self._jobs.unfinished_tasks)
        super().wait()

    def close(self):
        if beside := self._host.beside:
            self._host.beside = None
            beside.kill()

    def _next(self):
        _this_thread.actor.wait(lambda: not self._jobs.empty())
        return super()._next()


class SimulatedComm(ElasticComm):
    """Joining a group takes no time."""

    host: Host

    def background(self):
        return SimulatedBackground(self.waiting, self.interrupt, self.host)

    def _form(self, generation):
        return self._connect(generation, self.rank, lambda: self._client.is_superseded(generation.number))


class Clips(DatasetSamples):
    """Numbered samples; x of each is drawn from its number.

    hashed: each stays with its host, as clips do, so that some hosts may have nothing in an epoch of few.
    """

    def __init__(self, size: int, *, batch_size: int, seed: int, hashed: bool, bad: frozenset[int] = frozenset()):
        super().__init__(range(size), batch_size=batch_size, seed=seed)
        self.batch_size, self.hashed, self.bad = batch_size, hashed, bad

    def plan(self, epoch, left, members, weights, steps_before=0):
        if not self.hashed:
            return super().plan(epoch, left, members, weights)
        own = [[] for _ in members]
        for number in range(len(self)):
            if left is None or left[number]:
                draws = [
                    random.Random(f"{number} {name}").random() ** (1 / w)
                    for name, w in zip(members, weights, strict=True)
                ]
                own[draws.index(max(draws))].append(number)
        steps = max(-(-len(mine) // self.batch_size) for mine in own)
        return [[mine[at * self.batch_size : (at + 1) * self.batch_size] for at in range(steps)] for mine in own]

    def read(self, steps):
        for numbers in steps:
            yield [self._batch(numbers)] if numbers else []

    def _batch(self, numbers):
        x = torch.tensor([[float((n * 7 + k * 3) % 11) for k in range(3)] for n in numbers]) / 11
        if self.bad & set(numbers):
            x = x * float("nan")
        return {"x": x, "ids": [f"c{n}" for n in numbers]}


class DrawnSpeed(Speed):
    """As if measured, and another each time: a real clock would make of each seed another run."""

    def __init__(self, chance: random.Random):
        super().__init__()
        self._chance = random.Random(chance.random())

    def measured(self):
        return UNKNOWN if self._chance.random() < 0.1 else Measured(self._chance.uniform(0.3, 3.0), 0.0)


class Recorded(ElasticSampler):
    """Counts, in the state that ranks have in common, how often each clip of each epoch counted."""

    def __init__(self, samples: Clips, hosts: tuple[str, ...], host: str, trained: Callable[[], Counter]):
        super().__init__(samples, hosts, host)
        self.counts: Counter[tuple[int, int]] = Counter()
        self._trained = trained

    def mark_done(self, since, until, members):
        before = self.counts.copy()
        super().mark_done(since, until, members)
        assert self.counts - before == self._trained(), "what counts is not what was trained"

    def _mark_done(self, epoch, first, last, members):
        for member, steps in zip(self.members, self._plan(epoch), strict=True):
            if member in members:
                self.counts.update((epoch, number) for step in steps[first:last] for number in step)
        super()._mark_done(epoch, first, last, members)

    def state_dict(self):
        return super().state_dict() | {"counts": sorted(self.counts.items())}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.counts = Counter({tuple(key): count for key, count in state["counts"]})


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.full((3, 2), 0.5)), nn.Parameter(torch.zeros(3))

    def forward(self, batch):
        return ((self.w.sum(1) + self.b - batch["x"]) ** 2).mean(), len(batch["x"])


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is told, the same when it is resumed; `hosts` may change."""

    strategy: Callable[[], Any]
    hosts: tuple[str, ...]
    clips: int
    batch_size: int
    epochs: int
    auto: bool
    checkpoint_interval: int
    val_interval: int | None
    validation: int
    min_hosts: int
    seed: int
    hashed: bool = False
    bad: frozenset[int] = frozenset()
    log_correlation: int = 0
    early_stopping: int = 0
    keep_best: bool = False

    def clips_of(self, size: int) -> Clips:
        return Clips(size, batch_size=self.batch_size, seed=self.seed, hashed=self.hashed, bad=self.bad)


@dataclass
class Host:
    """A machine: its disk outlives its workers."""

    world: World
    name: str
    actor: Actor | None = None
    beside: Actor | None = None  # its other thread, for collectives
    node: TrainNode | None = None
    life: int = 0
    cut: bool = False  # nothing passes to or from it
    lost: bool = False  # as the coordinator knows
    stop_asked: bool = False
    client: CoordinatorClient | None = None
    to_coordinator: deque[Callable[[], None]] = field(default_factory=deque)
    from_coordinator: deque[dict] = field(default_factory=deque)

    @property
    def alive(self) -> bool:
        return self.actor is not None and not self.actor.done

    def end(self) -> None:
        if self.alive:
            self.actor.kill()
        if self.node:  # a checkpoint that was being written is there, or is not
            self.node.saved.checkpoints._writer.shutdown(cancel_futures=self.world.chance.random() < 0.5)


class World:
    """One launcher's life: from its start, or a resume, to the end of the run or its own."""

    def __init__(self, job: Job, disk: Path, chance: random.Random, *, resume: bool, faults: Faults):
        self.job, self.disk, self.chance, self.faults = job, disk, chance, faults
        self.now, self.last_commit, self.turns = 0.0, 0.0, 0
        self.events: list[dict] = []
        self.on_event: Callable[[str, dict], None] = lambda host, event: None  # in the thread of the worker
        self.results: dict[str, Any] = {}
        self.trained: dict[tuple[int, int], Counter] = {}  # (generation, round) -> what counted in it
        self.dead = False  # the launcher
        self.apart: tuple[Host, ...] = ()  # two who cannot reach each other
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        clock = lambda: self.now  # noqa: E731
        self.coordinator = Coordinator(
            job.hosts, self._send, self._emit, clock=clock, min_hosts=job.min_hosts, resumed=resume
        )
        self.hosts = {name: Host(self, name) for name in job.hosts}
        self.groups: dict[int, Group] = {}
        for host in self.hosts.values():
            self.start(host, resume=resume)

    # what the coordinator does

    def _send(self, name: str, message: dict) -> None:
        host = self.hosts[name]
        if host.alive:
            host.from_coordinator.append(message)

    def _emit(self, event: dict) -> None:
        self.events.append(event)
        if event["type"] == "commit":
            self.last_commit = self.now
        if event["type"] in ("commit", "stopped"):
            self.trained[event["generation"], event["round"]] = Counter(
                (int(epoch), int(name[1:]))
                for ids in event["samples"].values()
                for epoch, names in ids.items()
                for name in names
            )

    # what hosts do

    def start(self, host: Host, *, resume: bool) -> None:
        host.life += 1
        host.cut = host.lost = host.stop_asked = False
        host.node = None
        host.to_coordinator, host.from_coordinator = deque(), deque()
        host.actor = Actor(lambda actor: self._live(host, actor, resume))
        host.client = Waiting(host.actor)

    def _live(self, host: Host, actor: Actor, resume: bool) -> None:
        job = self.job

        def say(message: dict) -> None:
            self.faults.point(self, host, f"before {message['type']} {message.get('what', '')}")
            if message["type"] in ("vote", "round_end", "trouble"):
                host.to_coordinator.append(lambda: getattr(self.coordinator, message["type"])(host.name, message))
            self.faults.point(self, host, f"after {message['type']} {message.get('what', '')}")

        def heard(event: dict) -> None:
            self.events.append({**event, "host": host.name})
            self.on_event(host.name, event)
            if event["type"] == "step":
                self.faults.point(self, host, "after step")
                actor.wait()
                self.faults.point(self, host, "before step")

        def connect(generation, rank, interrupted):
            if len(generation.members) == 1:
                return SingleComm()
            group = self.groups.setdefault(generation.number, Group(generation.members))
            return GroupComm(rank, group, host, interrupted)

        def trained() -> Counter:
            return self.trained[comm.generation, host.node.strategy.agreements]

        comm = SimulatedComm(host.name, job.hosts, host.client, say, connect)
        comm.host = host
        validation = ElasticSampler(job.clips_of(job.validation), job.hosts, host.name) if job.validation else None
        host.node = train_node(
            Tiny(), comm, job.strategy(), Recorded(job.clips_of(job.clips), job.hosts, host.name, trained),
            val=validation,
            epochs=job.epochs, val_interval=job.val_interval, device="cpu", events=heard,
            should_stop=lambda: host.stop_asked, checkpoints=Checkpoints(self.disk / host.name, host.name),
            checkpoint_interval=job.checkpoint_interval, resume=resume, auto_shares=job.auto,
            log_correlation=job.log_correlation, early_stopping=job.early_stopping, keep_best=job.keep_best,
        )  # fmt: skip
        host.node.shares.speed = DrawnSpeed(self.chance)
        host.to_coordinator.append(lambda: self.coordinator.ready(host.name))
        result = host.node.run()
        host.node.saved.checkpoints._writer.shutdown()
        self.results[host.name] = result

    # faults

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        self._timers.append((self.now + seconds, self._count, act))

    def crash(self, host: Host, back_s: float) -> None:
        """What it had said arrives, and then the end of its process."""
        life = host.life
        host.end()
        if host.cut:
            host.to_coordinator.clear()
        host.to_coordinator.append(lambda: self._is_gone(host, life))
        host.cut = False
        self.after(back_s, lambda: self._comes_back(host, life))

    def _is_gone(self, host: Host, life: int) -> None:
        if host.life == life and not host.lost:
            host.lost = True
            self.coordinator.lost(host.name)

    def _comes_back(self, host: Host, life: int) -> None:
        if host.life == life and not self.coordinator.ended and not self.coordinator.stopping:
            self._is_gone(host, life)
            self.start(host, resume=True)

    def cut(self, host: Host, seconds: float, *, frozen: bool) -> None:
        """Its link is down, or it sleeps (frozen); it is lost if that lasts."""
        life, host.cut = host.life, True
        host.actor.frozen = frozen

        def fall_silent() -> None:
            if host.life == life and host.cut and host.alive:
                self._is_gone(host, life)

        def wake() -> None:
            if host.life != life or not host.alive:
                return
            host.cut = host.actor.frozen = False
            if host.lost:  # it counts as back once it has heard all that was said to it
                host.from_coordinator.append({"type": "heard it all"})

        self.after(SILENCE_S, fall_silent)
        self.after(seconds, wake)

    def _is_back(self, host: Host) -> None:
        if host.lost and host.alive:
            host.lost = False
            self.coordinator.ready(host.name, anew=False)

    def leave(self, host: Host, seconds: float) -> None:
        """Its user needs the machine for so long."""
        self.coordinator.leave(host.name, "asked")
        self.after(seconds, lambda: self.coordinator.come_back(host.name))

    def part(self, one: Host, other: Host, seconds: float) -> None:
        """They cannot reach each other for so long, and say so once they have waited for long enough."""
        self.apart = one, other

        def say(unreached: bool) -> None:
            for host, peer in ((one, other), (other, one)):
                generation = self.coordinator.generation.number if self.coordinator.generation else 0
                about = {"generation": generation, "waits": True, "unreached": [peer.name] if unreached else []}
                if host.alive and not host.lost:
                    host.to_coordinator.append(lambda name=host.name, about=about: self.coordinator.reach(name, about))

        def meet() -> None:
            self.apart = ()
            say(False)

        for second in range(int(UNREACHED_S), int(seconds)):
            self.after(second, lambda: say(True))
        self.after(seconds, meet)

    def rescue(self, host: Host) -> bool:
        """What a worker does whose launcher is gone: here while its loop stands still. False: not possible now."""
        if not host.alive or host.node is None:
            return True
        return host.node.save_agreed(patience_s=0.0)

    def rescue_soon(self, host: Host) -> None:
        """In the middle of a change it waits for its end."""
        for _ in range(200):
            if self.rescue(host):
                return
            host.actor.run()
        raise AssertionError("the change has no end")

    def stop(self) -> None:
        self.coordinator.stop()
        for host in self.hosts.values():
            host.from_coordinator.append({"type": "stop"})

    # the order of events

    def run(self) -> None:
        """Until all is done or the launcher is dead. Raises what a worker or the coordinator raises, or Hangs."""
        try:
            while not self.dead and not self._is_over():
                self._turn()
                for host in self.hosts.values():
                    if host.actor.error:
                        raise host.actor.error
        finally:
            for host in self.hosts.values():
                host.end()

    def _is_over(self) -> bool:
        if self.coordinator.ended:  # whoever is cut off now is killed with all others
            return all(host.actor.done or host.cut for host in self.hosts.values() if self.is_member(host))
        there = any(host.alive and not host.lost for host in self.hosts.values())
        return self.coordinator.stopping and not there and not any(host.to_coordinator for host in self.hosts.values())

    def is_member(self, host: Host) -> bool:
        return self.coordinator.generation is not None and host.name in self.coordinator.generation.members

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > MOST_TURNS or self.now - self.last_commit > FOREVER_S:
            raise Hangs(f"after {self.turns} turns and {self.now:.0f} s")
        moves: list[Callable[[], None]] = []
        for host in self.hosts.values():
            if host.actor.can_run():
                moves.append(host.actor.run)
            if host.beside and host.beside.can_run() and not host.actor.frozen:
                moves.append(host.beside.run)
            if host.to_coordinator and not host.cut:
                moves.append(lambda host=host: host.to_coordinator.popleft()())
            if host.from_coordinator and host.alive and not host.cut:
                moves.append(lambda host=host: self._arrive(host, host.from_coordinator.popleft()))
        if moves:
            self.chance.choice(moves)()
            self.now += STEP_S * self.chance.random()
        else:
            self.now = min([self.now + 1.0, *(time for time, _, _ in self._timers)])
        self._let_time_pass()

    def _let_time_pass(self) -> None:
        due = sorted(timer for timer in self._timers if timer[0] <= self.now)
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for _, _, act in due:
            act()
        if blame := self.coordinator.tick():
            self.crash(self.hosts[blame.host], back_s=5.0)

    def _arrive(self, host: Host, message: dict) -> None:
        if message["type"] == "stop":
            host.stop_asked = True
        elif message["type"] == "heard it all":
            self._is_back(host)
        else:
            host.client.put(message)


class Faults:
    """Decides at each point of each worker what goes wrong there."""

    KINDS = ("crash", "crash", "sleep", "sleep", "cut", "apart", "rescue", "launcher", "launcher", "stop", "leave")
    KINDS += ("leave", "all_leave")

    def __init__(self, chance: random.Random, rate: float, most: int):
        self._chance, self._rate, self.left = chance, rate, most
        self.done: list[str] = []

    def point(self, world: World, host: Host, where: str) -> None:
        """In the thread of the worker."""
        if self.left and self._chance.random() < self._rate:
            self.left -= 1
            kind = self._chance.choice(self.KINDS)
            self.done.append(f"{world.now:.1f} s: {kind} at {host.name} {where}")
            getattr(self, f"_{kind}")(world, host)

    def _crash(self, world: World, host: Host) -> None:
        back_s = self._chance.choice([0.5, 2.0, 10.0, 60.0])
        world.after(0.0, lambda: host.alive and world.crash(host, back_s))
        _this_thread.actor.wait(lambda: False)

    def _sleep(self, world: World, host: Host) -> None:
        seconds = self._chance.choice([1.0, 3.5, 8.0, 25.0])
        world.after(0.0, lambda: world.cut(host, seconds, frozen=True))
        _this_thread.actor.wait()

    def _cut(self, world: World, host: Host) -> None:
        world.after(0.0, lambda: world.cut(host, self._chance.choice([1.0, 4.0, 15.0]), frozen=False))

    def _apart(self, world: World, host: Host) -> None:
        others = [other for other in world.hosts.values() if other is not host]
        if others and not world.apart:
            other, seconds = self._chance.choice(others), self._chance.choice([3.0, 15.0, 60.0])
            world.after(0.0, lambda: world.part(host, other, seconds))

    def _leave(self, world: World, host: Host) -> None:
        seconds = self._chance.choice([0.0, 1.0, 8.0, 60.0])
        world.after(0.0, lambda: world.leave(host, seconds))

    def _all_leave(self, world: World, _: Host) -> None:
        """One after the other, and back in any order."""
        for host in world.hosts.values():
            begins, seconds = 3 * self._chance.random(), 20 * self._chance.random()
            world.after(begins, lambda host=host, seconds=seconds: world.leave(host, seconds))

    def _rescue(self, world: World, host: Host) -> None:
        """It is cut off for so long that it saves what was agreed, at whatever line it is, and ends."""
        life = host.life

        def save() -> None:
            if host.life != life or not host.alive:
                return
            world.cut(host, 1e9, frozen=False)
            world.after(4.0 + 6 * self._chance.random(), lambda: self._save_and_die(world, host, life))

        world.after(0.0, save)

    def _save_and_die(self, world: World, host: Host, life: int) -> None:
        if host.life != life or not host.alive:
            return
        if not world.rescue(host) and self._chance.random() < 0.98:  # in the middle of a change: it waits for its end
            host.actor.frozen = False
            world.after(0.0, lambda: self._save_and_die(world, host, life))
            return
        world.crash(host, back_s=self._chance.choice([1.0, 20.0]))

    def _launcher(self, world: World, host: Host) -> None:
        """It dies: every worker saves, or dies before it can; this one at a line of its own."""
        lines = self._chance.randrange(RESCUE_LINES)
        die_at_line(_this_thread.actor, lines)
        everybody = [*world.hosts.values()]

        def end() -> None:
            for one in everybody:
                if self._chance.random() < 0.8:
                    world.rescue_soon(one)
            world.dead = True

        world.after(2 * self._chance.random(), end)

    def _stop(self, world: World, host: Host) -> None:
        world.after(0.0, world.stop)


def die_at_line(actor: Actor, lines: int) -> None:
    """Make this thread stand still after so many lines of the training loop; another event will wake or kill it."""
    left = Counter({"lines": lines})

    def trace(frame, event, _):
        # One that stood still with the lock would hold up those who want to read: here all others.
        if not frame.f_code.co_filename.endswith(TRACED) or frame.f_code.co_name == "changing":
            return None
        if event == "line":
            left["lines"] -= 1
            if left["lines"] <= 0 and not is_reading(frame):
                sys.settrace(None)
                actor.wait(lambda: False)
        return trace

    frame = sys._getframe(1)
    while frame:
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(trace)


def is_reading(frame: FrameType | None) -> bool:
    """InFlight.snapshot has a lock too."""
    while frame and frame.f_code.co_name != "snapshot":
        frame = frame.f_back
    return frame is not None


class Script(Faults):
    """Faults at given points: (host, where, which time) -> what happens, `act(world, host)` in nobody's thread."""

    def __init__(self, acts: dict[tuple[str, str, int], Callable[[World, Host], Any]]):
        super().__init__(random.Random(0), 0.0, 0)
        self.acts, self._count = dict(acts), Counter()

    def point(self, world: World, host: Host, where: str) -> None:
        where = where.strip()
        self._count[host.name, where] += 1
        act = self.acts.pop((host.name, where, self._count[host.name, where]), None)
        if act:
            self.done.append(f"{world.now:.1f} s: {host.name} {where}")
            world.after(0.0, lambda: act(world, host))
            _this_thread.actor.wait(lambda: False) if act in STOPS else _this_thread.actor.wait()


def crash(world: World, host: Host) -> None:
    world.crash(host, back_s=2.0)


def crash_for_long(world: World, host: Host) -> None:
    world.crash(host, back_s=1e6)


def rescue_and_end(world: World, host: Host) -> None:
    """Cut off: it saves what it last agreed on, ends, and does not come back in this launcher's life."""
    world.cut(host, 1e9, frozen=False)
    world.rescue_soon(host)
    world.crash(host, back_s=1e6)


def launcher_dies(world: World, _: Host) -> None:
    """Everybody who is there saves."""
    for host in world.hosts.values():
        world.rescue_soon(host)
    world.dead = True


def checkpoint_is_written(_: World, host: Host) -> None:
    """Wait until what this host has begun to write is on its disk: the disk has a clock of its own."""
    host.node.saved.checkpoints._writer.submit(int).result()


def power_fails(world: World, _: Host) -> None:
    """Nobody saves."""
    world.dead = True


STOPS = {crash, crash_for_long, rescue_and_end, launcher_dies, power_fails}
