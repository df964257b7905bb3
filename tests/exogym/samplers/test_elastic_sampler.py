"""Which samples are done: whoever is lost or comes, each sample is trained once in an epoch."""

import itertools
import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exogym.samplers.batches import BatchSource, DatasetSamples
from exogym.samplers.elastic import ElasticSampler
from exogym.state.checkpoint import from_tree, to_tree

HOSTS = ("ada", "bob", "cy", "dee")
EPOCHS = 3


class Numbers(DatasetSamples):
    """Numbered samples; a step's only micro-batch is the list of its numbers."""

    def __init__(self, size: int, **settings):
        super().__init__(range(size), **settings)

    def read(self, steps):
        return ([list(numbers)] for numbers in steps)


def ranks_of(size: int, members=HOSTS[:2], **settings) -> dict[str, ElasticSampler]:
    return {member: ElasticSampler(Numbers(size, **settings), members, member) for member in members}


def drawn(work: ElasticSampler, epoch: int, first_step: int = 0) -> list[list[int]]:
    return [numbers for [numbers] in work.epoch(epoch, first_step=first_step)]


def left(ranks: dict[str, ElasticSampler], epoch: int) -> list[int]:
    return sorted(n for work in ranks.values() for numbers in drawn(work, epoch) for n in numbers)


def copied(state: dict) -> dict:
    """As it comes from a checkpoint, or from another rank."""
    tensors = {}
    tree = json.loads(json.dumps(to_tree(state, tensors)))
    return from_tree(tree, {name: tensor.clone() for name, tensor in tensors.items()})


def test_what_a_member_reads_next_is_known_beforehand():
    work = ranks_of(20, batch_size=3)["bob"]
    assert work.next_numbers() == [number for numbers in drawn(work, 0) for number in numbers]
    assert work.next_numbers(2) == work.next_numbers()[:6]


class Group:
    """Ranks that train numbers as TrainNode does: rounds of steps, a common count at the end of each."""

    def __init__(self, size: int, batch: int, members: set[str]):
        self.size, self.batch = size, batch
        self.ranks = ranks_of(size, self.ordered(members), batch_size=batch)
        self.epoch = self.step = 0
        self.since = (0, 0)
        self.trained: dict[str, list[tuple[int, int]]] = {member: [] for member in self.ranks}
        self.counted: Counter = Counter()

    @property
    def any_rank(self) -> ElasticSampler:
        return next(iter(self.ranks.values()))

    @staticmethod
    def ordered(members) -> tuple[str, ...]:
        return tuple(host for host in HOSTS if host in members)

    def train(self, steps: int) -> None:
        while steps and self.epoch < EPOCHS:
            [count] = {work.steps_in(self.epoch) for work in self.ranks.values()}
            shares = {member: drawn(work, self.epoch, self.step) for member, work in self.ranks.items()}
            assert {len(share) for share in shares.values()} == {count - self.step}, "equal numbers of steps"
            for member, share in shares.items():
                assert len(share[0]) <= self.batch or len(set(self.any_rank.weights)) > 1
                self.trained[member] += [(self.epoch, number) for number in share[0]]
            steps, self.step = steps - 1, self.step + 1
            if self.step == count:
                self.epoch, self.step = self.epoch + 1, 0

    def agree(self, lost: set[str], come: set[str], speeds: dict[str, float] | None = None) -> None:
        """Those who are lost have trained for nothing; those who come get the state of one that stayed.

        speeds: the work is shared in proportion to them from now on, whoever is here.
        """
        stayed = {member: work for member, work in self.ranks.items() if member not in lost} or dict(self.ranks)
        for work in stayed.values():
            work.mark_done(self.since, (self.epoch, self.step), tuple(stayed))
        self.counted += Counter(sample for member in stayed for sample in self.trained[member])
        state = next(iter(stayed.values())).state_dict()
        self.ranks = {
            member: stayed[member] if member in stayed else self.newcomer(member, state)
            for member in self.ordered({*stayed, *come})
        }
        self.trained = {member: [] for member in self.ranks}
        for work in self.ranks.values():
            if speeds or work.members != tuple(self.ranks) or work.needs_reshard:
                work.reshard(tuple(self.ranks), speeds and [speeds[member] for member in self.ranks])
                self.epoch, self.step = work.first_epoch, 0
        self.since = (self.epoch, self.step)

    def newcomer(self, member: str, state: dict) -> ElasticSampler:
        work = ElasticSampler(Numbers(self.size, batch_size=self.batch), ("nobody",), member)
        work.load_state_dict(copied(state))
        return work

    def check_agreement(self) -> None:
        """All have the same samples done, and so the same plans; also one that is made from it anew."""
        first = copied(self.any_rank.state_dict())
        for member, work in self.ranks.items():
            again = self.newcomer(member, work.state_dict())
            assert str(again.state_dict()) == str(work.state_dict())
            assert str(copied(work.state_dict())) == str(first)
            for epoch in range(work.first_epoch, EPOCHS):
                assert drawn(again, epoch) == drawn(work, epoch)

    def check_what_is_left(self) -> None:
        """Of each epoch, as it is shared at present: what has not counted, and nothing twice."""
        if self.since != (self.any_rank.first_epoch, 0):
            return
        for epoch in range(self.any_rank.first_epoch, EPOCHS):
            assert left(self.ranks, epoch) == [n for n in range(self.size) if not self.counted[epoch, n]]


