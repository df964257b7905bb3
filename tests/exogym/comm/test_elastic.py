"""Ranks that are lost and come back, as threads with a real coordinator: sums are right, and nothing counts twice."""

import functools
import threading
import time
from collections import Counter

import pytest
import torch
from exogym_toys import GivenSpeed, Resumable, Tokens, run_threads, token_batch, train_node

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, ElasticSampler
from exogym.comm.comm import SingleComm, ThreadComm, _Shared
from exogym.comm.elastic import LARGE_BYTES, ElasticComm
from exogym.errors import PeerLost
from exogym.membership import ROUND, VALIDATION
from exogym.membership.client import CoordinatorClient
from exogym.membership.coordinator import Coordinator

HOSTS = ("ada", "bob", "cy")
SIZE, BATCH = 50, 2


class Sentences:
    """SIZE numbered samples, in order, BATCH a step to each member."""

    def __len__(self):
        return SIZE

    def plan_settings(self):
        return {"samples": SIZE}

    def plan(self, epoch, left, members, weights, steps_before=0):
        numbers = [n for n in range(SIZE) if left is None or left[n]]
        sizes = [max(1, round(BATCH * weight * len(members) / sum(weights))) for weight in weights]
        plan = [[] for _ in members]
        while numbers:
            for mine, size in zip(plan, sizes, strict=True):
                mine.append(numbers[:size])
                numbers = numbers[size:]
        return plan

    def prefetch(self, steps):
        pass

    def read(self, steps):
        for numbers in steps:
            yield [{**token_batch(1, seed=n), "ids": [f"s{n}"]} for n in numbers]


class Slow(Tokens):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, batch):
        time.sleep(self.seconds)
        return super().forward(batch)


class Died(BaseException):
    pass


class Site:
    """The coordinator, and a thread for each host that runs a TrainNode until the work is done or it is made to die."""

    def __init__(self, strategy, *, hosts=HOSTS, epochs=2, min_hosts=1, folder=None, work=None, **settings):
        self.lock = threading.RLock()  # the coordinator is not made for threads
        self.events, self.nodes, self.results, self.errors, self.threads = [], {}, {}, [], []
        self.clients, self.groups, self.dead, self.lives = {}, {}, set(), Counter()
        self.strategy, self.epochs, self.folder, self.settings = strategy, epochs, folder, settings
        self.hosts = hosts
        self.coordinator = Coordinator(hosts, self.deliver, self.emit, clock=time.monotonic, min_hosts=min_hosts)
        self.work = work or (lambda host: ElasticSampler(Sentences(), hosts, host))
        self.at_step = {}  # (host, life, step): what it does when it has made that step
        self.script = {}  # number of commits: what happens then
        self.doomed = set()  # die after their next step
        self.slow = {}  # seconds that a host's samples take more
        self.speeds = {}
        self.on_pause = None

    def commits(self):
        return [event for event in self.events if event["type"] == "commit"]

    def emit(self, event):
        self.events.append(event)
        if event["type"] == "commit":
            self.script.pop(len(self.commits()), lambda: None)()
        if event["type"] == "paused":
            self.on_pause()

    def tell(self, what, host):
        with self.lock:
            getattr(self.coordinator, what)(host)

    def deliver(self, host, message):
        if message["type"] == "generation":
            for number, shared in self.groups.items():
                if number < message["number"]:
                    shared.barrier.abort()
        self.clients[host].put(message)

    def start(self, *hosts, resume=False):
        for host in hosts:
            self.clients[host] = CoordinatorClient()
            self.lives[host] += 1
            self.dead.discard(host)
            thread = threading.Thread(target=self.live, args=(host, self.lives[host], resume), daemon=True)
            self.threads.append(thread)
            thread.start()
        return self

    def say(self, host, life, message):
        with self.lock:
            if life != self.lives[host] or host in self.dead:
                raise Died
            if message["type"] not in ("alive", "exchange"):
                getattr(self.coordinator, message["type"])(host, message)

    def connect(self, generation, rank, interrupted):
        if len(generation.members) == 1:
            return SingleComm()
        with self.lock:
            shared = self.groups.setdefault(generation.number, _Shared(len(generation.members), 20))
        return ThreadComm(rank, shared)

    def live(self, host, life, resume):
        say = lambda message: self.say(host, life, message)  # noqa: E731
        comm = ElasticComm(host, self.hosts, self.clients[host], say, self.connect)
        node = train_node(
            Slow(self.slow.get(host, 0)), comm, self.strategy(), self.work(host), epochs=self.epochs, device="cpu",
            events=lambda event: self.heard(host, life, event), resume=resume, val=self.work(host),
            checkpoints=Checkpoints(self.folder / host, host) if self.folder else None, **self.settings,
        )  # fmt: skip
        self.nodes[host] = node
        node.shares.speed = GivenSpeed(self.speeds.get(host, 1.0))
        self.tell("ready", host)
        try:
            self.results[host] = node.run()
        except Died:
            pass
        except BaseException as error:
            self.errors.append(error)

    def heard(self, host, life, event):
        self.events.append({**event, "host": host})
        if event["type"] == "step":
            self.at_step.pop((host, life, event["step"]), lambda: None)()
            if host in self.doomed:
                self.doomed.remove(host)
                self.die(host)

    def die(self, host):
        self.dead.add(host)
        self.tell("lost", host)
        raise Died

    def end(self):
        while alive := [thread for thread in self.threads if thread.is_alive()]:
            alive[0].join(30)
            assert not alive[0].is_alive(), "it hangs"
        for node in self.nodes.values() if self.folder else ():
            node.saved.checkpoints._writer.shutdown()
        if self.errors:
            raise self.errors[0]
        return self.results

    def trained(self):
        """How often each (epoch, sample) counted."""
        return Counter(
            (int(epoch), name)
            for commit in self.commits()
            for ids in commit["samples"].values()
            for epoch, names in ids.items()
            for name in names
        )

    def check(self, hosts):
        results = self.end()
        assert set(results) >= set(hosts)
        assert len({results[host].digest for host in hosts}) == 1
        weights = [torch.cat([p.detach().flatten() for p in self.nodes[host].model.parameters()]) for host in hosts]
        assert all(torch.equal(weights[0], other) for other in weights)
        assert self.trained() == {(epoch, f"s{n}"): 1 for epoch in range(self.epochs) for n in range(SIZE)}


