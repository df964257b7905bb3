"""AllReduce against a plain sum: any order of gradients on any rank, ranks that overlap or not, and ranks that die."""

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from exogym import AllReduceStrategy, StepResult
from exogym.comm.comm import Comm, ThreadComm
from exogym.errors import PeerLost
from exogym.membership import ROUND

EXAMPLES = max(150, int(os.environ.get("FUZZ_EXAMPLES", 0)))
BYTES = 1 / (1 << 20)  # in MB
LR = 0.125


class Died(Exception):
    pass


class Hub:
    """Who is still there: a new generation each time that one dies; a step counts once all of a generation voted."""

    def __init__(self, size: int):
        self.changed = threading.Condition()
        self.generation, self.members = 0, ()
        self.votes: dict[tuple[int, int], set[str]] = {}
        self._form(tuple(f"rank{rank}" for rank in range(size)))

    def _form(self, members: tuple[str, ...]) -> None:
        self.generation, self.members = self.generation + 1, members
        self.groups = dict(zip(members, ThreadComm.group(len(members), timeout=20), strict=True))

    def leave(self, name: str) -> None:
        with self.changed:
            old = self.groups
            self._form(tuple(member for member in self.members if member != name))
            old[name].abort()
            self.changed.notify_all()

    def vote(self, generation: int, number: int, name: str, members: tuple[str, ...]) -> bool:
        with self.changed:
            votes = self.votes.setdefault((generation, number), set())
            votes.add(name)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(votes) == len(members) or self.generation > generation, 20)
            return len(votes) == len(members)


class Regrouping(Comm):
    """dies_at: which of its collectives it does not take part in any more."""

    def __init__(self, hub: Hub, name: str, dies_at: int | None):
        super().__init__()
        self.hub, self.name, self.left = hub, name, dies_at
        self._follow()

    def _follow(self) -> None:
        with self.hub.changed:
            self._generation, self._members = self.hub.generation, self.hub.members
            self._group, self._vote = self.hub.groups.get(self.name), 0

    rank = property(lambda self: self._members.index(self.name))
    world_size = property(lambda self: len(self._members))
    members = property(lambda self: self._members)
    generation = property(lambda self: self._generation)

    def all_reduce_(self, flat):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.hub.leave(self.name)
                raise Died
        self._group.all_reduce_(flat)

    broadcast_ = all_gather = send = recv = all_reduce_

    def interrupt(self):
        self._group.interrupt()

    def commit_together(self, kind, work, about=lambda result: {}):
        while True:
            try:
                result = work()
                self._vote += 1
                if self.hub.vote(self._generation, self._vote, self.name, self._members):
                    return result
            except PeerLost:
                pass
            self._follow()


@dataclass(frozen=True)
class Batch:
    """Which parameters its loss uses, in which order, perhaps repeatedly; one gradient may be NaN."""

    uses: tuple[int, ...]
    weight: int
    nan: int | None


@dataclass(frozen=True)
class Case:
    sizes: list[int]
    bucket_bytes: int
    overlaps: list[bool]
    dies_at: list[int | None]
    steps: list[list[list[Batch]]]  # of each step and rank
    no_sync: bool  # for all but the last backward pass

    def factor(self, step: int, rank: int, at: int, use: int) -> float:
        """The gradient of each value of a parameter that is used: a whole number, so that sums are exact."""
        return float(1 + (5 * step + 3 * rank + 2 * at + use) % 7)


NUMBERS = st.integers(0, 4)
BATCH = st.builds(
    Batch,
    uses=st.lists(NUMBERS, max_size=6).map(tuple),
    weight=st.integers(1, 3),
    nan=st.one_of(st.none(), st.none(), st.none(), NUMBERS),
)


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 4))
    per_rank = lambda of: st.lists(of, min_size=ranks, max_size=ranks)  # noqa: E731
    dies = st.one_of(st.none(), st.none(), st.integers(0, 12))
    return Case(
        sizes=draw(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any)),
        bucket_bytes=draw(st.sampled_from([1, 1, 8, 16, 1000])),
        overlaps=draw(per_rank(st.sampled_from([True, True, True, False]))),
        dies_at=[None, *draw(per_rank(dies))[1:]],
        steps=draw(st.lists(per_rank(st.lists(BATCH, max_size=3)), min_size=1, max_size=3)),
        no_sync=draw(st.sampled_from([True, True, False])),
    )


