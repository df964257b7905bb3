"""Clips with timestamps -> windows of several, as a long recording has.

Whisper decodes a long recording in windows of 30 s, and the model says when each sentence in them begins and ends. One
that has only learnt from clips of a sentence or two stops after the first. So the clips of a step that is trained with
timestamps are joined, in an order by chance. The log-mel of what is joined is that of its joined audio, but for the
frames at the seams.

Between them are pauses, of the quietest frames of the clip before: without any a model learns that each sentence begins
where the one before it ends (whisper-tiny.en on French then was 0.4 s early in every other sentence of a recording).

Most windows of a recording end amid a sentence: then the model writes when that one begins, and decoding goes on from
there; where it does not, the rest of the window is taken for silence and left out. So most windows get the beginning of
one more clip, of which only that time is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np

from whisper_tuner.data.features import relative_to_loudest
from whisper_tuner.data.labels import Label, LabelEncoder
from whisper_tuner.languages import joined
from whisper_tuner.timed_text import Said

PAUSE_S = 1.0  # the longest between two clips
QUIET = 0.1  # of a clip's frames: what a pause after it is made of


@dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """Samples that the model hears at once: log_mel float32 [80|128, frames], its label, and their ids.

    timed: its text in parts, if it is trained with timestamps. previous: the text before it, if it is trained with it.
    way: its language and task, where these are not the profile's. pause: frames between the clip before it in a window
    and this one.
    """

    ids: tuple[str, ...]
    log_mel: np.ndarray
    label: Label
    timed: tuple[Said, ...] = ()
    way: tuple[str, str] = ("", "")
    previous: str = ""
    pause: int = 0

    @property
    def frames(self) -> int:
        return self.log_mel.shape[1]

    def cut(self, share: float) -> Clip:
        """Return this share of its first sentence, cut by the end of a window: it counts for no sample, and only the
        time at which it begins is learnt.
        """
        first = self.timed[0]
        frames = max(1, round(share * self.frames * first.end / self.timed[-1].end))
        return replace(self, ids=(), log_mel=self.log_mel[:, :frames], timed=(Said(first.start, first.start, ""),))


@dataclass(frozen=True, kw_only=True)
class Window:
    """The most that is joined: `frames` of log-mel, of which a second has `frames_per_s`.

    Labels have at most half the decoder's positions, which is what decoding writes of a window.
    """

    frames: int
    frames_per_s: float
    labels: LabelEncoder
    longest_pause_s: float = PAUSE_S

    def of(self, clips: Sequence[Clip], chance: Random, last: Clip | None = None) -> list[Clip]:
        """Return the clips without timestamps, and windows of those with some. Raises DataError.

        last: a cut clip, with which the last window ends if there is room.
        """
        timed = [clip for clip in clips if clip.timed]
        windows: list[list[Clip]] = []
        for unpaused in chance.sample(timed, len(timed)):
            clip = self._paused(unpaused, chance)
            room = next((window for window in windows if self._holds([*window, clip])), None)
            if room is None:
                windows.append([clip])
            else:
                room.append(clip)
        if windows and last and self._holds([*windows[-1], last := self._paused(last, chance)]):
            windows[-1].append(last)
        joined_clips = [self._joined(window, chance) if len(window) > 1 else window[0] for window in windows]
        return [clip for clip in clips if not clip.timed] + joined_clips

    def _paused(self, clip: Clip, chance: Random) -> Clip:
        return replace(clip, pause=round(chance.uniform(0.0, self.longest_pause_s) * self.frames_per_s))

    def _holds(self, clips: Sequence[Clip]) -> bool:
        tokens = sum(len(clip.label.written) for clip in clips)
        frames = sum(clip.frames + clip.pause for clip in clips) - clips[0].pause
        return len({clip.way for clip in clips}) == 1 and frames <= self.frames and tokens <= self.most_tokens

    @property
    def most_tokens(self) -> int:
        return self.labels.max_tokens // 2

    def _joined(self, clips: Sequence[Clip], chance: Random) -> Clip:
        pieces, starts = [clips[0].log_mel], [0.0]
        for before, clip in pairwise(clips):
            pieces += [_pause_after(before.log_mel, clip.pause, chance)] if clip.pause else []
            starts.append(sum(piece.shape[1] for piece in pieces) / self.frames_per_s)
            pieces.append(clip.log_mel)
        timed = [
            Said(start + part.start, start + part.end, part.text)
            for start, clip in zip(starts, clips, strict=True)
            for part in clip.timed
            if part.text or not clip.ids
        ]
        (language, task), previous = clips[0].way, clips[0].previous
        text = joined((part.text for part in timed), language or self.labels.language)
        return Clip(
            ids=tuple(name for clip in clips for name in clip.ids),
            log_mel=relative_to_loudest(np.concatenate(pieces, axis=1)),
            label=self.labels.encode(text, language=language, task=task, timed=timed, previous=previous),
        )


def _pause_after(log_mel: np.ndarray, frames: int, chance: Random) -> np.ndarray:
    """Return so many frames of the room that a clip was recorded in: of its quietest ones, in an order by chance."""
    quiet = np.argsort(log_mel.mean(axis=0))[: max(1, round(QUIET * log_mel.shape[1]))]
    return log_mel[:, chance.choices(quiet.tolist(), k=frames)]
