"""Sums over ranks that travel in fewer bits than float32, at the same number of bytes a rank however many there are.

What rounding takes away this time is added the next time (error feedback: Seide et al. 2014; Karimireddy et al.,
1901.09847): so nothing is lost, it only comes later.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.strategy.quantize import BLOCK, as_float8, dequantized, from_float8, quantized

AT_ONCE = 256 * BLOCK  # values that are rounded together: their copies stay in a CPU's caches
LAST = "int16"
BITS = {"int4": 4, "int8": 8, "float8": 8, LAST: 16}
HEADER = 8  # bytes: two float32


class WireSum:
    """The sum of the ranks' flats [numel], with the same bits on all ranks.

    Each rank sums one part of the values in float32, from what all have rounded, rounds the sum, and hands it out. It
    sends 2 (N - 1) / N times a float's bytes in this format. The last sum of a run has 16 bits a value: what is left
    then is a 65,000th of the largest value among 1,024. float8 is for values that are not negative, see quantize.py.

    residual: what this rank has not sent yet [numel], None if there is nothing. Of the part that it sums, what rounding
    the sum took away is in it too.
    """

    def __init__(self, comm: Comm, wire: str):
        self.comm, self.wire = comm, wire
        self.residual: Tensor | None = None
        self._padded: Tensor | None = None
        self._new: Tensor | None = None  # the values of the next sum, then what of them has not been sent

    def flat(self, numel: int) -> Tensor:
        """Zeros [numel], to be filled with the values of the next sum."""
        ranks = self.comm.world_size
        self._padded = torch.zeros(ranks * -(-numel // (ranks * BLOCK)) * BLOCK)  # for each rank as many whole blocks
        self._new = self._padded[:numel]
        return self._new

    def sum(self, header: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Sums over the ranks: of what `flat` was filled with, float32 [numel]; and of `header`, float32 [2].

        `residual` stays as it is.
        """
        own, ranks, wire = self._new, self.comm.world_size, LAST if last else self.wire
        if self.residual is not None:
            own += self.residual
        if ranks == 1:
            self._new = None
            return own, header.clone()
        parts = self._padded.view(ranks, -1)
        sent = torch.empty(ranks, HEADER + _bytes(parts.shape[1], wire), dtype=torch.uint8)
        sent[:, :HEADER] = header.view(torch.uint8)
        for part, rounded in zip(parts, sent, strict=True):
            _round_off(part, rounded[HEADER:], wire)
        sent = self.comm.all_to_all(sent.view(-1)).view(ranks, -1)
        mine, headers = torch.zeros(parts.shape[1]), torch.zeros_like(header)
        for received in sent:
            headers += received[:HEADER].clone().view(torch.float32)
            _add(received[HEADER:], mine, wire)
        rounded = sent[0, HEADER:]
        _round_off(mine, rounded, wire)
        parts[self.comm.rank] += mine
        total = torch.zeros(parts.numel())
        for part, of_rank in zip(total.view(ranks, -1), self.comm.all_gather(rounded), strict=True):
            _add(of_rank, part, wire)
        return total[: own.numel()], headers

    def accept(self) -> None:
        """The last sum counts: what it did not send is the residual now."""
        self.residual, self._new, self._padded = self._new, None, None


def _bytes(count: int, wire: str) -> int:
    """Of so many values, whole blocks."""
    return 2 * count if wire == "bf16" else count // BLOCK * 4 + count * BITS[wire] // 8


def _round_off(values: Tensor, sent: Tensor, wire: str) -> None:
    """What travels of `values`, float32, whole blocks -> `sent`, uint8. They keep what does not."""
    for piece, place in _pieces(values, sent, wire):
        place.copy_(_rounded(piece, wire))
        piece.sub_(_as_floats(place, piece.numel(), wire))


def _rounded(values: Tensor, wire: str) -> Tensor:
    if wire == "bf16":
        return values.bfloat16().view(torch.uint8)
    return as_float8(values) if wire == "float8" else quantized(values, BITS[wire])


def _add(sent: Tensor, values: Tensor, wire: str) -> None:
    for piece, place in _pieces(values, sent, wire):
        piece.add_(_as_floats(place, piece.numel(), wire))


def _pieces(values: Tensor, sent: Tensor, wire: str) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(values.split(AT_ONCE), sent.split(_bytes(AT_ONCE, wire)), strict=True)


def _as_floats(sent: Tensor, count: int, wire: str) -> Tensor:
    if wire == "bf16":
        return sent.clone().view(torch.bfloat16).float()
    if wire == "float8":
        return from_float8(sent, count)
    return dequantized(sent, count, BITS[wire])
