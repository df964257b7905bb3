"""Floats as integers or floats of few bits, with a scale for every BLOCK of them."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # values that share a scale: it adds 4 bytes to each 512 or more


def quantized(values: Tensor, bits: int) -> Tensor:
    """Return float32 [n] as uint8: the scales, then the integers. bits: 4, 8 or 16."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = _scales(blocks.abs(), bits)
    whole = torch.mul(blocks, scales.reciprocal()).round_().view(-1)[: values.numel()]
    return torch.cat([scales.view(-1).view(torch.uint8), _packed(whole, bits)])


def dequantized(sent: Tensor, count: int, bits: int) -> Tensor:
    """Return float32 [count], as `quantized` had it; one operation at a time, so with the same bits on every CPU."""
    blocks = -(-count // BLOCK)
    scales = sent[: 4 * blocks].clone().view(torch.float32)
    return _scaled(_unpacked(sent[4 * blocks :], count, bits).float(), scales)


def _scales(magnitudes: Tensor, bits: int) -> Tensor:
    """Return the scales [n, 1] of blocks [n, BLOCK], none so small that it has lost digits."""
    return magnitudes.amax(1, keepdim=True).div_(2 ** (bits - 1) - 1).clamp_(min=torch.finfo(torch.float32).tiny)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scales; 0 for those so small that they have lost digits, which become 0: their block is not sent."""
    scales.masked_fill_(scales < torch.finfo(scales.dtype).tiny, 0.0)
    return torch.where(scales > 0, 1 / scales, 0.0)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply `values` [n], in place, by the scales of their blocks; the last block may be shorter."""
    whole = values.numel() // BLOCK
    values[: whole * BLOCK].view(-1, BLOCK).mul_(scales[:whole, None])
    values[whole * BLOCK :].mul_(scales[whole:])
    return values


def put_integers(values: Tensor, sent: Tensor, bits: int, spare: Tensor) -> None:
    """Write float32 [n], whole blocks, into `sent`, as `quantized` gives it; `spare` [n] becomes what arrives."""
    blocks, whole = values.view(-1, BLOCK), spare.view(-1, BLOCK)
    scales = _scales(torch.abs(blocks, out=whole), bits)
    torch.mul(blocks, scales.reciprocal(), out=whole).round_()
    _put(scales, _packed(spare, bits), sent)
    whole.mul_(scales)


def get_integers(sent: Tensor, values: Tensor, bits: int) -> None:
    """Read `values` from what put_integers wrote."""
    scales, packed = _parts(sent, values)
    values.copy_(_unpacked(packed, values.numel(), bits))
    values.view(-1, BLOCK).mul_(scales)


# Floats of 8 bits with 2 for the fraction: what is sent of values that are not negative, from the largest of a block
# down to a 2^31st of it. Smaller ones arrive as that: none as 0, by whose root somebody may divide.
LARGEST, SMALLEST = 2.0**15, 2.0**-16


def put_float8(values: Tensor, sent: Tensor, spare: Tensor) -> None:
    """Write float32 [n], whole blocks, none below 0, into `sent`, uint8: scales, then values. spare: float32 [n]."""
    blocks, scaled = values.view(-1, BLOCK), spare.view(-1, BLOCK)
    scales = blocks.amax(1, keepdim=True).div_(LARGEST)
    torch.mul(blocks, _inverse(scales), out=scaled).clamp_(SMALLEST, LARGEST)
    _put(scales, spare.to(torch.float8_e5m2).view(torch.uint8), sent)


def get_float8(sent: Tensor, values: Tensor) -> None:
    """Read `values` from what put_float8 wrote."""
    scales, packed = _parts(sent, values)
    values.copy_(packed.view(torch.float8_e5m2))
    values.view(-1, BLOCK).mul_(scales)


def _put(scales: Tensor, packed: Tensor, sent: Tensor) -> None:
    at = 4 * scales.numel()
    sent[:at].copy_(scales.view(-1).view(torch.uint8))
    sent[at:].copy_(packed)


def _parts(sent: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of `values`, float32 [blocks, 1], and what stands behind them in `sent`."""
    at = 4 * values.numel() // BLOCK
    return sent[:at].clone().view(torch.float32).view(-1, 1), sent[at:]


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