STRATEGIES = {
    "allreduce": lambda: AllReduceStrategy(lr=0.02, schedule="cosine", check_interval=3),
    "diloco": lambda: DiLoCoStrategy(lr=0.02, H=4, schedule="linear", outer_momentum=0.9),
    "hidden": lambda: DiLoCoStrategy(lr=0.02, H=4, overlap_steps=2, schedule="linear", outer_momentum=0.9),
}
both = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


@both
def test_without_a_fault_it_is_as_without_generations(strategy):
    def rank_main(comm):
        steps = list(Sentences().read(Sentences().plan(0, None, HOSTS, (1, 1, 1))[comm.rank]))
        return train_node(
            Tokens(), comm, strategy(), Resumable(steps), epochs=2, val=Resumable(steps), device="cpu"
        ).run()

    site = Site(strategy).start(*HOSTS)
    site.check(HOSTS)
    assert site.results["ada"].digest == run_threads(3, rank_main)[0].digest


@both
@pytest.mark.parametrize(("host", "step"), [("ada", 1), ("cy", 4), ("ada", 7), ("bob", 18)])
def test_losing_any_rank_at_any_time(strategy, host, step):
    site = Site(strategy)
    site.at_step[host, 1, step] = lambda: site.die(host)
    site.start(*HOSTS)
    site.check([h for h in HOSTS if h != host])


@both
def test_each_host_is_lost_and_comes_back(strategy):
    site = Site(strategy, epochs=8, val_interval=5)
    for number, host in enumerate(HOSTS):
        site.script[2 + 6 * number] = lambda host=host: site.doomed.add(host)
        site.script[5 + 6 * number] = lambda host=host: site.start(host)
    site.start(*HOSTS)
    site.check(HOSTS)
    sizes = [len(event["hosts"]) for event in site.events if event["type"] == "generation"]
    assert sizes == [3, 2, 3, 2, 3, 2, 3]


