"""How much of the work ranks get by their speeds: the rule on simulated machines, and runs of threads."""

import math
import random
from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
import torch
from exogym_toys import Line, Points, Steps, run_threads, train_node
from hypothesis import given, settings
from hypothesis import strategies as st

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, ElasticSampler, FlatParameters
from exogym.rounds.shares import (
    EQUAL,
    FITTING,
    LEAST,
    OFTEN,
    SELDOM,
    UNKNOWN,
    WINDOW,
    Measured,
    Speed,
    fair_shares,
    told,
)
from exogym.samplers.batches import DatasetSamples

BATCH = 24.0  # cost of all machines' parts of a step


class Machine(NamedTuple):
    """A step of cost c takes it fixed + per_cost * c ** power seconds."""

    fixed: float
    per_cost: float
    power: float = 1.0

    def seconds(self, cost: float) -> float:
        return self.fixed + self.per_cost * cost**self.power


class Dealings:
    """Machines that train, and compare their speeds when ranks do."""

    def __init__(self, machines: list[Machine], noise=lambda: 1.0):
        self.machines, self.noise = machines, noise
        self.shares = [1.0] * len(machines)
        self.steps: list[int] = []  # at which work was shared anew
        self._speeds = [Speed() for _ in machines]
        self._step = self._compared_at = self._shared_at = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step += 1
            for machine, cost, speed in zip(self.machines, self.costs(), self._speeds, strict=True):
                speed.add(cost, machine.seconds(cost) * self.noise())
            if self._step >= self._compared_at + min(max(OFTEN, self._compared_at - self._shared_at), SELDOM):
                self._compare()

    def _compare(self) -> None:
        self._compared_at = self._step
        if new := fair_shares([speed.measured() for speed in self._speeds], self.shares):
            self.shares, self._shared_at = new, self._step
            self.steps.append(self._step)
            for speed in self._speeds:
                speed.clear()

    def costs(self) -> list[float]:
        return [BATCH * share / sum(self.shares) for share in self.shares]

    def seconds(self) -> list[float]:
        return [machine.seconds(cost) for machine, cost in zip(self.machines, self.costs(), strict=True)]


machines = st.builds(Machine, st.floats(0.0, 0.5), st.floats(0.02, 0.5), st.just(1.0))


MOST_DEALINGS = math.log(6 / LEAST) / math.log(FITTING)  # each changes some share by so much, and none turns back


@settings(max_examples=60, deadline=None)
@given(st.lists(machines, min_size=2, max_size=6))
def test_machines_with_a_fixed_part_come_to_take_equally_long(group):
    dealings = Dealings(group)
    dealings.train(1000)
    seconds = dealings.seconds()
    slowest = [share < FITTING * LEAST for share in dealings.shares]  # it need not come nearer to the least than that
    others = [second for second, is_least in zip(seconds, slowest, strict=True) if not is_least]
    assert max(others) <= (EQUAL if not dealings.steps else FITTING + 0.06) * min(others)
    before = Dealings(group).seconds()
    assert max(seconds) <= max(before) * 1.001  # nobody is worse off than with equal shares
    assert len(dealings.steps) <= MOST_DEALINGS and not [step for step in dealings.steps if step > 800]


@pytest.mark.parametrize("power", [0.7, 1.3, 1.5])
def test_no_shares_swing_where_a_larger_step_is_disproportionately_slow(power):
    dealings = Dealings([Machine(0.0, 0.1, power), Machine(0.0, 0.3, power), Machine(0.1, 0.1, power)])
    dealings.train(2000)
    assert max(dealings.seconds()) < 1.06 * min(dealings.seconds()) and max(dealings.steps) < 200


@settings(max_examples=40, deadline=None)
@given(machines, st.integers(2, 8), st.integers(0, 10**6))
def test_equal_machines_with_noise_keep_equal_shares(machine, count, seed):
    chance = random.Random(seed)
    dealings = Dealings([machine] * count, noise=lambda: chance.uniform(0.85, 1.15))
    dealings.train(600)
    # In one of a hundred runs the first few steps mislead, and the next comparison puts it right.
    assert len(dealings.steps) <= 4 and max(dealings.shares) < 1.1 * min(dealings.shares)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_a_slow_machine_is_relieved_soon_and_to_a_few_per_cent(seed):
    chance = random.Random(seed)
    group = [Machine(0.1, 0.1), Machine(0.1, 0.1), Machine(0.2, 0.2)]
    dealings = Dealings(group, noise=lambda: chance.uniform(0.95, 1.05))
    dealings.train(600)
    assert dealings.steps[0] == OFTEN and max(dealings.seconds()) < 1.1 * min(dealings.seconds())


