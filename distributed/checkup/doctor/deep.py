"""The checks of `doctor --deep`: a minute of real work on the accelerator, in processes and on audio.

What ranks exchange is checked here: copies between an accelerator and the flat CPU tensors that are sent, and two ranks
over gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distributed.checkup.findings import Check, Finding, Tell, ok, problem
from exogym import flat
from exogym.flat import FlatParameters, digest
from exogym.strategy import AllReduceStrategy
from exogym.trainer import LocalTrainer
from whisper_tuner.config import Profile
from whisper_tuner.text import size

from .audio import check_audio_formats
from .decoding import check_decoding
from .gradients import (
    DO_NOT_TRAIN,
    Parity,
    compare,
    compare_checkpointed,
    large_shapes,
    profile_shapes,
    small_whisper,
    wide_shapes,
    wide_whisper,
)

REPEATS = 2
SAMPLES, RANKS, STEPS = 24, 2, 5
LIMIT = 1e-3  # of the weights, relative: an accelerator and the CPU round differently
QUIT_VPN = "Quit VPN and firewall programs, and try again. If this persists, please send us the --json report."


def deep_checks(profile: Profile | None, device: torch.device, tell: Tell) -> list[Check]:
    whisper = functools.cache(small_whisper)

    def gradients() -> Finding:
        return compare(Parity(whisper(), device), *profile_shapes(whisper(), profile, device), tell)

    def large_batch() -> Finding:
        shapes = large_shapes(whisper(), device)
        return compare(Parity(whisper(), device), shapes, "batch sizes that change", tell, tidy=False)

    def vocabulary() -> Finding:
        wide = wide_whisper()
        return compare(Parity(wide, device), wide_shapes(wide), "51,866 tokens", tell, tidy=False)

    def bf16() -> Finding:
        shapes, source = profile_shapes(whisper(), profile, device)
        if device.type == "cpu":  # which computes bf16 many times slower than float32
            shapes = [shapes[1]]
        return compare(Parity(whisper(), device, "bf16"), shapes, source, tell)

    return [
        Check("gradients", gradients),
        Check("large batch", large_batch),
        Check("vocabulary", vocabulary),
        *([Check("bf16", bf16)] if profile and profile.precision == "bf16" else []),
        Check("checkpointing", lambda: compare_checkpointed(device, tell)),
        Check("decoding", lambda: check_decoding(device, tell)),
        Check("staging", lambda: check_staging(device, tell)),
        Check("two ranks", lambda: check_ranks(device, tell)),
        Check("audio formats", lambda: check_audio_formats(tell)),
    ]


class Holder(nn.Module):
    """Holds parameters of these shapes, and a buffer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.register_buffer("mean", torch.zeros(3))


def layouts(chunk: int) -> Sequence[Sequence[tuple[int, ...]]]:
    """Return shapes of small tensors sent together, of one chunk and a little more, of more, of rows in two chunks."""
    small = [(7,), (1,), (33, 65), (1000,)]
    return small, [(chunk - 1,), (5,)], [(chunk + 1,)], [(3,), (chunk // 4096 + 3, 4096)]


def check_staging(device: torch.device, tell: Tell) -> Finding:
    """Write, compute on the device and read back at once: a copy that does not wait would read what was before."""
    chance = torch.Generator().manual_seed(0)
    copies = moved = 0
    for shapes in layouts(flat.CHUNK):
        parameters = FlatParameters(Holder(shapes).to(device))
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
                if wrong := int((expected.view(torch.int32) != found.view(torch.int32)).sum()):
                    detail = f"{device}: {wrong:,} of {found.numel():,} values were not the same when read {what}"
                    return problem(detail, DO_NOT_TRAIN, wrong=wrong, numel=found.numel())
    return ok(f"{device}: {copies} copies of {size(moved)} in all, bit for bit the same", copies=copies, bytes=moved)


class Regression(nn.Module):
    """Computes a mean loss on (inputs [B, 8], targets [B, 1])."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.layers(inputs) - targets).square().mean()


def check_ranks(device: torch.device, tell: Tell) -> Finding:
    """Train two ranks with half of the samples each: they must come to what one on the CPU does with all of them."""
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    pair, alone = LocalTrainer(Regression(), data), LocalTrainer(Regression(), data)
    settings = {"strategy": AllReduceStrategy(lr=1e-2), "max_steps": STEPS, "seed": 3, "timeout": 120.0}
    tell("starting two processes")
    found = FlatParameters(
        pair.fit(num_nodes=RANKS, batch_size=SAMPLES // RANKS, device=device.type, **settings)
    ).read()
    if digest(found) != pair.result.digest:
        return problem(f"{device}: rank 0 returned other weights than the ranks agreed on", QUIT_VPN)
    tell("the same with one")
    expected = FlatParameters(alone.fit(num_nodes=1, batch_size=SAMPLES, device="cpu", **settings)).read()
    off = float((found - expected).norm() / expected.norm())
    moved = float((expected - FlatParameters(Regression()).read()).norm())
    figures = {"steps": pair.result.steps, "bytes": pair.result.bytes_sent, "off": off, "moved": moved}
    if not off <= LIMIT:
        return problem(f"{device}: the weights of two ranks are {off:.1e} off those of one", QUIT_VPN, **figures)
    detail = f"{RANKS} processes on {device}, {STEPS} AllReduce steps over gloo: digests agree"
    return ok(f"{detail}, and one process on the CPU comes to the same ({off:.0e} off)", **figures)
