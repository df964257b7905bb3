"""Random faults at every vote and step of random runs: each ends, nothing counts twice, and anybody can resume it."""

import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulation import Faults, Job, World

from exogym import AllReduceStrategy, DiLoCoStrategy

NAMES = ("h0", "h1", "h2", "h3", "h4")
RUNS = int(os.environ.get("FUZZ_FAULT_RUNS", 300))
BLOCKS = 10
MOST_RESUMES = 6


def random_job(chance: random.Random) -> Job:
    schedule = chance.choice(["constant", "linear", "cosine"])
    warmup = chance.choice([0, 0, 3])
    if chance.random() < 0.5:
        check = chance.choice([0, 1, 3, 100])
        strategy = lambda: AllReduceStrategy(lr=0.05, schedule=schedule, warmup_steps=warmup, check_interval=check)  # noqa: E731
    else:
        outer = chance.choice([{}, {"outer_lr": 0.7, "outer_momentum": 0.9}, {"outer_lr": 1.0, "outer_momentum": 0.0}])
        H = chance.choice([1, 2, 3, 5, 8, 20])
        strategy = lambda: DiLoCoStrategy(lr=0.05, H=H, schedule=schedule, warmup_steps=warmup, **outer)  # noqa: E731
    return Job(
        strategy=strategy,
        hosts=NAMES[: chance.randint(2, 5)],
        clips=chance.choice([chance.randint(1, 8), chance.randint(5, 60)]),
        batch_size=chance.randint(1, 4),
        epochs=chance.randint(1, 4),
        auto=chance.random() < 0.5,
        checkpoint_interval=chance.choice([0, 1, 1, 2, 4]),
        val_interval=chance.choice([None, None, 1, 3]),
        validation=chance.choice([0, 3, 7]),
        min_hosts=chance.choice([1, 1, 1, 2]),
        seed=chance.randrange(1000),
    )


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
        if world.roster.ended and members and not world.roster.stopping:
            break
        job = other_hosts(chance, job)
    assert world.roster.ended and members
    assert len({world.results[name].digest for name in members}) == 1
    weights = [torch.cat([p.detach().flatten() for p in world.hosts[name].node.model.parameters()]) for name in members]
    assert all(torch.equal(weights[0], other) for other in weights)
    counted = world.hosts[members[0]].node.train.counts
    due = {(epoch, number): 1 for epoch in range(job.epochs) for number in range(job.clips)}
    wrong = {key: counted[key] for key in {*counted, *due} if counted[key] != due.get(key)}
    assert not wrong, f"{len(wrong)} of {len(due)} clips did not count once: {[*wrong.items()][:5]}"
    told["runs resumed"] += attempt > 0
    told["steps"] += sum(event["type"] == "step" for event in world.events)
    return told


@pytest.mark.parametrize("block", range(BLOCKS))
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