def test_a_machine_that_gets_hot_is_relieved_later():
    dealings = Dealings([Machine(0.1, 0.1)] * 2)
    dealings.train(500)
    assert dealings.steps == []
    dealings.machines = [Machine(0.1, 0.1), Machine(0.1, 0.2)]
    dealings.train(3 * SELDOM)
    assert dealings.steps[0] <= 500 + 2 * SELDOM and max(dealings.seconds()) < 1.06 * min(dealings.seconds())
    dealings.machines = [Machine(0.1, 0.1)] * 2
    dealings.train(1000)
    assert max(dealings.seconds()) < 1.06 * min(dealings.seconds())


def test_speeds_that_come_close_do_not_swing_between_equal_and_unequal_shares():
    dealings = Dealings([Machine(0.0, 0.1), Machine(0.0, 0.112)])
    dealings.train(20)
    assert len(dealings.steps) == 1
    for per_cost in (0.108, 0.112, 0.109, 0.113) * 3:
        dealings.machines = [Machine(0.0, 0.1), Machine(0.0, per_cost)]
        dealings.train(WINDOW)
    assert len(dealings.steps) == 1


def test_single_slow_steps_do_not_count():
    speed, plain = Speed(), Speed()
    for step in range(OFTEN):
        plain.add(3.0, 1.0)
        speed.add(3.0, 60.0 if step in (0, 5) else 1.0)
    assert speed.measured() == plain.measured() == Measured(3.0, 0.0)


def test_steps_of_very_different_cost_have_the_speed_of_all_together():
    """As where one has a clip of 30 s and the next five short ones: the dearer a step, the faster it is by its cost."""
    speed, machine, costs = Speed(), Machine(0.25, 0.0004), (6500.0, 640.0, 620.0, 2200.0, 2130.0)
    for cost in costs * 13:
        speed.add(cost, machine.seconds(cost))
    measured = speed.measured()
    assert measured.speed == pytest.approx(sum(costs) / sum(map(machine.seconds, costs)), rel=0.02)
    assert measured.error < 0.02


def test_nothing_is_shared_anew_while_a_rank_is_not_measured():
    new = Speed()
    new.add(0.0, 1.0)  # a step without work
    for _ in range(5):
        new.add(3.0, 1.0)
    assert new.measured() == UNKNOWN
    assert fair_shares([Measured(3.0, 0.0), UNKNOWN], [1.0, 1.0]) is None


def test_what_is_told():
    text = told(["h1", "h2", "h3"], [1.2, 1.05, 0.75], [4.0, 3.5, 2.5])
    assert text == "shares h1 40 %, h2 35 %, h3 25 %: h1 is 1.6 times as fast as h3"


# ---- Runs of threads --------------------------------------------------------------------------------------------

