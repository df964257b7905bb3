"""Copies between an accelerator and the flat CPU tensors that travel: they must not change a bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exogym import flat
from exogym.flat import FlatParameters
from whisper_tuner.text import size

from .checks import Finding, Tell, ok, problem
from .gradients import Place, on_device

REPEATS = 2
REMEDY = "Do not train on this device with this torch: set device = cpu in the profile. Send us this with --json."


class Holder(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.register_buffer("mean", torch.zeros(3))


def layouts(chunk: int) -> Sequence[Sequence[tuple[int, ...]]]:
    """Small tensors that travel together; one chunk and a little more; more than one; rows that make two chunks."""
    small = [(7,), (1,), (33, 65), (1000,)]
    return small, [(chunk - 1,), (5,)], [(chunk + 1,)], [(3,), (chunk // 4096 + 3, 4096)]


def check_staging(device: torch.device, tell: Tell, place: Place = on_device) -> Finding:
    """Writes, computes on the device and reads back at once: a copy that does not wait would read what was before."""
    chance = torch.Generator().manual_seed(0)
    copies = moved = 0
    for shapes in layouts(flat.CHUNK):
        model = place(Holder(shapes), device)
        parameters = FlatParameters(model)
        tell(f"{size(4 * parameters.numel)} in {len(shapes)} tensors")
        for _ in range(REPEATS):
            sent = torch.rand(parameters.numel, generator=chance) - 0.5
            kept = sent.clone()
            parameters.write(sent)
            first = parameters.read()
            with torch.no_grad():
                for tensor in (*parameters.parameters, *parameters.buffers):
                    tensor.mul_(2)  # exact in floating point
            second = parameters.read()
            copies, moved = copies + 3, moved + 12 * parameters.numel
            for what, expected, found in (("back", kept, first), ("after a computation", kept * 2, second)):
                if wrong := count_wrong(expected, found):
                    detail = f"{device}: {wrong:,} of {found.numel():,} values were not the same when read {what}"
                    return problem(detail, REMEDY, wrong=wrong, numel=found.numel())
    return ok(f"{device}: {copies} copies of {size(moved)} in all, bit for bit the same", copies=copies, bytes=moved)


def count_wrong(expected: Tensor, found: Tensor) -> int:
    return int((expected.view(torch.int32) != found.view(torch.int32)).sum())
