"""Random faults at every vote and step of random runs: each ends, nothing counts twice, and anybody can resume it."""

import functools
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import simulation
import torch
from exogym_toys import STRATEGIES
from simulation import (
    Faults,
    Job,
    Script,
    Tiny,
    World,
    _this_thread,
    checkpoint_is_written,
    crash,
    crash_for_long,
    die_at_line,
    launcher_dies,
    power_fails,
    rescue_and_end,
)
from torch import nn

from exogym import Checkpoints, DiLoCoStrategy, FlatParameters, Strategy
from exogym.rounds import shares
from exogym.strategy import in_pieces, sharded

NAMES = ("h0", "h1", "h2", "h3", "h4")
RUNS = int(os.environ.get("FUZZ_FAULT_RUNS", 100))
BLOCKS = 10
MOST_RESUMES = 6
HELD_IN_BF16 = ("diloco", "int8", "hidden_int8")
EACH_ALONE = 1e-6  # bucket_mb: no two parameters share a bucket


@pytest.fixture(autouse=True)
def speeds_are_compared_often(monkeypatch):
    monkeypatch.setattr(shares, "OFTEN", 2)
    monkeypatch.setattr(shares, "SELDOM", 4)


@pytest.fixture(autouse=True)
def small_models_are_divided_too(monkeypatch):
    monkeypatch.setattr(sharded, "LINE", 1)


def random_job(chance: random.Random) -> Job:
    schedule = chance.choice(["constant", "linear", "cosine"])
    warmup = chance.choice([0, 0, 3])
    make = STRATEGIES[chance.choice(list(STRATEGIES))]
    validation = chance.choice([0, 3, 7])
    settings = {
        "lr": 0.05,
        "schedule": schedule,
        "warmup_steps": warmup,
        "min_lr_ratio": 0.0,
        **more_settings(chance, make),
    }
    return Job(
        strategy=lambda: make(**settings),
        hosts=NAMES[: chance.randint(2, 5)],
        clips=chance.choice([chance.randint(1, 8), chance.randint(5, 60)]),
        batch_size=chance.randint(1, 4),
        epochs=chance.randint(1, 4),
        auto=chance.random() < 0.5,
        checkpoint_interval=chance.choice([0, 1, 1, 2, 4]),
        val_interval=chance.choice([None, None, 1, 3]),
        validation=validation,
        min_hosts=chance.choice([1, 1, 1, 2]),
        seed=chance.randrange(1000),
        hashed=chance.random() < 0.5,
        log_correlation=chance.choice([0, 0, 1, 3]),
        early_stopping=chance.choice([0, 0, 1, 2]) if validation else 0,
        keep_best=bool(validation) and chance.random() < 0.5,
    )


def more_settings(chance: random.Random, make: Callable[..., Strategy]) -> dict[str, Any]:
    """Of those that only some strategies have."""
    known = {f.name for f in fields(make().Config)}
    random_settings = {
        "check_interval": chance.choice([0, 1, 3, 100]),
        "H": chance.choice([1, 2, 3, 5, 8, 20]),
        "weight_decay": 0.0,
        "outer_momentum": chance.choice([None, 0.0, 0.9]),
        "sparta_interval": chance.choice([1, 1, 2, 3, 7]),
        "quantization_bits": chance.choice([None, 4, 8]),
        "overlap": chance.random() < 0.8,
        "bucket_mb": EACH_ALONE,
        "island_size": chance.choice([None, 1, 2, 3]),
    }
    settings = {name: value for name, value in random_settings.items() if name in known}
    if getattr(make().config, "overlap_steps", 0):
        settings["overlap_steps"] = chance.randrange(settings["H"])
    return settings


def other_hosts(chance: random.Random, job: Job) -> Job:
    if chance.random() < 0.5:
        return job
    hosts = tuple(sorted(chance.sample(NAMES, chance.randint(1, 5))))
    return replace(job, hosts=hosts, min_hosts=min(job.min_hosts, len(hosts)))