CLIPS, EPOCHS = 240, 3
GROUP = [Machine(0.1, 0.1), Machine(0.1, 0.2), Machine(0.2, 0.4)]
STRATEGIES = {
    "allreduce": partial(AllReduceStrategy, lr=0.01),
    "diloco": partial(DiLoCoStrategy, lr=0.01, H=4),
    "hidden": partial(DiLoCoStrategy, lr=0.01, H=4, overlap_steps=2),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


class Timed(Speed):
    """Its steps take as long as a machine's do, whatever the clock says."""

    def __init__(self, machine: Machine):
        super().__init__()
        self._machine = machine

    def add(self, cost, seconds):
        super().add(cost, self._machine.seconds(cost))


class Weighed(DatasetSamples):
    """Each sample costs as much as ten."""

    def cost(self, epoch, numbers):
        return 10.0 * len(numbers)


class Counted(ElasticSampler):
    def __init__(self, samples, members, member):
        super().__init__(samples, members, member)
        self.counts: Counter = Counter()

    def _mark_done(self, epoch, first, last, members):
        super()._mark_done(epoch, first, last, members)
        own = self._plan(epoch)[self.members.index(self.member)]
        self.counts.update((epoch, number) for step in own[first:last] for number in step)


def trained(comm, name, group, *, folder=None, stop_at=math.inf, auto=True, samples=DatasetSamples):
    """The node and its events. It goes on from what is in the folder."""
    events, member = [], comm.members[comm.rank]
    work = Counted(samples(Points(CLIPS), batch_size=4), comm.members, member)
    checkpoints = Checkpoints(folder, member) if folder else None
    node = train_node(
        Line(), comm, STRATEGIES[name](), work, epochs=EPOCHS, events=events.append, auto_shares=auto,
        should_stop=lambda: node.state.now.step + 1 >= stop_at,
        checkpoints=checkpoints, resume=folder is not None, checkpoint_interval=5 if folder else 0,
    )  # fmt: skip
    node.shares.speed = Timed(group[comm.rank])
    node.result = node.run()
    if checkpoints:
        checkpoints._writer.shutdown()
    return node, events


def dealt(events):
    """(step, epoch, what) of each time that shares changed."""
    return [(event["step"], event["epoch"], event["what"]) for event in events if event["type"] == "shares"]


@every_strategy
def test_ranks_deal_alike_within_the_first_epoch_and_stay_equal(name):
    ranks = run_threads(len(GROUP), lambda comm: trained(comm, name, GROUP))
    [told_to_all] = {tuple(dealt(events)) for _, events in ranks}
    step, epoch, what = told_to_all[0]
    assert OFTEN <= step <= OFTEN + 4 and epoch == 0
    assert what == "shares rank0 55 %, rank1 30 %, rank2 15 %: rank0 is 3.6 times as fast as rank2"
    assert len({node.train.weights for node, _ in ranks}) == 1
    assert len({node.result.digest for node, _ in ranks}) == 1
    assert torch.equal(*[FlatParameters(node.model).read() for node, _ in ranks[:2]])
    counts = sum((node.train.counts for node, _ in ranks), Counter())
    assert counts == {(epoch, number): 1 for epoch in range(EPOCHS) for number in range(CLIPS)}
    # The slow ones are relieved in each step.
    samples = [[event["samples"] for event in events if event["type"] == "step"] for _, events in ranks]
    assert [set(each[:OFTEN]) for each in samples] == [{4}] * 3
    last = [sum(each[-20:]) / 20 for each in samples]
    seconds = [machine.seconds(count) for machine, count in zip(GROUP, last, strict=True)]
    assert sum(last) == pytest.approx(12, rel=0.06) and max(seconds) < 1.08 * min(seconds)


@pytest.mark.parametrize(
    "name", [name if name == "diloco" else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_a_run_that_is_stopped_goes_on_with_what_was_dealt(tmp_path, name):
    group = [Machine(0.0, 0.1), Machine(0.0, 0.2), Machine(0.0, 0.4)]  # which are dealt to once
    whole = run_threads(3, lambda comm: trained(comm, name, group, folder=tmp_path / "whole"))
    last, _, _ = dealt(whole[0][1])[-1]
    stop = partial(trained, name=name, group=group, folder=tmp_path / "run", stop_at=last + 5)
    stopped = run_threads(3, lambda comm: stop(comm))
    again = run_threads(3, lambda comm: trained(comm, name, group, folder=tmp_path / "run"))
    assert all(node.result.stopped for node, _ in stopped) and not any(dealt(events) for _, events in again)
    assert {node.train.weights for node, _ in again} == {whole[0][0].train.weights}
    assert {node.result.digest for node, _ in again} == {whole[0][0].result.digest}


def test_what_a_sample_costs_does_not_change_who_is_faster():
    ranks = run_threads(2, lambda comm: trained(comm, "allreduce", [Machine(0, 0.1), Machine(0, 0.2)], samples=Weighed))
    assert dealt(ranks[0][1])[0][2] == "shares rank0 67 %, rank1 33 %: rank0 is 2 times as fast as rank1"


@every_strategy
def test_equal_ranks_have_the_bits_of_fixed_shares(name):
    equal = [Machine(0.1, 0.1)] * 2
    auto, fixed = (
        run_threads(2, lambda comm, auto=auto: trained(comm, name, equal, auto=auto))[0] for auto in (True, False)
    )
    assert not dealt(auto[1])
    if name != "hidden":  # which waits where speeds are compared
        assert auto[0].result.digest == fixed[0].result.digest


def test_batches_that_cannot_be_shared_anew_stay():
    source = Steps([[(torch.ones(2, 4), torch.ones(2, 1))]] * 40)

    def rank_main(comm):
        events = []
        node = train_node(Line(), comm, AllReduceStrategy(), source, epochs=1, events=events.append, auto_shares=True)
        node.shares.speed = Timed(GROUP[comm.rank])
        return node.run().steps, dealt(events)

    assert run_threads(3, rank_main) == [(40, [])] * 3
