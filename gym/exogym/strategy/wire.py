"""Sums over ranks that travel in fewer bits than float32, at the same number of bytes a rank however many there are.

What rounding takes away this time is added the next time (error feedback: Seide et al. 2014; Karimireddy et al.,
1901.09847): so nothing is lost, it only comes later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.strategy.quantize import BLOCK, get_float8, get_integers, put_float8, put_integers

AT_ONCE = 128 * BLOCK  # values that travel together, on all ranks alike: their copies stay in a CPU's caches
LAST = "int16"
INTEGERS = {"int4": 4, "int8": 8, LAST: 16}
BITS = INTEGERS | {"float8": 8}
HEADER = 8  # bytes: two float32


class WireSum:
    """Ranks add up their flats [numel], and have the same bits of the sum.

    Each rank sums one part of the values in float32, from what all have rounded, rounds the sum, and hands it out. It
    sends 2 (N - 1) / N times a float's bytes in this format. The last sum of a run has 16 bits a value: what is left
    then is a 65,000th of the largest value among 1,024. float8 is for values that are not negative, see quantize.py.

    residual: what this rank has not sent yet [numel], None if there is nothing. Of the part that it sums, what rounding
    the sum took away is in it too.
    """

    def __init__(self, comm: Comm, wire: str, *, feeds_back: bool = True):
        """Make a sum over the ranks of `comm`. feeds_back: what rounding takes away is added the next time."""
        self.comm, self.wire, self._feeds_back = comm, wire, feeds_back
        self.residual: Tensor | None = None
        self._padded: Tensor | None = None
        self._new: Tensor | None = None  # the values of the next sum, then what of them has not been sent
        self._total: Tensor | None = None  # that the last sum gave
        self._held: Tensor | None = None  # what the residual is a part of
        self._spare: list[Tensor] = []  # room for the next sums: fresh memory costs about as much as what is done in it

    def flat(self, numel: int) -> Tensor:
        """Return float32 [numel], to be filled with the values of the next sum."""
        ranks = self.comm.world_size
        self._padded = self._room(ranks * -(-numel // (ranks * BLOCK)) * BLOCK)  # for each rank as many whole blocks
        self._padded[numel:] = 0.0
        self._new, self._total = self._padded[:numel], None
        return self._new

    def _room(self, numel: int) -> Tensor:
        """Return float32 [numel], the room of an earlier sum where there is one of this size."""
        fits = [spare for spare in self._spare if spare.numel() == numel]
        self._spare = fits[1:]
        return fits[0] if fits else torch.empty(numel)

    def sum(self, header: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Return the sums over the ranks of what `flat` was filled with, float32 [numel], and of `header`, float32 [2].

        `residual` stays as it is. After `accept` the first of them is room for the next ones.
        """
        own, ranks, wire = self._new, self.comm.world_size, LAST if last else self.wire
        if ranks == 1:
            self._new = None
            if self.residual is not None:
                own += self.residual
            return own, header.clone()
        parts = self._padded.view(ranks, -1)
        sent = torch.empty(ranks, HEADER + _bytes(parts.shape[1], wire), dtype=torch.uint8)
        sent[:, :HEADER] = header.view(torch.uint8)
        unsent = torch.empty(0) if self.residual is None else self.residual
        for rank, (part, rounded) in enumerate(zip(parts, sent, strict=True)):
            of_part = unsent[rank * part.numel() :][: part.numel()]
            _round_off(part, of_part, rounded[HEADER:], wire, self._feeds_back)
        came = self.comm.all_to_all(sent.view(-1)).view(ranks, -1)
        headers = came[:, :HEADER].clone().view(torch.float32)
        rounded = sent[0, HEADER:]
        _round_off_sum(came[:, HEADER:], parts[self.comm.rank], rounded, wire, self._feeds_back)
        self._total = total = self._room(parts.numel())
        for part, of_rank in zip(total.view(ranks, -1), self.comm.all_gather(rounded), strict=True):
            for piece, place in _pieces(part, of_rank, wire):
                _get(place, piece, wire)
        return total[: own.numel()], functools.reduce(torch.add, headers)

    def accept(self) -> None:
        """Note that the last sum counts, and is used up: what it did not send is the residual now."""
        free = [self._total, self._padded]
        if self._feeds_back:
            free[1], self._held, self.residual = self._held, self._padded, self._new
        self._spare += [room for room in free if room is not None]
        self._new = self._padded = self._total = None


def _bytes(count: int, wire: str) -> int:
    """Return the bytes of so many values, whole blocks."""
    return 2 * count if wire == "bf16" else count // BLOCK * 4 + count * BITS[wire] // 8


def _round_off(values: Tensor, unsent: Tensor, sent: Tensor, wire: str, feeds_back: bool) -> None:
    """Write into `sent`, uint8, what is sent of `values`, float32, whole blocks.

    `unsent`, what was left of the first of them earlier, is added before. With feeds_back they keep what is not sent.
    """
    spare, at = torch.empty(min(AT_ONCE, values.numel())), 0
    for piece, place in _pieces(values, sent, wire):
        earlier = unsent[at : at + piece.numel()]
        piece[: earlier.numel()].add_(earlier)
        _put(piece, place, wire, spare[: piece.numel()], feeds_back)
        at += piece.numel()


def _round_off_sum(came: Tensor, left: Tensor, sent: Tensor, wire: str, feeds_back: bool) -> None:
    """Write into `sent` the sum of what came of each rank, uint8 [N, bytes]; with feeds_back add the rest to `left`."""
    sums, spares = torch.empty(2, min(AT_ONCE, left.numel()))
    first, *others = (of_rank.split(_bytes(AT_ONCE, wire)) for of_rank in came)
    for number, (piece, place) in enumerate(_pieces(left, sent, wire)):
        total, spare = sums[: piece.numel()], spares[: piece.numel()]
        _get(first[number], total, wire)
        for other in others:
            _get(other[number], spare, wire)
            total.add_(spare)
        _put(total, place, wire, spare, feeds_back)
        if feeds_back:
            piece.add_(total)


def _put(values: Tensor, sent: Tensor, wire: str, spare: Tensor, feeds_back: bool) -> None:
    """Write what is sent of `values` into `sent`; with feeds_back they keep the rest. spare: room for as many."""
    if wire == "bf16":
        sent.copy_(values.bfloat16().view(torch.uint8))
    elif wire == "float8":
        put_float8(values, sent, spare)
    else:
        put_integers(values, sent, BITS[wire], spare)
    if feeds_back:
        if wire not in INTEGERS:  # of those it is there already
            _get(sent, spare, wire)
        values.sub_(spare)


def _get(sent: Tensor, values: Tensor, wire: str) -> None:
    """Read `values` from what `_put` wrote."""
    if wire == "bf16":
        values.copy_(sent.view(torch.bfloat16))
    elif wire == "float8":
        get_float8(sent, values)
    else:
        get_integers(sent, values, BITS[wire])


def _pieces(values: Tensor, sent: Tensor, wire: str) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(values.split(AT_ONCE), sent.split(_bytes(AT_ONCE, wire)), strict=True)
