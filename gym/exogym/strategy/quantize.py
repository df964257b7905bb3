"""Floats as integers or floats of few bits, with a scale for every BLOCK of them."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # values that share a scale: it adds 4 bytes to each 512 or more


def quantized(values: Tensor, bits: int) -> Tensor:
    """float32 [n] -> uint8: the scales, then the integers. bits: 4, 8 or 16."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = _highest(blocks) / (2 ** (bits - 1) - 1)
    whole = torch.mul(blocks, _inverse(scales)).round_().view(-1)[: values.numel()]
    return torch.cat([scales.view(-1).view(torch.uint8), _packed(whole, bits)])


def dequantized(sent: Tensor, count: int, bits: int) -> Tensor:
    """The reverse, float32 [count]. One operation at a time, so that it gives the same bits on every CPU."""
    blocks = -(-count // BLOCK)
    scales = sent[: 4 * blocks].clone().view(torch.float32)
    return _scaled(_unpacked(sent[4 * blocks :].clone(), count, bits).float(), scales)


def _highest(blocks: Tensor) -> Tensor:
    """The largest magnitude of each [blocks, BLOCK] -> [blocks, 1]."""
    return blocks.abs().amax(1, keepdim=True)


def _inverse(scales: Tensor) -> Tensor:
    """0 for scales so small that they have lost digits: nothing is sent of such a block. They become 0, too."""
    scales.masked_fill_(scales < torch.finfo(scales.dtype).tiny, 0.0)
    return torch.where(scales > 0, 1 / scales, 0.0)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """`values` [n], in place, by the scales of their blocks; the last one may be shorter."""
    whole = values.numel() // BLOCK
    values[: whole * BLOCK].view(-1, BLOCK).mul_(scales[:whole, None])
    values[whole * BLOCK :].mul_(scales[whole:])
    return values


# Floats of 8 bits with 2 for the fraction: what is sent of values that are not negative, from the largest of a block
# down to a 2^31st of it. Smaller ones arrive as that: none as 0, by whose root somebody may divide.
LARGEST, SMALLEST = 2.0**15, 2.0**-16


def as_float8(values: Tensor) -> Tensor:
    """float32 [n], whole blocks, none below 0 -> uint8: the scales, then the values."""
    blocks = values.view(-1, BLOCK)
    scales = _highest(blocks) / LARGEST
    scaled = torch.mul(blocks, _inverse(scales)).clamp_(SMALLEST, LARGEST)
    return torch.cat([scales.view(-1).view(torch.uint8), scaled.to(torch.float8_e5m2).view(torch.uint8).view(-1)])


def from_float8(sent: Tensor, count: int) -> Tensor:
    """The reverse, float32 [count]."""
    scales = sent[: 4 * count // BLOCK].clone().view(torch.float32)
    return _scaled(sent[4 * count // BLOCK :].view(torch.float8_e5m2).float(), scales)


def _packed(whole: Tensor, bits: int) -> Tensor:
    if bits == 16:
        return whole.to(torch.int16).view(torch.uint8)
    if bits == 8:
        return whole.to(torch.int8).view(torch.uint8)
    nibbles = torch.nn.functional.pad(whole.to(torch.int16) + 8, (0, whole.numel() % 2)).to(torch.uint8)
    return nibbles[0::2] | nibbles[1::2] << 4


def _unpacked(packed: Tensor, count: int, bits: int) -> Tensor:
    if bits == 16:
        return packed.view(torch.int16)
    if bits == 8:
        return packed.view(torch.int8)
    nibbles = torch.stack([packed & 15, packed >> 4], 1).reshape(-1)[:count]
    return nibbles.to(torch.int16) - 8