def fuzzed(seed: int, disk: Path) -> Counter:
    """One run from its beginning to its end, with all resumes that it takes. Returns what happened, counted."""
    chance = random.Random(seed)
    job = random_job(chance)
    told = Counter()
    for attempt in range(MOST_RESUMES + 1):
        faults = Faults(
            chance, chance.choice([0.01, 0.03, 0.1]), most=chance.randint(1, 6) if attempt < MOST_RESUMES else 0
        )
        world = World(job, disk, chance, resume=attempt > 0, faults=faults)
        try:
            world.run()
        except BaseException:
            print(f"seed {seed}, attempt {attempt}: {job}\n  " + "\n  ".join(faults.done))
            raise
        told.update(line.split()[2] for line in faults.done)
        # A member that was lost after the last vote has no result: another one is asked for the model.
        members = [host.name for host in world.hosts.values() if world.is_member(host) and host.name in world.results]
        if world.coordinator.ended and members and not world.coordinator.stopping:
            break
        job = other_hosts(chance, job)
    assert world.coordinator.ended and members
    assert len({world.results[name].digest for name in members}) == 1
    weights = [torch.cat([p.detach().flatten() for p in world.hosts[name].node.model.parameters()]) for name in members]
    assert all(torch.equal(weights[0], other) for other in weights)
    for name in members:
        node = world.hosts[name].node
        if job.keep_best and node.state.best_weights is not None:
            assert torch.equal(weights[0], node.state.best_weights)
        assert node.strategy.state_dict()["agreed"]["steps"] == node.state.agreed.step
    counted = world.hosts[members[0]].node.train.counts
    if world.hosts[members[0]].node.state.ends_early:
        told["ended early"] += 1
        assert set(counted.values()) <= {1}
        return told
    due = {(epoch, number): 1 for epoch in range(job.epochs) for number in range(job.clips)}
    wrong = {key: counted[key] for key in {*counted, *due} if counted[key] != due.get(key)}
    assert not wrong, f"{len(wrong)} of {len(due)} clips did not count once: {[*wrong.items()][:5]}"
    told["runs resumed"] += attempt > 0
    told["left out"] += sum(event["type"] == "away" for event in world.events)
    told["steps"] += sum(event["type"] == "step" for event in world.events)
    return told


@pytest.mark.parametrize(
    "block", [n if n in (1, 2, 3) else pytest.param(n, marks=pytest.mark.slow) for n in range(BLOCKS)]
)
def test_any_fault_at_any_point(block, tmp_path):
    """FUZZ_FAULT_RUNS of them in all; FUZZ_FAULT_SEED=N repeats one."""
    told, failed = Counter(), {}
    first = int(os.environ.get("FUZZ_FAULT_FIRST", 0))
    seeds = range(first + block, first + RUNS, BLOCKS)
    for seed in seeds:
        disk = Path(tempfile.mkdtemp(dir=tmp_path))
        try:
            told += fuzzed(seed, disk)
        except BaseException as error:
            failed[seed] = "".join(traceback.format_exception(error)[-3:])
        shutil.rmtree(disk)
    print(f"seeds {seeds}: {dict(told)}")
    assert not failed, f"{len(failed)} of {len(seeds)} runs failed: {list(failed)}; first: {failed[min(failed)]}"


class Half(Tiny):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(self.w.detach().bfloat16())


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_weights_in_bf16_come_through_any_fault(block, tmp_path, monkeypatch):
    """With plain averaging they are exchanged in pieces, of which some may have come when a host is lost."""
    some = {name: functools.partial(STRATEGIES[name], inner_optim="low_memory") for name in HELD_IN_BF16}
    monkeypatch.setattr(sys.modules[__name__], "STRATEGIES", some)
    monkeypatch.setattr(simulation, "Tiny", Half)
    monkeypatch.setattr(in_pieces, "AT_ONCE", 2)
    told = Counter()
    for seed in range(10 * block, 10 * (block + 1)):
        told += fuzzed(seed, tmp_path / str(seed))
    assert told["runs resumed"] > 1


class Leaving(Faults):
    KINDS = ("leave", "leave", "all_leave")


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_hosts_that_leave_and_return_have_nothing_trained_twice(block, tmp_path):
    """Each clip is in one round that has counted: nobody goes on from anything but the newest state."""
    told = Counter()
    for seed in range(25 * block, 25 * (block + 1)):
        chance = random.Random(seed)
        job, faults = random_job(chance), Leaving(chance, 0.05, most=6)
        world = World(job, tmp_path / str(seed), chance, resume=False, faults=faults)
        world.run()
        members = [host for host in world.hosts.values() if world.is_member(host)]
        assert world.coordinator.ended and len({world.results[host.name].digest for host in members}) == 1
        told.update(kind for event in world.events if (kind := event["type"]) in ("away", "back", "paused"))
        counted = sum(world.trained.values(), Counter())
        ends_early = members[0].node.state.ends_early
        assert set(counted.values()) == {1} and (ends_early or len(counted) == job.epochs * job.clips), seed
    assert min(told["away"], told["back"], told["paused"]) > 5


