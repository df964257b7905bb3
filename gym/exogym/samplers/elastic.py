"""Which rank trains which samples: where ranks may come and go, and where nobody can take over another's share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.errors import PeerLost, SettingError
from exogym.samplers.batches import Batch, BatchSource

Plan = list[list[list[int]]]  # of an epoch: for each member, for each of its steps, numbers of samples
Place = tuple[int, int]  # epoch, step in it


class Samples(Protocol):
    """A data set that can be planned and read in parts; samples are numbered from 0.

    It may have a method `describe() -> dict`: what only some ranks may be able to tell about the data, by name, and
    what must be the same on those that can when a run is resumed. It may have a method `begin_epoch(epoch)`, which is
    called before steps of another epoch are read. It may have a method `cost(epoch, numbers) -> float`: about the work
    that these samples are, in any unit; without it all are alike. It may have `has_larger_steps`, see ElasticSampler.
    """

    def __len__(self) -> int: ...

    def plan_settings(self) -> dict[str, Any]:
        """Return what decides about plans, by name, in JSON: the same on all ranks, also when a run is resumed."""

    def plan(
        self,
        epoch: int,
        left: Tensor | None,
        members: Sequence[str],
        weights: Sequence[float],
        steps_before: int = 0,
    ) -> Plan:
        """Give each sample to one step of one member, all with equally many steps, some of which may be empty.

        left: bool [len], the samples that are still to be trained in this epoch; None if all are, and then the number
        of steps does not depend on the epoch. weights: how much a member should get, in proportion. steps_before: that
        members make before these since the work was last shared, which was at a round's end: so it tells where rounds
        end. The number of steps does not depend on it. The same on every rank.
        """

    def prefetch(self, steps: Iterable[Sequence[int]]) -> None:
        """Get what takes time: these steps will be read, most likely in this order."""

    def read(self, steps: Iterable[Sequence[int]]) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step."""