@both
def test_one_that_has_come_back_goes_on_in_the_round_in_which_another_is_lost(strategy):
    site = Site(strategy, epochs=4)
    awake = threading.Event()

    def sleep():
        site.tell("lost", "bob")
        site.script[len(site.commits()) + 3] = awake.set
        site.script[len(site.commits()) + 6] = lambda: site.doomed.add("ada")
        awake.wait(20)
        site.tell("ready", "bob")

    site.at_step["bob", 1, 6] = sleep
    site.start(*HOSTS)
    site.check(["bob", "cy"])
    assert [event["host"] for event in site.events if event["type"] == "resume"] == ["bob"]


@both
def test_all_are_lost_and_go_on_from_their_checkpoints(strategy, tmp_path):
    site, all_there = Site(strategy, folder=tmp_path, checkpoint_interval=1), threading.Barrier(len(HOSTS), timeout=60)

    def die(host):
        all_there.wait()  # ranks of hidden rounds may be some steps apart
        site.die(host)

    for host in HOSTS:
        site.at_step[host, 1, 9] = functools.partial(die, host)
    site.start(*HOSTS).end()
    again = Site(strategy, folder=tmp_path, checkpoint_interval=1)
    again.events += [event for event in site.events if event["type"] == "commit"]
    again.start(*HOSTS, resume=True)
    results = again.end()
    assert len({result.digest for result in results.values()}) == 1
    whole = Site(strategy, checkpoint_interval=1).start(*HOSTS).end()
    assert results["cy"].digest == whole["cy"].digest and results["cy"].steps == whole["cy"].steps
    assert [event["exactly"] for event in again.events if event["type"] == "resume"] == [True] * 3


@both
def test_resumed_on_other_hosts(strategy, tmp_path):
    site = Site(strategy, folder=tmp_path, checkpoint_interval=1)
    site.at_step["ada", 1, 9] = lambda: site.doomed.update(HOSTS)
    site.start(*HOSTS).end()
    resumed = Site(strategy, folder=tmp_path)
    for file in (tmp_path / "ada").rglob("*.json"):
        file.unlink()
    resumed.coordinator.lost("cy")
    resumed.start("ada", "bob", resume=True)
    results = resumed.end()
    assert results["ada"].digest == results["bob"].digest
    [event] = [event for event in resumed.events if event["type"] == "resume" and event["host"] == "ada"]
    assert event["step"] > 0 and not event["exactly"]
    counted = resumed.trained()
    assert set(counted.values()) == {1} and len(counted) < 2 * SIZE


def test_a_source_that_cannot_be_resharded_ends_the_run_and_what_was_agreed_can_be_read():
    class Fixed:
        steps_per_epoch = 9

        def epoch(self, epoch, *, first_step=0):
            yield from [[token_batch(2, seed=n)] for n in range(first_step, 9)]

    site = Site(STRATEGIES["diloco"], work=lambda host: Fixed())
    site.at_step["cy", 1, 2] = lambda: site.die("cy")
    site.start(*HOSTS)
    with pytest.raises(PeerLost, match="the run began with 3 ranks, now there are 2, and Fixed cannot be resharded"):
        site.end()
    for host in HOSTS[:2]:
        with site.nodes[host].state.unchanging(patience_s=0.0) as is_whole:
            assert is_whole


def test_stopped_while_a_fast_rank_waits_for_a_slow_one_and_resumed(tmp_path):
    """The fast one is through with its round; its next vote is on that round, before any step."""
    asked = threading.Event()
    site = Site(STRATEGIES["diloco"], folder=tmp_path, should_stop=asked.is_set)
    site.slow = {"bob": 0.05, "cy": 0.05}

    def stop():
        time.sleep(0.2)
        site.coordinator.stop()
        asked.set()

    site.at_step["bob", 1, 6] = stop
    results = site.start(*HOSTS).end()
    assert results["ada"].steps > results["bob"].steps
    again = Site(STRATEGIES["diloco"], folder=tmp_path)
    again.events += site.commits()
    again.start(*HOSTS, resume=True)
    again.check(HOSTS)


