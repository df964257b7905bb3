"""Sums over ranks, and floats in fewer bits for them: integers or floats, with a scale for every BLOCK of them.

What rounding takes away this time is added the next time (error feedback: Seide et al. 2014; Karimireddy et al.,
1901.09847): so nothing is lost, it only comes later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.strategy.communication_module import Payload

BLOCK = 1024  # values that share a scale: it adds 4 bytes to each 512 or more
AT_ONCE = 128 * BLOCK  # values that travel together, on all ranks alike: their copies stay in a CPU's caches
LAST = "int16"
INTEGERS = {"int4": 4, "int8": 8, LAST: 16}
BITS = INTEGERS | {"float8": 8}
HEADER = 8  # bytes: two float32
# Floats of 8 bits with 2 for the fraction: what is sent of values that are not negative, from the largest of a block
# down to a 2^31st of it. Smaller ones arrive as that: none as 0, by whose root somebody may divide.
LARGEST, SMALLEST = 2.0**15, 2.0**-16


class FloatSum:
    """Ranks add up their flats [numel] in float32, as one collective of theirs does it."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self._sent = Payload(comm)

    def flat(self, numel: int) -> Tensor:
        """Return float32 [numel], to be filled with the values of the next sum."""
        self._payload = self._sent.flat(numel + 2)
        return self._payload[:-2]

    def sum(self, header: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Return the sums over the ranks of what `flat` was filled with, [numel], and of `header`, float32 [2]."""
        self._payload[-2:].copy_(header)
        self.comm.all_reduce_(self._payload)
        return self._payload[:-2], self._payload[-2:]

    def accept(self) -> None:
        """Let go of the last sum's memory; nothing was left out."""
        self._payload = torch.empty(0)
        self._sent.clear()


class WireSum:
    """Ranks add up their flats [numel], and have the same bits of the sum.

    Each rank sums one part of the values in float32, from what all have rounded, rounds the sum, and hands it out. It
    sends 2 (N - 1) / N times a float's bytes in this format. The last sum of a run has 16 bits a value: what is left
    then is a 65,000th of the largest value among 1,024. float8 is for values that are not negative.

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
        assert own is not None and self._padded is not None, "flat() comes first"
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
    """Write what is sent of `values`, whole blocks, into `sent`: scales, then the values in few bits.

    With feeds_back they keep the rest. spare: room for as many.
    """
    if wire == "bf16":
        sent.copy_(values.bfloat16().view(torch.uint8))
    else:
        blocks, scaled = values.view(-1, BLOCK), spare.view(-1, BLOCK)
        if wire == "float8":
            scales = blocks.amax(1, keepdim=True).div_(LARGEST)
            # One so small that it has lost digits is 0: its block is not sent.
            scales.masked_fill_(scales < torch.finfo(scales.dtype).tiny, 0.0)
            torch.mul(blocks, torch.where(scales > 0, 1 / scales, 0.0), out=scaled).clamp_(SMALLEST, LARGEST)
            packed = spare.to(torch.float8_e5m2).view(torch.uint8)
        else:
            scales = _scales(torch.abs(blocks, out=scaled), BITS[wire])
            torch.mul(blocks, scales.reciprocal(), out=scaled).round_()
            packed = _packed(spare, BITS[wire])
            scaled.mul_(scales)  # what arrives
        at = 4 * len(blocks)
        sent[:at].copy_(scales.view(-1).view(torch.uint8))
        sent[at:].copy_(packed)
    if feeds_back:
        if wire not in INTEGERS:  # of those it is there already
            _get(sent, spare, wire)
        values.sub_(spare)


def _get(sent: Tensor, values: Tensor, wire: str) -> None:
    """Read `values` from what `_put` wrote."""
    if wire == "bf16":
        values.copy_(sent.view(torch.bfloat16))
        return
    at = 4 * values.numel() // BLOCK
    scales, packed = sent[:at].clone().view(torch.float32).view(-1, 1), sent[at:]
    if wire == "float8":
        values.copy_(packed.view(torch.float8_e5m2))
    else:
        values.copy_(_unpacked(packed, values.numel(), BITS[wire]))
    values.view(-1, BLOCK).mul_(scales)


def _pieces(values: Tensor, sent: Tensor, wire: str) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(values.split(AT_ONCE), sent.split(_bytes(AT_ONCE, wire)), strict=True)


# Any number of values, as integers.


def quantized(values: Tensor, bits: int) -> Tensor:
    """Return float32 [n] as uint8: the scales, then the integers. bits: 4, 8 or 16."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = _scales(blocks.abs(), bits)
    whole = torch.mul(blocks, scales.reciprocal()).round_().view(-1)[: values.numel()]
    return torch.cat([scales.view(-1).view(torch.uint8), _packed(whole, bits)])


def dequantized(sent: Tensor, count: int, bits: int) -> Tensor:
    """Return float32 [count], as `quantized` had it; one operation at a time, so with the same bits on every CPU."""
    blocks, whole = -(-count // BLOCK), count // BLOCK
    scales = sent[: 4 * blocks].clone().view(torch.float32)
    values = _unpacked(sent[4 * blocks :], count, bits).float()
    values[: whole * BLOCK].view(-1, BLOCK).mul_(scales[:whole, None])
    values[whole * BLOCK :].mul_(scales[whole:])  # the last block may be shorter
    return values


def _scales(magnitudes: Tensor, bits: int) -> Tensor:
    """Return the scales [n, 1] of blocks [n, BLOCK], none so small that it has lost digits."""
    return magnitudes.amax(1, keepdim=True).div_(2 ** (bits - 1) - 1).clamp_(min=torch.finfo(torch.float32).tiny)


def _packed(whole: Tensor, bits: int) -> Tensor:
    if bits == 16:
        return whole.to(torch.int16).view(torch.uint8)
    if bits == 8:
        return whole.to(torch.int8).view(torch.uint8)
    # The first half in the low bits, the second in the high ones; each is 8 more than it stands for.
    low, high = torch.nn.functional.pad(whole, (0, whole.numel() % 2)).view(2, -1)
    return torch.mul(high, 16).add_(low).add_(16 * 8 + 8).to(torch.uint8)


def _unpacked(packed: Tensor, count: int, bits: int) -> Tensor:
    if bits == 16:
        return packed.clone().view(torch.int16)
    if bits == 8:
        return packed.view(torch.int8)
    return torch.cat([packed & 15, packed >> 4])[:count].view(torch.int8).sub_(8)