class Weights(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)


def backward(case, model, step, rank, at, batch):
    loss = torch.zeros(())
    for use in batch.uses:
        number = use % len(case.sizes)
        factor = float("nan") if batch.nan == use else case.factor(step, rank, at, use)
        loss = loss + (model.all[number] * factor).sum()
    loss.backward()


def rank_main(case, comm, rank):
    """After each step that counted: who was there, and the weights."""
    model, told = Weights(case.sizes), []
    made = AllReduceStrategy(inner_optim="sgd", lr=LR, overlap=case.overlaps[rank], bucket_mb=case.bucket_bytes * BYTES)
    made.setup(model, comm, len(case.steps))
    try:
        for step, of_ranks in enumerate(case.steps):
            model.zero_grad(set_to_none=True)
            batches = [(at, batch) for at, batch in enumerate(of_ranks[rank]) if batch.uses]
            for at, batch in batches:
                with made.no_sync() if case.no_sync and (at, batch) != batches[-1] else nullcontext():
                    backward(case, model, step, rank, at, batch)
            made.local_step(float(sum(batch.weight for _, batch in batches)), len(batches))
            exchanged = comm.commit_together(ROUND, lambda: made.exchange(False))
            members = comm.members
            made.apply(exchanged, StepResult())
            told.append((members, torch.cat([p.detach() for p in model.all])))
    finally:
        made.close()
    return told


def expected(case, members_of_steps):
    weights = [torch.ones(size) for size in case.sizes]
    for step, members in enumerate(members_of_steps):
        sums, total = [None] * len(case.sizes), 0
        for rank in (int(member[4:]) for member in members):
            batches = [(at, batch) for at, batch in enumerate(case.steps[step][rank]) if batch.uses]
            bad = [batch.nan for _, batch in batches if batch.nan in batch.uses]
            if any(case.sizes[use % len(case.sizes)] for use in bad):
                continue
            total += sum(batch.weight for _, batch in batches)
            for at, batch in batches:
                for use in batch.uses:
                    number = use % len(case.sizes)
                    sums[number] = (sums[number] or 0.0) + case.factor(step, rank, at, use)
        for weight, gradient in zip(weights, sums, strict=True):
            if gradient is not None:
                weight -= LR * gradient / total
    return torch.cat(weights)


def run(case):
    """What the ranks that did not die have told; raises what another one raised."""
    hub, results, errors = Hub(len(case.overlaps)), {}, []

    def main(rank):
        comm = Regrouping(hub, f"rank{rank}", case.dies_at[rank])
        try:
            results[rank] = rank_main(case, comm, rank)
        except Died:
            pass
        except BaseException as error:
            errors.append(error)
            hub.leave(comm.name)

    threads = [threading.Thread(target=main, args=[rank]) for rank in range(len(case.overlaps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=EXAMPLES == 150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip
@given(case=cases())
def test_any_order_on_any_rank_equals_a_plain_sum(case):
    results = run(case)
    assert 0 in results
    first = results[0]
    for told in results.values():
        for (members, weights), (other_members, other) in zip(told, first, strict=True):
            assert members == other_members and torch.equal(weights, other)
    for steps in range(1, len(first) + 1):
        plain = expected(case, [members for members, _ in first[:steps]])
        torch.testing.assert_close(first[steps - 1][1], plain, rtol=1e-5, atol=1e-5)
    assert not [thread for thread in threading.enumerate() if thread.name == "background collectives"]