def test_resumed_under_another_name(tmp_path):
    """As when the master has another address than before: the share of the old name is resharded."""
    asked = threading.Event()
    site = Site(STRATEGIES["diloco"], folder=tmp_path, checkpoint_interval=1, should_stop=asked.is_set)
    site.at_step["bob", 1, 6] = asked.set
    site.start(*HOSTS).end()
    (tmp_path / "ada").rename(tmp_path / "dee")
    for file in (tmp_path / "dee").rglob("ada.*"):
        file.rename(file.with_name(file.name.replace("ada", "dee")))
    hosts = ("dee", *HOSTS[1:])
    work = lambda host: ElasticSampler(Sentences(), hosts, host)  # noqa: E731
    again = Site(STRATEGIES["diloco"], hosts=hosts, folder=tmp_path, work=work)
    again.events += site.commits()
    again.start(*hosts, resume=True)
    again.check(hosts)


def test_what_was_agreed_can_be_saved_between_any_two_steps(tmp_path):
    """By another thread, as when the launcher is gone; no ranks have compared anything yet."""
    site = Site(lambda: AllReduceStrategy(lr=0.02, check_interval=100), folder=tmp_path)
    site.slow = dict.fromkeys(HOSTS, 0.03)
    rescues = []

    def rescue():
        rescues.append(threading.Thread(target=site.nodes["ada"].save_agreed))
        rescues[-1].start()

    for step in (3, 9):
        site.at_step["ada", 1, step] = rescue
    site.start(*HOSTS).end()
    for thread in rescues:
        thread.join()
    kept = Checkpoints(tmp_path / "ada", "ada")
    assert len(kept.good()) == 2 and min(kept.good()) >= 2 * 3
    assert kept.load(min(kept.good()))["agreed"]["now"]["step"] == min(kept.good()) // 2


@both
def test_losing_a_host_with_buffers_that_a_forward_pass_changes(strategy, monkeypatch):
    class Norm(Slow):
        def __init__(self, seconds):
            super().__init__(seconds)
            self.norm = torch.nn.BatchNorm1d(1)

        def forward(self, batch):
            self.norm(batch["inputs"].float().reshape(-1, 1))
            return super().forward(batch)

    monkeypatch.setitem(globals(), "Slow", Norm)
    site = Site(strategy)
    site.at_step["cy", 1, 7] = lambda: site.die("cy")
    site.start(*HOSTS)
    results = site.end()
    assert results["ada"].digest == results["bob"].digest


def test_the_coordinator_hears_of_a_large_tensor_before_it_travels():
    client, said = CoordinatorClient(), []

    def say(message):
        said.append(message["type"])
        if message["type"] == "vote":
            client.put({"type": "commit", "generation": 1, "vote": message["vote"], "regroup": False})

    client.put({"type": "generation", "number": 1, "members": ["ada"], "prefix": "", "continues_round": False})
    comm = ElasticComm("ada", ["ada"], client, say, lambda *_: SingleComm())
    small, large = torch.zeros(8), torch.zeros(LARGE_BYTES // 4)

    class Newcomer:
        def sync_state(self):
            comm.all_reduce_(large)
            return 0, False

        def has_synced(self):
            pass

    comm.join(Newcomer())
    comm.commit_together(ROUND, lambda: [comm.all_reduce_(tensor) for tensor in (small, large, large)])
    comm.commit_together(VALIDATION, lambda: comm.all_reduce_(small))
    assert said == ["exchange", "vote", "exchange", "vote", "vote"]


def test_an_answer_from_a_generation_that_is_over_by_the_end_of_the_round_does_not_count():
    """Else the round's exchange would begin in a group that is gone, and the next step be made in vain."""
    client, asked = CoordinatorClient(), []

    def say(message):
        generation = message["generation"]
        if message["type"] == "vote":
            client.put({"type": "commit", "generation": generation, "vote": message["vote"], "regroup": False})
        elif message["type"] == "round_end":
            asked.append(generation)
            client.put({"type": "round_end", "generation": generation, "round": 1, "stop": generation == 2})

    def form(number, *members):
        about = {"members": members, "prefix": "", "continues_round": number > 1}
        client.put({"type": "generation", "number": number, **about})

    class Newcomer:
        def sync_state(self):
            return 0, False

        def has_synced(self):
            pass

    form(1, "ada", "bob")
    comm = ElasticComm("ada", ["ada", "bob"], client, say, lambda *_: SingleComm())
    comm.join(Newcomer())
    comm.ask_ahead(1, stopping=False)
    form(2, "ada")
    assert comm.is_cut_short(1, stopping=False) and asked == [1, 2] and comm.members == ("ada",)