some_hosts = st.sets(st.sampled_from(HOSTS), min_size=1)
some_speeds = st.none() | st.fixed_dictionaries(dict.fromkeys(HOSTS, st.floats(0.05, 4.0)))


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 23),
    batch=st.integers(1, 4),
    first=some_hosts,
    rounds=st.lists(st.tuples(st.integers(0, 9), some_hosts, some_hosts, some_speeds), max_size=8),
)
@example(size=7, batch=1, first={"ada", "bob"}, rounds=[(9, {"bob"}, set(), None), (2, set(), {"cy"}, None)])
@example(size=7, batch=1, first={"ada", "bob"}, rounds=[(3, {"bob"}, {"bob"}, None)])
def test_each_sample_counts_once_an_epoch(size, batch, first, rounds):
    """rounds: how many steps, who is lost in it, who comes then, perhaps the same, and whether speeds decide then."""
    group = Group(size, batch, first)
    for steps, lost, come, speeds in rounds:
        group.train(steps)
        group.agree(lost, come, speeds)
        group.check_agreement()
        group.check_what_is_left()
        assert max(group.counted.values(), default=1) == 1
    while group.epoch < EPOCHS:
        group.train(4)
        group.agree(set(), set())
    assert group.counted == {(epoch, number): 1 for epoch in range(EPOCHS) for number in range(size)}
    assert group.any_rank.first_epoch == EPOCHS


# by hand


def test_what_a_lost_rank_trained_goes_to_the_others():
    ranks = ranks_of(8, batch_size=2, shuffle=False)
    assert isinstance(ranks["ada"], BatchSource)
    assert drawn(ranks["ada"], 0) == [[0, 2], [4, 6]] and drawn(ranks["bob"], 0) == [[1, 3], [5, 7]]
    ada = ranks["ada"]
    ada.mark_done((0, 0), (0, 1), ("ada",))
    assert ada.needs_reshard and drawn(ada, 0) == [[0, 2], [4, 6]]  # shares hold until the next reshard
    ada.reshard(("ada",))
    assert not ada.needs_reshard and drawn(ada, 0) == [[1, 3], [4, 5], [6, 7]] and ada.steps_per_epoch == 3
    assert drawn(ada, 1) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    ada.mark_done((0, 0), (0, 3), ("ada",))
    assert ada.first_epoch == 1 and not ada.needs_reshard


def test_a_round_may_end_in_a_later_epoch():
    ranks = ranks_of(4, batch_size=1, shuffle=False)
    ada = ranks["ada"]
    ada.mark_done((0, 1), (2, 1), ("ada", "bob"))
    assert ada.first_epoch == 0  # its first step is not marked done
    ada.mark_done((0, 0), (0, 1), ("ada", "bob"))
    assert ada.first_epoch == 2
    ada.reshard(("ada",))
    assert drawn(ada, 2) == [[2], [3]] and drawn(ada, 3) == [[0], [1], [2], [3]]


