"""DiLoCo for weights in bf16: common weights in bf16 too, exchanged a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from exogym.comm.comm import Comm
from exogym.flat import PIECE, FlatParameters, digest, gather, groups, pieces
from exogym.strategy.communication_module import NOT_FINITE, CommunicationModule, Draft, Exchanged
from exogym.strategy.diloco_settings import DiLoCoConfig
from exogym.strategy.low_memory import rounded_by_chance
from exogym.strategy.strategy_settings import OptimSpec
from exogym.strategy.wire import FloatSum, WireSum

AT_ONCE = 4 * 1024 * 1024  # values of a piece: 16 MB in float32, which is what a collective sends at once


class Piece(NamedTuple):
    """Views of the same values, by tensors. own, common, new: this rank's, the common weights, the next ones.

    is_buffer: they are no parameters, and take the mean itself.
    """

    own: list[Tensor]
    common: list[Tensor]
    new: list[Tensor]
    is_buffer: bool


class NewWeights(NamedTuple):
    """The next common weights, and their hash."""

    weights: list[Tensor]
    digest: int


@dataclass(kw_only=True, eq=False)
class InPieces(CommunicationModule):
    """A plain outer step where a model has weights in bf16: each tensor of the common ones is as the model has it.

    The new weights stand beside the common ones until all ranks have voted, so a lost rank leaves nothing half done. In
    float32 there is one piece at a time. Means are rounded by chance, as the steps of LowMemory are. Chance depends on
    the number of the exchange alone: so all ranks round alike, also in an exchange that is made again.
    """

    config: DiLoCoConfig

    agrees = True

    def setup(self, comm: Comm, parameters: FlatParameters, common: list[Tensor], *, keeps_common: bool) -> None:
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        outer = self.config.outer_optim if isinstance(self.config.outer_optim, OptimSpec) else self.config.outer_spec()
        self._rate = outer.lr
        count, wire = len(list(self._pieces(common, common))), self.config.wire
        self._sums: list[FloatSum | WireSum] = [FloatSum(comm)] * count
        if wire != "float32":  # what rounding leaves of each piece is kept in float32
            self._sums = [WireSum(comm, wire) for _ in range(count)]
        self._new: list[Tensor] | None = None  # room for the weights of an exchange that did not count
        self._exchanges = 0

    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        own, skipped = draft.tensors(), ""
        if samples and not math.isfinite(get_total_norm(own).item()):
            samples, skipped = 0, NOT_FINITE
        header = torch.tensor([float(samples), float(stopping)])
        self.comm.all_reduce_(header)
        total, stop = header.tolist()
        if not total:
            return Exchanged(None, stop > 0, skipped)
        self._new = self._new or [torch.empty_like(tensor) for tensor in self.common]
        chance = torch.Generator().manual_seed(self._exchanges)
        for piece, of_piece in zip(self._pieces(own, self._new), self._sums, strict=True):
            change = of_piece.flat(sum(tensor.numel() for tensor in piece.common))
            self._read(piece, change, samples)
            change, _ = of_piece.sum(torch.zeros(2), last=self.is_last)
            self._step(piece, change.mul_(1 / total), chance)
        return Exchanged(NewWeights(self._new, digest(self._new)), stop > 0, skipped)

    def apply(self, result: NewWeights | None, draft: Draft) -> None:
        self.common_digest = result and result.digest
        if result:
            self.common[:], self._new = result.weights, None  # who has a copy of the list has them as they were
            for of_piece in self._sums:
                of_piece.accept()
        self._exchanges += 1
        draft.set(self.common)

    def _pieces(self, own: list[Tensor], new: list[Tensor]) -> Iterator[Piece]:
        """Yield the pieces, of about AT_ONCE values, the same on all ranks."""
        n = len(self.parameters.parameters)
        for part in (slice(0, n), slice(n, None)):
            mine, fresh = pieces(own[part], AT_ONCE), pieces(new[part], AT_ONCE)
            for common in groups(self.common[part], AT_ONCE):
                count = len(common)
                yield Piece([*islice(mine, count)], common, [*islice(fresh, count)], part.start > 0)

    def _read(self, piece: Piece, change: Tensor, samples: int) -> None:
        """Write samples * (own weights - common weights) into `change`, float32."""
        if not samples:
            change.zero_()
            return
        gather(piece.own, change)
        for values, common in zip(_split(change, piece.common), piece.common, strict=True):
            values.sub_(common)
        stretch = self.stretch if self.comm.world_size > 1 and not piece.is_buffer else 1
        change.mul_(samples * stretch)

    def _step(self, piece: Piece, change: Tensor, chance: torch.Generator) -> None:
        """Write common weights + rate * `change`, the mean, into the new ones."""
        if not piece.is_buffer and self._rate != 1:
            change.mul_(self._rate)
        for values, common, new in zip(_split(change, piece.common), piece.common, piece.new, strict=True):
            moved, rounded = values.add_(common).view(-1).split(PIECE), new.view(-1).split(PIECE)
            for few, place in zip(moved, rounded, strict=True):
                place.copy_(rounded_by_chance(few, chance) if place.dtype == torch.bfloat16 else few)

    def own_state(self) -> dict[str, Any]:
        residuals = [each.residual for each in self._sums if isinstance(each, WireSum)]
        return {"residuals": residuals} if residuals else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        for each, residual in zip(self._sums, state.get("residuals", ()), strict=False):
            if isinstance(each, WireSum):
                each.residual = residual

    def state_dict(self) -> dict[str, Any]:
        return {"exchanges": self._exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exchanges = state.get("exchanges", 0)


def _split(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of a flat in the shapes of these tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
