"""The checks of `doctor --deep`: a minute of real work on the accelerator, in processes and on audio."""

from __future__ import annotations

import functools

import torch

from whisper_tuner.config import Profile

from .audio import check_audio_formats
from .checks import Check, Finding, Tell
from .gradients import Parity, Place, compare, large_shapes, on_device, profile_shapes, small_whisper
from .ranks import check_ranks
from .staging import check_staging


def deep_checks(profile: Profile | None, device: torch.device, tell: Tell, place: Place = on_device) -> list[Check]:
    """`place` brings a copy of a model to the device: tests put a fault there."""
    whisper = functools.cache(small_whisper)

    def parity(precision: str = "float32") -> Parity:
        return Parity(whisper(), device, precision=precision, place=place)

    def gradients() -> Finding:
        return compare(parity(), *profile_shapes(whisper(), profile, device), tell)

    def large_batch() -> Finding:
        return compare(parity(), large_shapes(whisper(), device), "batch sizes that change", tell, tidy=False)

    def bf16() -> Finding:
        shapes, source = profile_shapes(whisper(), profile, device)
        if device.type == "cpu":  # which computes bf16 many times slower than float32
            shapes = [shapes[1]]
        return compare(parity("bf16"), shapes, source, tell)

    checks = [Check("gradients", gradients), Check("large batch", large_batch)]
    if profile and profile.precision == "bf16":
        checks.append(Check("bf16", bf16))
    return [
        *checks,
        Check("staging", lambda: check_staging(device, tell, place)),
        Check("two ranks", lambda: check_ranks(device, tell)),
        Check("audio formats", lambda: check_audio_formats(tell)),
    ]