class ElasticSampler:
    """A BatchSource that knows which samples are done: each is trained once in an epoch, whoever does it.

    `members` share what was left when they were last resharded, from the first unfinished epoch on; places in it are
    (epoch, step). All ranks make the same calls of `mark_done` and `reshard`, and so know, without asking, who has
    trained what.
    """

    may_be_lengthened = False

    def __init__(self, samples: Samples, members: Sequence[str], member: str):
        self.samples, self.member = samples, member
        self.members, self.weights = tuple(members), (1.0,) * len(members)
        self.first_epoch = 0  # that is not finished
        self.needs_reshard = False  # a member is gone before it has trained all of its share
        self._done: dict[int, Tensor] = {}  # bool [samples] for each epoch that is begun and not finished
        self._done_at_reshard: dict[int, Tensor] = {}
        self._plans: dict[int, Plan] = {}
        self._whole_steps: int | None = None  # of an epoch of which nothing was done at the last reshard
        self._steps_made = 0  # of epochs that were finished since

    @property
    def has_larger_steps(self) -> bool:
        """Members with less work may have it in fewer steps, as large as those of the others."""
        return getattr(self.samples, "has_larger_steps", False)

    @property
    def steps_per_epoch(self) -> int:
        return self.steps_in(self.first_epoch)

    def steps_in(self, epoch: int) -> int:
        if epoch in self._done_at_reshard:
            return len(self._plan(epoch)[0])
        if self._whole_steps is None:
            self._whole_steps = len(self._plan(epoch)[0])
        return self._whole_steps

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[list[Batch]]:
        if begin := getattr(self.samples, "begin_epoch", None):
            begin(epoch)
        return self.samples.read(self._own(epoch)[first_step:])

    def samples_in_step(self, epoch: int) -> float:
        """Return the samples of all members together in a step, as a mean over the epoch as it was last shared."""
        done = self._done_at_reshard.get(epoch)
        return (len(self.samples) if done is None else int((~done).sum())) / self.steps_in(epoch)

    def cost(self, place: Place, trained: int) -> float:
        """Return the cost of this member's step there, of which so many samples were trained."""
        epoch, step = place
        numbers = self._own(epoch)[step]
        cost_of = getattr(self.samples, "cost", None)
        return trained / len(numbers) * cost_of(epoch, numbers) if cost_of and numbers else trained

    def agree_on_length(self, comm: Comm) -> bool:
        """Do nothing, as all ranks have the same plans."""
        return False

    def mark_done(self, since: Place, until: Place, members: Sequence[str]) -> None:
        """Take note that `members` have trained their shares between two places."""
        for epoch in range(since[0], until[0] + 1):
            first = since[1] if epoch == since[0] else 0
            last = until[1] if epoch == until[0] else self.steps_in(epoch)
            if last > first:
                self._mark_done(epoch, first, last, members)
        while (done := self._done.get(self.first_epoch)) is not None and done.all():
            self._steps_made += self.steps_in(self.first_epoch)
            del self._done[self.first_epoch]
            self._done_at_reshard.pop(self.first_epoch, None)
            self._plans.pop(self.first_epoch, None)
            self.first_epoch += 1

    def is_shared_among(self, members: Sequence[str]) -> bool:
        """Say whether each of them, and nobody else, has a share of what is left."""
        return self.members == tuple(members) and not self.needs_reshard

    def reshard(self, members: Sequence[str], weights: Sequence[float] | None = None) -> None:
        """Share what is left among `members`, in proportion to `weights`."""
        self.members, self.weights = tuple(members), tuple(weights or [1.0] * len(members))
        self.needs_reshard = False
        self._done_at_reshard = {epoch: done.clone() for epoch, done in self._done.items()}
        self._plans, self._whole_steps, self._steps_made = {}, None, 0

    def follow(self, members: Sequence[str]) -> None:
        """Data of which every epoch is the same: `members` share the first one, if others have done so far."""
        if self.members != tuple(members):
            self.reshard(members)
            self.prefetch(epochs=1)

    def prefetch(self, epochs: int | None = None) -> None:
        """Tell the samples what this member is going to read, of a run of so many epochs.

        In later epochs it reads what it reads in the next one, unless they are resharded.
        """
        soon = [epoch for epoch in (self.first_epoch, self.first_epoch + 1) if epochs is None or epoch < epochs]
        self.samples.prefetch([numbers for epoch in soon for numbers in self._own(epoch)])

    def next_numbers(self, steps: int | None = None) -> list[int]:
        """Return which samples this member reads in its next epoch, or in so many steps of it, in order."""
        return [number for step in self._own(self.first_epoch)[:steps] for number in step]

    def knows(self, members: Sequence[str]) -> bool:
        """Say whether all of them have a share."""
        return set(members) <= set(self.members)

    def fingerprint(self) -> int:
        """Return 64 bits of a hash, the same on ranks that share the same work."""
        text = json.dumps(self.samples.plan_settings(), sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)

    def fixed_settings(self) -> dict[str, Any]:
        describe = getattr(self.samples, "describe", None)
        return self.samples.plan_settings() | (describe() if describe else {})

    def state_dict(self) -> dict[str, Any]:
        """Return what is done, and who shares what is left: what ranks have in common, not copied."""
        return {
            "members": self.members,
            "weights": self.weights,
            "first_epoch": self.first_epoch,
            "needs_reshard": self.needs_reshard,
            "done": self._done,
            "done_at_reshard": self._done_at_reshard,
            "steps_made": self._steps_made,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.members, self.weights = tuple(state["members"]), tuple(state["weights"])
        self.first_epoch, self.needs_reshard = state["first_epoch"], state["needs_reshard"]
        self._done = {epoch: done.clone() for epoch, done in state["done"].items()}
        self._done_at_reshard = {epoch: done.clone() for epoch, done in state["done_at_reshard"].items()}
        self._plans, self._whole_steps, self._steps_made = {}, None, state["steps_made"]

    def _own(self, epoch: int) -> list[list[int]]:
        return self._plan(epoch)[self.members.index(self.member)]

    def _plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            done = self._done_at_reshard.get(epoch)
            left = None if done is None else ~done
            before = self._steps_made + sum(map(self.steps_in, range(self.first_epoch, epoch)))
            self._plans[epoch] = self._divide(epoch, left, before)
        return self._plans[epoch]

    def _divide(self, epoch: int, left: Tensor | None, before: int) -> Plan:
        return self.samples.plan(epoch, left, self.members, self.weights, before)

    def _mark_done(self, epoch: int, first: int, last: int, members: Sequence[str]) -> None:
        if epoch not in self._done:
            self._done[epoch] = torch.zeros(len(self.samples), dtype=torch.bool)
        for member, steps in zip(self.members, self._plan(epoch), strict=True):
            numbers = [number for step in steps[first:last] for number in step]
            if member in members:
                self._done[epoch][numbers] = True
            elif numbers:
                self.needs_reshard = True


class SharedSampler(ElasticSampler):
    """An ElasticSampler of ranks that train one model in parts: each has all samples, in the same batches."""

    def _divide(self, epoch: int, left: Tensor | None, before: int) -> Plan:
        return self.samples.plan(epoch, left, ("all",), (1.0,), before) * len(self.members)


class FixedSampler:
    """A BatchSource with the methods of an ElasticSampler: there is nothing to reshard, and nothing to write down."""

    first_epoch = 0
    has_larger_steps = False

    def __init__(self, source: BatchSource, members: Sequence[str]):
        self.source, self.members = source, tuple(members)
        self.may_be_lengthened = getattr(source, "may_be_lengthened", False)

    @property
    def steps_per_epoch(self) -> int:
        return self.source.steps_per_epoch

    def steps_in(self, epoch: int) -> int:
        return self.source.steps_per_epoch

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[list[Batch]]:
        return self.source.epoch(epoch, first_step=first_step) if first_step else self.source.epoch(epoch)

    def samples_in_step(self, epoch: int) -> float:
        """Return 0, as it is not known."""
        return 0.0

    def cost(self, place: Place, trained: int) -> float:
        return trained

    def agree_on_length(self, comm: Comm) -> bool:
        """Data sets that ranks made for themselves may give unequally many steps. True if this one has more now."""
        longest = max(int(steps) for steps in comm.all_gather(torch.tensor([self.steps_per_epoch])))
        if not longest:
            raise SettingError("there is nothing to train on: no rank has a sample")
        if not self.may_be_lengthened or self.steps_per_epoch == longest:
            return False
        self.source.steps_per_epoch = longest  # type: ignore[misc]  # of a source that says it may be
        return True

    def mark_done(self, since: Place, until: Place, members: Sequence[str]) -> None:
        pass

    def is_shared_among(self, members: Sequence[str]) -> bool:
        """Raise PeerLost for others than those who began."""
        if self.members != tuple(members):
            self.reshard(members)
        return True

    def reshard(self, members: Sequence[str], weights: Sequence[float] | None = None) -> None:
        what = f"and {type(self.source).__name__} cannot be resharded"
        raise PeerLost(f"the run began with {len(self.members)} ranks, now there are {len(members)}, {what}")

    def follow(self, members: Sequence[str]) -> None:
        pass

    def prefetch(self, epochs: int | None = None) -> None:
        pass

    def knows(self, members: Sequence[str]) -> bool:
        return True

    def fingerprint(self) -> int:
        return self.steps_per_epoch

    def fixed_settings(self) -> dict[str, Any]:
        settings = getattr(self.source, "fixed_settings", None)
        about = settings() if settings else {"steps_per_epoch": self.steps_per_epoch}
        return {**about, "num_nodes": len(self.members)}

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: None) -> None:
        pass


Sampler = ElasticSampler | FixedSampler


def sampler_of(source: BatchSource, members: Sequence[str]) -> Sampler:
    return source if isinstance(source, ElasticSampler) else FixedSampler(source, members)
