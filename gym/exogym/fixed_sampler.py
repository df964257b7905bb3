"""A rank's share of the work where nobody can take it over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from exogym.batches import Batch, BatchSource
from exogym.comm.comm import Comm
from exogym.elastic_sampler import ElasticSampler, Place
from exogym.errors import PeerLost


class FixedSampler:
    """A BatchSource with the methods of an ElasticSampler: there is nothing to reshard, and nothing to write down."""

    first_epoch = 0

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

    def agree_on_length(self, comm: Comm) -> bool:
        """Data sets that ranks made for themselves may give unequally many steps. True if this one has more now."""
        longest = max(int(steps) for steps in comm.all_gather(torch.tensor([self.steps_per_epoch])))
        if not self.may_be_lengthened or self.steps_per_epoch == longest:
            return False
        self.source.steps_per_epoch = longest
        return True

    def mark_done(self, since: Place, until: Place, members: Sequence[str]) -> None:
        pass

    def is_shared_among(self, members: Sequence[str]) -> bool:
        """Raises PeerLost for others than those who began."""
        if self.members != tuple(members):
            self.reshard(members)
        return True

    def reshard(self, members: Sequence[str], weights: Sequence[float] | None = None) -> None:
        what = f"{type(self.source).__name__} cannot be resharded"
        raise PeerLost(f"{len(self.members)} ranks had begun, now there are {len(members)}, and {what}")

    def follow(self, members: Sequence[str]) -> None:
        pass

    def prefetch(self, epochs: int | None = None) -> None:
        pass

    def knows(self, members: Sequence[str]) -> bool:
        return True

    def fingerprint(self) -> int:
        return self.steps_per_epoch

    def fixed_settings(self) -> dict[str, Any]:
        """See BatchSource."""
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
