"""Whose turn is which sample: the work of a run, dealt out among ranks that may come and go."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from exogym.batches import Batch

Plan = list[list[list[int]]]  # of an epoch: for each member, for each of its steps, numbers of samples
Position = tuple[int, int]  # epoch, step in it


class Samples(Protocol):
    """A data set that can be planned and read in parts; samples are numbered from 0."""

    def __len__(self) -> int: ...

    def mark(self) -> dict[str, Any]:
        """What decides about plans, by name, in JSON: all ranks must have the same, also when a run is resumed."""

    def plan(self, epoch: int, left: Tensor | None, members: Sequence[str], weights: Sequence[float]) -> Plan:
        """Each sample to one step of one member, all with equally many steps, some of which may be empty.

        left: bool [len], the samples that are still to be trained in this epoch; None if all are, and then the number
        of steps does not depend on the epoch. weights: how much a member should get, in proportion. The same on every
        rank.
        """

    def expect(self, steps: Iterable[Sequence[int]]) -> None:
        """They will be read, most likely in this order: what takes time to get can be got now."""

    def read(self, steps: Iterable[Sequence[int]]) -> Iterator[list[Batch]]:
        """The micro-batches of each step."""


class SharedWork:
    """A BatchSource with a ledger: each sample is trained once in an epoch, whoever does it.

    A deal among `members` holds from the first unfinished epoch on; its positions are (epoch, step). All ranks make the
    same calls of `settle` and `deal`, and so know, without asking, who has trained what.
    """

    def __init__(self, samples: Samples, members: Sequence[str], member: str):
        self.samples, self.member = samples, member
        self.members, self.weights = tuple(members), (1.0,) * len(members)
        self.first_epoch = 0  # that is not finished
        self.is_stale = False  # a part of what was dealt will not be trained, for its member is gone
        self._done: dict[int, Tensor] = {}  # bool [samples] for each epoch that is begun and not finished
        self._done_at_deal: dict[int, Tensor] = {}
        self._plans: dict[int, Plan] = {}
        self._whole_steps: int | None = None  # of an epoch of which all was left at the deal

    @property
    def steps_per_epoch(self) -> int:
        return self.steps_in(self.first_epoch)

    def steps_in(self, epoch: int) -> int:
        if epoch in self._done_at_deal:
            return len(self._plan(epoch)[0])
        if self._whole_steps is None:
            self._whole_steps = len(self._plan(epoch)[0])
        return self._whole_steps

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[list[Batch]]:
        return self.samples.read(self._own(epoch)[first_step:])

    def settle(self, since: Position, until: Position, members: Sequence[str]) -> None:
        """What was dealt to `members` between two positions is trained."""
        for epoch in range(since[0], until[0] + 1):
            first = since[1] if epoch == since[0] else 0
            last = until[1] if epoch == until[0] else self.steps_in(epoch)
            if last > first:
                self._settle(epoch, first, last, members)
        while (done := self._done.get(self.first_epoch)) is not None and done.all():
            del self._done[self.first_epoch]
            self._done_at_deal.pop(self.first_epoch, None)
            self._plans.pop(self.first_epoch, None)
            self.first_epoch += 1

    def deal(self, members: Sequence[str], weights: Sequence[float] | None = None) -> None:
        """Share what is left among `members`, in proportion to `weights`."""
        self.members, self.weights = tuple(members), tuple(weights or [1.0] * len(members))
        self.is_stale = False
        self._done_at_deal = {epoch: done.clone() for epoch, done in self._done.items()}
        self._plans, self._whole_steps = {}, None

    def expect(self, epochs: int | None = None) -> None:
        """Tell the samples what this member is going to read, of a run of so many epochs.

        In later epochs it reads what it reads in the next one, unless there is another deal.
        """
        soon = [epoch for epoch in (self.first_epoch, self.first_epoch + 1) if epochs is None or epoch < epochs]
        self.samples.expect([numbers for epoch in soon for numbers in self._own(epoch)])

    def mark(self) -> int:
        """64 bits of a hash, the same on ranks that share the same work."""
        text = json.dumps(self.samples.mark(), sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)

    def fixed_settings(self) -> dict[str, Any]:
        """See BatchSource: `mark`, and what only this rank may be able to tell."""
        describe = getattr(self.samples, "describe", None)
        return self.samples.mark() | (describe() if describe else {})

    def state_dict(self) -> dict[str, Any]:
        """The ledger and the deal: what ranks have in common, not copied."""
        return {
            "members": self.members,
            "weights": self.weights,
            "first_epoch": self.first_epoch,
            "is_stale": self.is_stale,
            "done": self._done,
            "done_at_deal": self._done_at_deal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.members, self.weights = tuple(state["members"]), tuple(state["weights"])
        self.first_epoch, self.is_stale = state["first_epoch"], state["is_stale"]
        self._done = {epoch: done.clone() for epoch, done in state["done"].items()}
        self._done_at_deal = {epoch: done.clone() for epoch, done in state["done_at_deal"].items()}
        self._plans, self._whole_steps = {}, None

    def _own(self, epoch: int) -> list[list[int]]:
        return self._plan(epoch)[self.members.index(self.member)]

    def _plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            done = self._done_at_deal.get(epoch)
            left = None if done is None else ~done
            self._plans[epoch] = self.samples.plan(epoch, left, self.members, self.weights)
        return self._plans[epoch]

    def _settle(self, epoch: int, first: int, last: int, members: Sequence[str]) -> None:
        if epoch not in self._done:
            self._done[epoch] = torch.zeros(len(self.samples), dtype=torch.bool)
        for member, steps in zip(self.members, self._plan(epoch), strict=True):
            numbers = [number for step in steps[first:last] for number in step]
            if member in members:
                self._done[epoch][numbers] = True
            elif numbers:
                self.is_stale = True