# Orders of events that once ended a run, or made it impossible to resume. Named after what went wrong.

HOSTS = NAMES[:3]
BOTH = {
    "allreduce": functools.partial(STRATEGIES["allreduce"], lr=0.05, bucket_mb=EACH_ALONE),
    "sharded": functools.partial(STRATEGIES["sharded"], lr=0.05, bucket_mb=EACH_ALONE),
    "diloco": functools.partial(STRATEGIES["diloco"], lr=0.05),
}
both = pytest.mark.parametrize("strategy", BOTH.values(), ids=BOTH)
PLAIN = Job(
    strategy=BOTH["diloco"],
    hosts=HOSTS,
    clips=24,
    batch_size=2,
    epochs=3,
    auto=False,
    checkpoint_interval=1,
    val_interval=None,
    validation=3,
    min_hosts=1,
    seed=0,
)


def live(job: Job, disk: Path, acts=(), *, seed=0, resume=False) -> World:
    """One launcher's life. What it was meant to go through has happened."""
    faults = Script(dict(acts))
    world = World(job, disk, random.Random(seed), resume=resume, faults=faults)
    world.run()
    assert not faults.acts, f"this never came: {[*faults.acts]}; {faults.done}"
    return world


def check_end(world: World, job: Job, hosts=()) -> None:
    members = [host for host in world.hosts.values() if world.is_member(host)]
    assert world.coordinator.ended and {host.name for host in members} >= set(hosts)
    assert len({world.results[host.name].digest for host in members}) == 1
    counts = members[0].node.train.counts
    assert counts == {(epoch, number): 1 for epoch in range(job.epochs) for number in range(job.clips)}


@pytest.mark.slow
@both
@pytest.mark.parametrize("seed", range(3))
def test_with_auto_shares_a_crash_and_a_sleep_in_one_round_of_a_later_epoch(tmp_path, strategy, seed):
    """Both came back, and one shared speeds anew while the other trained."""
    job = replace(PLAIN, strategy=strategy, auto=True)

    def sleep(world, host):
        world.cut(host, 6.0, frozen=True)

    first = 9 if strategy is PLAIN.strategy else 5  # a step of epoch 1
    acts = {("h1", "after step", first): crash, ("h2", "after step", first): sleep}
    check_end(live(job, tmp_path, acts, seed=seed), job, hosts=["h0"])


@both
@pytest.mark.parametrize("seed", range(3))
def test_cut_off_before_a_validation_that_counted_on_the_others(tmp_path, strategy, seed):
    """On resume one validated while the other trained: gloo aborts then, or both wait for ever."""
    job = replace(PLAIN, strategy=strategy)
    acts = {
        ("h1", "before vote validation", 1): rescue_and_end,
        ("h0", "before vote round", 6): launcher_dies,
    }
    if strategy is PLAIN.strategy:
        acts["h0", "before vote round", 6] = launcher_dies
        acts = {key if key[2] == 1 else (*key[:2], 3): act for key, act in acts.items()}
    live(job, tmp_path, acts, seed=seed)
    check_end(live(job, tmp_path, resume=True), job, HOSTS)


@both
@pytest.mark.parametrize("seed", range(3))
def test_cut_off_while_a_newcomer_joins_and_resumed_without_it(tmp_path, strategy, seed):
    """One saved before the work was resharded with the newcomer, the other after it: ranks diverged at each resume."""
    job = replace(PLAIN, strategy=strategy)
    acts = {
        ("h2", "after step", 2): crash,
        ("h1", "after vote state_sync", 3): rescue_and_end,
        ("h0", "after step", 7): launcher_dies,
    }
    live(job, tmp_path, acts, seed=seed)
    job = replace(job, hosts=HOSTS[:2])
    check_end(live(job, tmp_path, resume=True), job, HOSTS[:2])


