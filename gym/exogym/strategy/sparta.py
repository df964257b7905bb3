"""SPARTA: ranks average a small part of their weights, another one each time (Beton, Baioumy, Reed and Owen, 2025).

"Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", ICLR workshop MCDC 2025.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.errors import SettingError
from exogym.flat import FlatParameters
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.communication_module import CommunicationModule, Draft, Exchanged
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.federated_averaging import hash_of
from exogym.strategy.sparta_settings import SPARTAConfig, SPARTADiLoCoConfig, check_sparse
from exogym.strategy.wire import dequantized, quantized

NOT_FINITE = "the weights to be sent were not finite"
LEAST_PIECE = 1 << 20  # values


class IndexSelector(NamedTuple):
    """Upstream's way to say which weights are averaged, and what part of them."""

    p: float
    method: str


RandomIndexSelector = partial(IndexSelector, method="random")
ShuffledSequentialIndexSelector = partial(IndexSelector, method="sequential")
PartitionedIndexSelector = partial(IndexSelector, method="partitioned")


@dataclass(kw_only=True, eq=False)
class SparseCommunicator(CommunicationModule):
    """The ranks take the mean of their weights at a few places, which all ranks know without being told.

    compression_method: which places. "random": drawn evenly from a shared seed. "sequential": one stretch after the
    other. "partitioned": every so many-th, until each weight has had its turn. "topk": where weights differ most from
    those that ranks last had in common; each rank names its own share of them, which costs 4 bytes more a place.
    quantization_bits: bits of a number that is sent, which is the difference to the common weights; each rank sends its
    own to all others.
    index_selector: upstream's name for the first two.
    """

    index_selector: InitVar[IndexSelector | None] = field(default=None, kw_only=False)
    sparsification_rate: float = 0.005
    compression_method: str = "random"
    quantization_bits: int | None = None
    seed: int = 0

    is_round = False

    def __post_init__(self, index_selector: IndexSelector | None) -> None:
        super().__post_init__()
        if index_selector is not None:
            if type(index_selector) is not IndexSelector:
                raise SettingError("index_selector: for places of your own write a CommunicationModule")
            self.sparsification_rate, self.compression_method = index_selector
        check_sparse(self.sparsification_rate, self.compression_method, self.quantization_bits, "sparsification_rate")

    def setup(self, comm: Comm, parameters: FlatParameters, common: Tensor, *, keeps_common: bool) -> None:
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        self._count = 0
        self._size = max(1, round(self.sparsification_rate * parameters.numel))

    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        """Average the weights at the places whose turn it is.

        The result is (places, int64 [k], sorted; the new values there, float32 [k]), None for a rank alone.
        """
        if self.comm.world_size == 1:
            return Exchanged(None, stopping)
        places = self._places(draft)
        base = self.common[places]
        change, skipped = draft.read_at(places).sub_(base), ""
        if not change.isfinite().all():
            change, skipped = torch.zeros_like(change), NOT_FINITE
        tail = torch.tensor([0.0 if skipped else 1.0, float(stopping)])
        change, (count, stop) = self._sum(change, tail)
        if count > 0:
            draft.set_at(places, base.add_(change.mul_(1 / count)))
        return Exchanged((places, base), stop > 0, skipped)

    def apply(self, result: tuple[Tensor, Tensor] | None, draft: Draft) -> None:
        self._count += 1
        if result and self.keeps_common:
            places, values = result
            self.common[places] = values

    def _sum(self, change: Tensor, tail: Tensor) -> tuple[Tensor, list[float]]:
        """Return the sums over the ranks of `change` [k] and of `tail` [2]."""
        if not self.quantization_bits:
            payload = torch.cat([change, tail])
            self.comm.all_reduce_(payload)
            return payload[:-2], payload[-2:].tolist()
        # Each rank sends its own to all others: integers with unequal scales have to be added up where they arrive.
        sent = torch.cat([tail.view(torch.uint8), quantized(change, self.quantization_bits)])
        total, sums = torch.zeros_like(change), torch.zeros(2)
        for of_rank in self.comm.all_gather(sent):
            sums += of_rank[:8].view(torch.float32)
            total += dequantized(of_rank[8:], change.numel(), self.quantization_bits)
        return total, sums.tolist()

    def _places(self, draft: Draft) -> Tensor:
        """Return the places of the next average, int64, sorted: k of n, or about as many."""
        n, k = self.parameters.numel, self._size
        if k == n:
            return torch.arange(n)
        if self.compression_method == "topk":  # each rank names an equal share of them
            apart = draft.read().sub_(self.common).abs_().nan_to_num_(0.0, 0.0, 0.0)
            own = largest(apart, -(-k // self.comm.world_size)).to(torch.int32)
            named: Tensor = torch.cat(self.comm.all_gather(own)).unique()
            return named.to(torch.int64)
        if self.compression_method == "sequential":
            places: Tensor = ((self._count * k + torch.arange(k)) % n).sort().values
            return places
        if self.compression_method == "partitioned":
            parts = max(1, round(n / k))
            turn, part = divmod(self._count, parts)
            order = torch.randperm(parts, generator=self._generator(turn))
            return torch.arange(int(order[part]), n, parts)
        # One from each of k stretches of equal length: k places in order, each equally likely, at a cost of k. Integers
        # alone, since a product of floats may be rounded differently elsewhere.
        ends = torch.arange(k + 1) * n // k
        drawn = torch.randint(2**31, (k,), generator=self._generator(self._count))
        return ends[:-1] + (drawn * ends.diff() >> 31)

    def _generator(self, count: int) -> torch.Generator:
        """Return a generator that draws the same on all ranks."""
        return torch.Generator().manual_seed(hash_of(self.seed, count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


class SPARTAStrategy(CommunicateOptimizeStrategy):
    """Every `sparta_interval` steps the ranks average a part `p_sparta` of their weights.

    Each rank sends 2 (N - 1) / N times 4 bytes for each of these, p_sparta times what AllReduce sends; with
    quantization (N - 1) times quantization_bits / 8. Ranks never agree on all weights: each is validated and goes on
    with weights of its own, which stay close to each other, and the mean of all is the result.
    """

    Config = SPARTAConfig
    config: SPARTAConfig

    def _modules(self) -> list[CommunicationModule]:
        return [sparse_module(self.config)]


class SPARTADiLoCoStrategy(DiLoCoStrategy):
    """Ranks make a sparse average every `sparta_interval` steps and an outer step every H steps.

    Where both are due only the outer step is made: it brings all to the same weights. SPARTAStrategy and DiLoCoStrategy
    say more of each.
    """

    Config = SPARTADiLoCoConfig
    config: SPARTADiLoCoConfig

    def _modules(self) -> list[CommunicationModule]:
        return [sparse_module(self.config), *super()._modules()]


def largest(values: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest values (all, if there are fewer), int64, in no order.

    The values are searched in pieces, since torch's topk takes 16 bytes for each one that it looks at.
    """
    kept, piece = torch.empty(0, dtype=torch.int64), max(16 * count, LEAST_PIECE)
    for first in range(0, values.numel(), piece):
        part = values[first : first + piece]
        kept = torch.cat([kept, part.topk(min(count, part.numel()), sorted=False).indices + first])
        if kept.numel() > count:
            kept = kept[values[kept].topk(count, sorted=False).indices]
    return kept


def sparse_module(config: SPARTAConfig) -> SparseCommunicator:
    """Return the module of a strategy with these settings."""
    return SparseCommunicator(
        interval=config.sparta_interval,
        sparsification_rate=config.p_sparta,
        compression_method=config.compression_method,
        quantization_bits=config.quantization_bits,
    )
