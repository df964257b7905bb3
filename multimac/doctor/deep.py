"""The checks of `doctor --deep`: a minute of real work on the accelerator, in processes and on audio."""

from __future__ import annotations

import functools

import torch

from whisper_tuner.config import Profile

from .audio import check_audio_formats
from .checks import Check, Finding, Tell
from .decoding import check_decoding
from .exchange import check_ranks, check_staging
from .gradients import (
    Parity,
    compare,
    compare_checkpointed,
    large_shapes,
    profile_shapes,
    small_whisper,
    wide_shapes,
    wide_whisper,
)


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