def test_what_is_done_is_each_ranks_own_list():
    """What one rank was given does not change with the rank that gave it."""
    [ada, bob] = ranks_of(6, batch_size=1, shuffle=False).values()
    ada.mark_done((0, 0), (0, 1), ("ada", "bob"))
    bob.load_state_dict(ada.state_dict())
    ada.mark_done((0, 1), (0, 2), ("ada", "bob"))
    bob.reshard(("bob",))
    assert drawn(bob, 0) == [[2], [3], [4], [5]]


def test_how_many_samples_a_step_of_all_has():
    ada = ranks_of(10, members=HOSTS[:2], batch_size=2, shuffle=False)["ada"]
    assert ada.samples_in_step(0) == 10 / 3
    ada.mark_done((0, 0), (0, 1), ("ada", "bob"))
    assert ada.samples_in_step(0) == 10 / 3
    ada.reshard(("ada",))
    assert (ada.samples_in_step(0), ada.samples_in_step(1)) == (2.0, 2.0)


def test_a_plan_knows_how_many_steps_were_made_since_the_work_was_shared():
    asked = {}

    class Noting(Numbers):
        def plan(self, epoch, left, members, weights, steps_before):
            asked[epoch] = steps_before
            return super().plan(epoch, left, members, weights, steps_before)

    work = ElasticSampler(Noting(10, batch_size=2), HOSTS[:2], "ada")  # three steps an epoch
    assert work.steps_in(2) == 3 and asked == {0: 0, 2: 6}
    work.mark_done((0, 0), (1, 1), HOSTS[:2])
    kept = work.state_dict()
    work.steps_in(2), work.epoch(3)
    assert asked == {0: 0, 1: 3, 2: 6, 3: 9}

    late = ElasticSampler(Noting(10, batch_size=2), HOSTS[:2], "bob")
    late.load_state_dict(kept)
    asked.clear()
    late.epoch(1), late.epoch(3)
    assert asked == {1: 3, 3: 9}

    late.reshard(("bob",))  # six samples of epoch 1 are left
    asked.clear()
    late.epoch(1), late.epoch(2)
    assert asked == {1: 0, 2: 3}


def test_shares_stay_until_the_next_reshard():
    asked = []

    class Weighed(Numbers):
        def plan(self, epoch, left, members, weights, steps_before):
            asked.append((tuple(members), tuple(weights)))
            return super().plan(epoch, left, members, weights)

    work = ElasticSampler(Weighed(6), HOSTS[:2], "ada")
    work.steps_in(0)
    work.reshard(HOSTS[:2], [1, 3])
    again = ElasticSampler(Weighed(6), HOSTS, "ada")
    again.load_state_dict(copied(work.state_dict()))
    again.steps_in(0)
    assert asked == [(HOSTS[:2], (1, 1)), (HOSTS[:2], (1, 3))]


@pytest.mark.parametrize(("epochs", "soon"), [(1, [0, 2, 4]), (3, [0, 2, 4, 0, 2, 4]), (None, [0, 2, 4, 0, 2, 4])])
def test_samples_are_told_what_will_be_read(epochs, soon):
    told = []

    class Told(Numbers):
        def prefetch(self, steps):
            told.extend(number for numbers in steps for number in numbers)

    work = ElasticSampler(Told(6, batch_size=1, shuffle=False), HOSTS[:3], "ada")
    work.reshard(HOSTS[:2])
    work.prefetch(epochs)
    assert told == soon
    told.clear()
    work.mark_done((0, 0), (0, 2), HOSTS[:2])
    work.reshard(HOSTS[:1])
    work.prefetch(1)
    assert told == [4, 5]


def test_fingerprints_tell_other_work_apart():
    others = [(8, {}), (9, {"batch_size": 3}), (9, {"seed": 1}), (9, {"shuffle": False})]
    fingerprints = [
        ElasticSampler(Numbers(size, **settings), HOSTS, "ada").fingerprint() for size, settings in [(9, {}), *others]
    ]
    assert len(set(fingerprints)) == 5 and torch.tensor(fingerprints).dtype == torch.int64
    assert ElasticSampler(Numbers(9), HOSTS[:1], "bob").fingerprint() == fingerprints[0]  # whoever shares it