@pytest.mark.slow
@both
@pytest.mark.parametrize("more", [1, 2])
def test_a_host_that_kept_a_round_meets_others_that_lost_it_and_made_it_again(tmp_path, strategy, more):
    job = replace(PLAIN, strategy=strategy, checkpoint_interval=2)
    live(job, tmp_path, {("h0", "before vote round", 4): power_fails})
    two = replace(job, hosts=HOSTS[1:])
    for host in HOSTS[1:]:  # they had not yet written the newest one
        newest = max((tmp_path / host).iterdir())
        shutil.rmtree(newest)
    live(two, tmp_path, {("h1", "before vote round", 2 + more): launcher_dies}, resume=True)
    check_end(live(job, tmp_path, resume=True), job, HOSTS)


@pytest.mark.slow
@both
@pytest.mark.parametrize("asleep_s", [70.0, 110.0, 150.0])
def test_a_sleeper_comes_back_to_others_that_had_to_go_back_to_a_checkpoint(tmp_path, strategy, asleep_s):
    """It may then remember the same round as they do, with other weights."""
    job = replace(PLAIN, strategy=strategy, checkpoint_interval=3, clips=60)

    def sleep_and_crash(world, host):
        world.cut(host, asleep_s, frozen=True)
        for other in world.hosts.values():
            if other is not host:
                world.crash(other, back_s=1.0)

    acts = {("h0", "before vote round", 6): sleep_and_crash}
    check_end(live(job, tmp_path, acts), job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_lost_after_a_stop_inside_a_round(tmp_path, seed):
    """The others went on from weights that the stop had forced, with what was done before: clips counted twice."""
    job = replace(PLAIN, strategy=lambda: DiLoCoStrategy(lr=0.05, H=5), checkpoint_interval=1)

    def stop(world, host):
        world.stop()

    def nobody_joins_at_once(world, host):
        for other in world.hosts.values():
            world.cut(other, 5.0 + seed, frozen=False)

    acts = {("h0", "after step", 7): stop, ("h1", "after vote round", 2): nobody_joins_at_once}
    world = World(job, tmp_path, random.Random(seed), resume=False, faults=Script(acts))
    world.run()
    for host in HOSTS:
        for number in (kept := Checkpoints(tmp_path / host, host)).good():
            agreed = kept.load(number)["agreed"]
            assert agreed["strategy"]["steps"] == agreed["now"]["step"]
    after = live(job, tmp_path, resume=True)
    check_end(after, job, HOSTS)
    assert {after.results[host].steps for host in HOSTS} == {after.hosts["h0"].node.strategy.steps}


@both
def test_a_newcomer_that_was_given_the_state_and_crashes_has_it_when_it_is_alone(tmp_path, strategy):
    """It began from step 0 if the others were away, since its first checkpoint had not been due."""
    job = replace(PLAIN, strategy=strategy, checkpoint_interval=100)
    acts = {
        ("h2", "after step", 2): crash,
        ("h2", "before step", 2): checkpoint_is_written,
        ("h2", "after step", 4): power_fails,
    }
    world = live(job, tmp_path, acts)
    reached = max(commit["round"] for commit in world.events if commit["type"] == "commit")
    alone = replace(job, hosts=HOSTS[2:])
    after = live(alone, tmp_path, resume=True)
    [event] = [event for event in after.events if event["type"] == "resume"]
    assert event["step"] > 0 and reached > 0
    check_end(after, alone)


@both
@pytest.mark.parametrize(
    "lines", [pytest.param(n, marks=[] if n % 104 == 0 else pytest.mark.slow) for n in range(0, 2530, 13)]
)
def test_a_rescue_at_any_line_saves_a_state_that_holds_together(tmp_path, strategy, lines):
    """In the middle of a reshard it once saved half of it, and in the middle of a step one step too many."""
    job = replace(
        PLAIN, strategy=strategy, hosts=HOSTS[:2], clips=9, epochs=2, auto=bool(lines % 4), checkpoint_interval=100
    )
    acts = {("h1", "after step", 2): crash}
    faults = Script(acts)
    world = World(job, tmp_path, random.Random(lines), resume=False, faults=faults)

    def at_a_line(host, event):
        if event["type"] == "step" and host == "h0" and event["step"] == 3:
            die_at_line(world.hosts["h0"].actor, lines)
            world.after(3.0, lambda: launcher_dies(world, world.hosts["h0"]))

    world.on_event = at_a_line
    world.run()
    for host in HOSTS[:2]:
        for number in Checkpoints(tmp_path / host, host).good():
            now = Checkpoints(tmp_path / host, host).load(number)["agreed"]
            strategy_state = now["strategy"]
            assert strategy_state["steps"] == now["now"]["step"]
            assert sum(count for _, count in now["sampler"]["counts"]) <= 2 * 9
    check_end(live(job, tmp_path, resume=True), job)


def falls_asleep(world, host):
    world.cut(host, 6.0, frozen=True)


@pytest.mark.slow
@pytest.mark.parametrize("act", [crash, crash_for_long, falls_asleep, launcher_dies, power_fails])
@pytest.mark.parametrize("which", range(1, 6))
def test_a_fault_while_gradients_travel_and_others_are_computed(tmp_path, act, which):
    job = replace(PLAIN, strategy=BOTH["allreduce"])
    for seed in range(2):
        disk = tmp_path / str(seed)
        world = live(job, disk, {("h1", "as it sends", which): act}, seed=seed)
        if world.dead:
            world = live(job, disk, seed=seed, resume=True)
        check_end(world, job, ["h0", "h2"])


# Rounds end after steps 4, 8, ... of 30, their exchanges travel for two steps more, but for every third.
HIDDEN = replace(
    PLAIN,
    strategy=lambda: DiLoCoStrategy(lr=0.05, H=4, overlap_steps=2, outer_momentum=0.9, wire="int8"),
    clips=60,
    checkpoint_interval=3,
    validation=0,
)
IN_FLIGHT = [
    *(("before round_end", 2), ("after round_end", 2), ("as it sends", 1), ("as it sends", 2)),
    *(("after step", 5), ("after step", 6), ("before step", 9), ("before vote round", 2), ("after vote round", 2)),
]


def test_whether_a_round_ends_whole_is_asked_once(tmp_path):
    """Each time with a word before the round's last step."""
    asked = []
    note = lambda world, host: asked.append(host.node.state.now.step)  # noqa: E731
    live(HIDDEN, tmp_path, {("h1", "before round_end", number): note for number in range(1, 5)})
    assert asked == [3, 7, 11, 15]


@pytest.mark.parametrize(
    "act",
    [
        crash,
        falls_asleep,
        *(pytest.param(act, marks=pytest.mark.slow) for act in (crash_for_long, launcher_dies, power_fails)),
    ],
)
@pytest.mark.parametrize("point", IN_FLIGHT, ids=str)
def test_a_fault_while_an_exchange_travels(tmp_path, act, point):
    for seed in range(2):
        disk = tmp_path / str(seed)
        world = live(HIDDEN, disk, {("h1", *point): act}, seed=seed)
        if world.dead:
            world = live(HIDDEN, disk, seed=seed, resume=True)
        check_end(world, HIDDEN, ["h0", "h2"])


@pytest.mark.slow
@pytest.mark.parametrize("point", IN_FLIGHT, ids=str)
def test_two_faults_while_an_exchange_travels(tmp_path, point):
    for seed in range(3):
        acts = {("h1", *point): crash, ("h2", *point): falls_asleep}
        check_end(live(HIDDEN, tmp_path / str(seed), acts, seed=seed), HIDDEN, ["h0"])


def test_what_ranks_made_while_an_exchange_travelled_is_void_where_one_is_lost(tmp_path):
    """They learn of it at their next step, do not go on to the end, and begin again where the round had ended."""
    strategy = lambda: DiLoCoStrategy(lr=0.05, H=20, overlap_steps=19)  # noqa: E731
    job, ahead = replace(HIDDEN, strategy=strategy, epochs=6, checkpoint_interval=0), []
    for seed in range(6):
        world = live(job, tmp_path / str(seed), {("h1", "before round_end", 1): crash_for_long}, seed=seed)
        check_end(world, job, ["h0", "h2"])
        told = [event for event in world.events if event.get("host") == "h0" and event["type"] in ("step", "round")]
        first = next(place for place, event in enumerate(told) if event["type"] == "round")
        steps = [event["step"] for event in told[:first]]
        assert steps == [*range(1, len(steps) + 1)] and 20 <= len(steps) < 39
        assert told[first]["step"] == len(steps) and told[first + 1]["step"] == 21
        ahead.append(len(steps) - 20)
    assert max(ahead) > 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run comes to that nothing has stopped."""
    return live(HIDDEN, tmp_path_factory.mktemp("whole")).results["h0"]


@pytest.mark.parametrize("point", IN_FLIGHT, ids=str)
def test_a_stop_while_an_exchange_travels_changes_nothing(tmp_path, whole, point):
    live(HIDDEN, tmp_path / "run", {("h1", *point): lambda world, host: world.stop()})
    world = live(HIDDEN, tmp_path / "run", resume=True)
    check_end(world, HIDDEN, HOSTS)
    assert {world.results[host].digest for host in HOSTS} == {whole.digest} and world.results["h0"].steps == 30


def stops_by_itself(world, host):
    host.stop_asked = True


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 17))
def test_a_stop_that_one_host_alone_is_asked_for_changes_nothing(tmp_path, whole, step):
    """Whoever comes first to the end of a round decides, without waiting, whether it is cut short or hidden."""
    for seed in range(2):
        disk = tmp_path / str(seed)
        stopped = live(HIDDEN, disk, {("h1", "after step", step): stops_by_itself}, seed=seed)
        assert all(result.stopped for result in stopped.results.values())
        world = live(HIDDEN, disk, seed=seed, resume=True)
        check_end(world, HIDDEN, HOSTS)
        assert {world.results[host].digest for host in HOSTS} == {whole.digest} and world.results["h0"].steps == 30


@pytest.mark.slow
@pytest.mark.parametrize("act", [crash, falls_asleep])
@pytest.mark.parametrize("step", [2, 4, 6, 7, 8])
def test_one_is_lost_while_another_stops(tmp_path, step, act):
    for seed in range(0, 6, 2):
        acts = {("h1", "after step", step): stops_by_itself, ("h2", "after step", 4 + seed): act}
        faults, disk = Script(acts), tmp_path / str(seed)
        World(HIDDEN, disk, random.Random(seed), resume=False, faults=faults).run()
        world = live(HIDDEN, disk, seed=seed, resume=True)
        check_end(world, HIDDEN, HOSTS)


@pytest.mark.parametrize("point", [("as it sends", 1), ("after step", 5)], ids=str)
def test_a_stop_that_comes_after_others_have_hidden_the_round_waits_for_the_next(tmp_path, point):
    """One is lost while another computes the last step of the round, and is asked to stop meanwhile. It has to end the
    round with those whose exchange travelled, and must not stop them inside it.
    """

    def slow_and_asked_to_stop(world, host):
        number, host.stop_asked, host.actor.frozen = world.coordinator.generation.number, True, True

        def look() -> None:
            generation = world.coordinator.generation
            if generation and generation.number > number:
                host.actor.frozen = False
            else:
                world.after(0.1, look)

        world.after(0.1, look)

    two = replace(HIDDEN, hosts=HOSTS[:2])
    for seed in range(6):
        disk = tmp_path / str(seed)
        acts = {("h1", "after step", 3): slow_and_asked_to_stop, ("h2", *point): crash_for_long}
        live(HIDDEN, disk, acts, seed=seed)
        check_end(live(two, disk, seed=seed, resume=True), two, HOSTS[:2])


def test_a_rescue_in_the_middle_of_a_round_reads_nothing_from_the_device(tmp_path, monkeypatch):
    """Only the thread that trains may: another one would do so beside it, and Metal's queue is not made for that."""
    read, threads = FlatParameters.read, set()

    def noted(self, out=None, **rest):
        threads.add(getattr(_this_thread, "actor", None))
        return read(self, out, **rest)

    monkeypatch.setattr(FlatParameters, "read", noted)
    live(PLAIN, tmp_path, {("h1", "after step", 3): launcher_dies})
    assert threads and None not in threads


@pytest.mark.slow
@pytest.mark.parametrize("clips", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("hosts", [3, 5])
def test_a_round_longer_than_an_epoch_of_few_clips_with_two_losses(tmp_path, clips, hosts):
    """An epoch that is done stood between others that were not, and had no steps: the loop never ended."""
    for first in range(1, 5):
        for second in range(1, 5):
            job = replace(
                PLAIN,
                strategy=lambda: DiLoCoStrategy(lr=0.05, H=20),
                hosts=NAMES[:hosts],
                clips=clips,
                batch_size=1,
                epochs=5,
                checkpoint_interval=0,
                validation=0,
            )
            disk = tmp_path / f"{first} {second}"
            faults = Script({("h1", "after step", first): crash_for_long, ("h2", "after step", second): crash_for_long})
            world = World(job, disk, random.Random(first), resume=False, faults=faults)
            world.run()
            check_end(world, job, ["h0"])
