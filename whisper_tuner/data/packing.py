"""Short clips joined to windows of up to 30 s, as a model hears them in a recording."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from whisper_tuner.data.clip import Clip
from whisper_tuner.data.labels import Label, LabelEncoder

_DYNAMIC_RANGE = 2.0  # of a log-mel below its loudest value: 80 dB, after the extractor's (x + 4) / 4
FRAMES_PER_TIMESTAMP = 2


def packed(clips: Sequence[Clip], frames: int, encoder: LabelEncoder, chance: Random) -> list[Clip]:
    """The clips in windows of at most `frames` mel frames whose label the decoder has room for, in random order.

    Each clip, from the longest on, goes into the first window that has room for it (first-fit decreasing). Clips whose
    prompts differ, as in their language, are not joined.
    """
    windows: list[list[Clip]] = []
    for clip in sorted(clips, key=lambda clip: -clip.frames):
        fitting = (window for window in windows if _fits([*window, clip], frames, encoder.max_tokens))
        if (window := next(fitting, None)) is not None:
            window.append(clip)
        else:
            windows.append([clip])
    for window in windows:
        chance.shuffle(window)
    return [_joined(window, encoder) for window in windows]


def _fits(window: Sequence[Clip], frames: int, tokens: int) -> bool:
    first = window[0].label.prompt
    written = sum(len(clip.label.written) - 1 for clip in window) + 1
    return (
        sum(clip.frames for clip in window) <= frames
        and len(first) + written - 1 <= tokens
        and all(clip.label.prompt == first for clip in window)
    )


def _joined(window: Sequence[Clip], encoder: LabelEncoder) -> Clip:
    # What is so far below the loudest of a window is silence, as the extractor has it.
    floor = max(clip.log_mel.max() for clip in window) - _DYNAMIC_RANGE
    written, before = [], 0
    for clip in window:
        written += [_later(token, before, encoder) for token in clip.label.written[:-1]]
        before += clip.frames
    return Clip(
        ids=tuple(name for clip in window for name in clip.ids),
        log_mel=np.maximum(np.concatenate([clip.log_mel for clip in window], axis=1), np.float32(floor)),
        label=Label(window[0].label.prompt, (*written, encoder.end)),
    )


def _later(token: int, frames: int, encoder: LabelEncoder) -> int:
    """A timestamp of a clip that begins so many frames later; any other token as it is."""
    is_timestamp = encoder.first_timestamp is not None and token >= encoder.first_timestamp
    return token + frames // FRAMES_PER_TIMESTAMP if is_timestamp else token