# DatasetSamples


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return {"i": torch.tensor(i), "square": torch.tensor(i * i)}


def test_a_dataset_is_shared_in_turn_and_read_in_micro_batches():
    samples = DatasetSamples(Squares(), batch_size=3, minibatch_size=2, shuffle=False)
    plan = samples.plan(0, None, HOSTS[:2], (1, 1))
    assert plan == [[[0, 2, 4], [6]], [[1, 3, 5], []]]
    first, empty = samples.read([plan[0][0], plan[1][1]])
    assert [batch["square"].tolist() for batch in first] == [[0, 4], [16]] and empty == []


def test_more_weight_has_larger_batches():
    samples = DatasetSamples(Squares(), batch_size=2, shuffle=False)
    assert samples.plan(0, None, HOSTS[:2], (3, 1)) == [[[0, 1], [3, 4, 5]], [[2], [6]]]
    assert samples.plan(0, torch.zeros(7, dtype=torch.bool), HOSTS[:2], (3, 1)) == [[], []]


def test_a_member_with_less_than_a_sample_a_step_rests_in_some():
    plan = Numbers(12, batch_size=1, shuffle=False).plan(0, None, HOSTS[:2], (2, 1))
    assert plan == [[[0], [1, 2], [4], [5], [7], [9, 10]], [[], [3], [], [6], [8], [11]]]


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 80),
    batch_size=st.integers(1, 8),
    speeds=st.lists(st.floats(0.01, 20), min_size=1, max_size=5),
    seed=st.integers(0, 9) | st.none(),
)
def test_all_members_have_work_to_the_end_whatever_their_weights(size, batch_size, speeds, seed):
    """Weights are at most a factor of 5 off their mean, as measured ones; `seed` chooses what is left."""
    mean = sum(speeds) / len(speeds)
    weights = [min(max(speed, mean / 5), mean * 5) for speed in speeds]
    left = None if seed is None else torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5
    due = list(range(size)) if left is None else left.nonzero().flatten().tolist()
    members = ("ada", "bob", "cy", "dee", "eve")[: len(weights)]
    samples = Numbers(size, batch_size=batch_size)
    plan = samples.plan(0, left, members, weights)
    assert sorted(number for steps in plan for step in steps for number in step) == due
    assert all(any(at_once) for at_once in zip(*plan, strict=True)), "a step in which nobody has work"
    assert len(samples.plan(1, left, members, weights)[0]) == len(plan[0])
    if len(set(weights)) == 1:
        return
    assert len(plan[0]) == math.ceil(len(due) / (batch_size * len(weights)))
    for sizes, weight in zip(([len(step) for step in steps] for steps in plan), weights, strict=True):
        assert abs(sum(sizes) - len(due) * weight / sum(weights)) < 1 + 1e-9
        if own := sum(sizes):
            assert sizes[-1] and max(sizes) - min(sizes) <= 1
            rests = [len(list(group)) for works, group in itertools.groupby(sizes, bool) if not works]
            assert all((rest + 1) * own < 2 * len(sizes) for rest in rests)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 80), batch_size=st.integers(1, 8), count=st.integers(1, 4), weight=st.floats(0.01, 20))
def test_equal_weights_share_in_turn(size, batch_size, count, weight):
    samples = Numbers(size, batch_size=batch_size, shuffle=False)
    plan = samples.plan(0, None, HOSTS[:count], [weight] * count)
    steps = math.ceil(size / (batch_size * count))
    own = [list(range(n, size, count)) for n in range(count)]
    assert plan == [[mine[at * batch_size : (at + 1) * batch_size] for at in range(steps)] for mine in own]


def test_what_is_left_keeps_its_order():
    samples = DatasetSamples(Squares(), batch_size=2, seed=3)
    [whole] = samples.plan(4, None, ("ada",), (1,))
    order = [number for step in whole for number in step]
    assert sorted(order) == list(range(7)) and order != list(range(7))
    left = torch.tensor([number not in order[:3] for number in range(7)])
    assert samples.plan(4, left, ("ada",), (1,)) == [[order[3:5], order[5:7]]]
    assert samples.plan(4, torch.zeros(7, dtype=torch.bool), HOSTS[:2], (1, 1)) == [[], []]
