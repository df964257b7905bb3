"""Federated averaging: ranks train alone for H steps, then take the mean of their weights (McMahan, 1602.05629)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.config import check_whole
from exogym.flat import FlatParameters, is_finite
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.communication_module import NOT_FINITE, CommunicationModule, Draft, Exchanged, Payload
from exogym.strategy.federated_averaging_settings import FedAvgConfig


@dataclass(kw_only=True, eq=False)
class AveragingCommunicator(CommunicationModule):
    """Ranks take the mean of their weights, weighted by the samples that each trained since the last time.

    island_size: how many ranks average with each other. The islands are drawn anew each time, from a seed that all
    share: so what one rank has learnt reaches all others in a few rounds, though nobody talks to all of them at once.
    """

    island_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.island_size is not None:
            check_whole("island_size", self.island_size, 1)
        self.agrees = self.island_size is None

    def setup(self, comm: Comm, parameters: FlatParameters, common: Tensor, *, keeps_common: bool) -> None:
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        self._sent, self._count = Payload(comm), 0

    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        """Average the island's weights. The result is the new weights [numel], or None if nobody has trained."""
        n, skipped = self.parameters.numel, ""
        payload = self._sent.flat(n + 2)
        change, tail = payload.split([n, 2])
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        if samples and not is_finite(draft.read(change).sub_(self.common).mul_(samples)):
            samples, skipped = 0, NOT_FINITE
        if not samples:
            change.zero_()
        tail.copy_(torch.tensor([samples, stopping]))
        island = self.island()
        if len(island) == self.comm.world_size:
            self.comm.all_reduce_(payload)
            stop = tail[1].item() > 0
        else:  # all learn of a rank that wants to stop, whatever its island
            stopping_ranks = tail[1:].clone()
            self.comm.all_reduce_(stopping_ranks)
            self.comm.reduce_among_(payload, island)
            stop = stopping_ranks.item() > 0
        total = tail[0].item()
        if total > 0:
            draft.set(change.mul_(1 / total).add_(self.common))
        return Exchanged(change if total > 0 else None, stop, skipped)

    def apply(self, result: Tensor | None, draft: Draft) -> None:
        self._count += 1
        if result is not None and self.agrees and self.keeps_common:
            self.common.copy_(result)

    def island(self) -> list[int]:
        """Return the ranks that this one averages with in the next exchange, itself included.

        The sizes of islands differ by at most one.
        """
        world = self.comm.world_size
        if self.island_size is None or self.island_size >= world:
            return list(range(world))
        generator = torch.Generator().manual_seed(hash_of(self.seed, self._count))
        order = torch.randperm(world, generator=generator).tolist()
        count = -(-world // self.island_size)
        mine = order.index(self.comm.rank) % count
        return sorted(order[mine::count])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


def hash_of(seed: int, count: int) -> int:
    """Return the seed of exchange number `count`; those of neighbouring exchanges have nothing in common."""
    return ((seed + 1) * 0x9E3779B97F4A7C15 + count * 0xD1B54A32D192ED03) % 2**63


class FedAvgStrategy(CommunicateOptimizeStrategy):
    """Ranks average their weights every H steps, all of them or in islands of `island_size`.

    Each rank sends 4 bytes a trained parameter, 2 (k - 1) / k times, where k average with each other.
    With all ranks it is DiLoCo with a plain average. With islands ranks never agree: each is validated and goes on
    with weights of its own, and the mean of all is the result.
    """

    Config = FedAvgConfig
    config: FedAvgConfig

    def _modules(self) -> list[CommunicationModule]:
        return [AveragingCommunicator(interval=self.config.H, island_size=self.config.island_size)]
