"""What of a clip changes from epoch to epoch: its speed, masks over its log-mel, timestamps, and a previous text.

Everything is drawn from the seed, the epoch and the clip's id alone, so that a clip is the same on whatever host trains
it, in whatever batch, and after a resume. Only timestamps are drawn for a whole step, by the id of its first clip, as
its clips are then joined (see windows.py). No other random generator is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np

from whisper_tuner.config import Profile
from whisper_tuner.data.audio import SAMPLE_RATE
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.labels import LabelEncoder
from whisper_tuner.timed_text import Said, said_in

CUT = 0.75  # of the windows of a recording end amid a sentence
HEARD = (0.2, 0.8)  # of the sentence
NO_SPEECH, NO_SPEECH_S = 0.25, (2.0, 30.0)  # of the steps with timestamps; seconds of noise
PARTS = 4  # a mask is at most one of so many parts of a clip, so that the shortest is not masked whole


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Settings of a profile by their names there; by default nothing changes.

    longest_s: of all clips; none is slowed down beyond it, since memory is measured with it. most_parts: of a clip's
    timed text. previous: by id, what is said before a clip.
    """

    seed: int = 0
    speed_perturbation: float = 0.0
    timestamps_share: float = 0.0
    previous_text_share: float = 0.0
    mask_time_prob: float = 0.0
    mask_time_length: int = 10
    mask_feature_prob: float = 0.0
    mask_feature_length: int = 10
    longest_s: float = 0.0
    most_parts: int = 1
    previous: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def off(self) -> set[str]:
        """Return the names of the settings that change nothing, as the length of masks that there are none of."""
        return {key for key in PROFILE_KEYS if not getattr(self, key.replace("_length", "_prob"))}

    @property
    def speeds(self) -> tuple[float, ...]:
        change = self.speed_perturbation
        return (round(1 - change, 6), 1.0, round(1 + change, 6)) if change else (1.0,)

    def speed(self, sample: Sample, epoch: int) -> float:
        """Return the speed at which the clip is played: it lasts duration_s / speed."""
        if not self.speed_perturbation:
            return 1.0
        speed = self._chance("speed", sample, epoch).choice(self.speeds)
        return 1.0 if speed < 1 and sample.duration_s / speed > self.longest_s else speed

    def has_timestamps(self, first: Sample, epoch: int) -> bool:
        """Tell if the step that begins with `first` is trained with timestamps."""
        return self._chance("timestamps", first, epoch).random() < self.timestamps_share

    def timed(self, sample: Sample, epoch: int, first: Sample) -> tuple[Said, ...]:
        """Return the clip's text in its parts, if its step, which begins with `first`, is trained with timestamps."""
        if not self.has_timestamps(first, epoch):
            return ()
        speed, whole = self.speed(sample, epoch), Said(0.0, sample.duration_s, sample.text)
        parts = said_in(sample.timed_text) if sample.timed_text else (whole,)
        return tuple(Said(part.start / speed, part.end / speed, part.text) for part in parts)

    def previous_text(self, sample: Sample, epoch: int) -> str:
        """Return what was said before the clip, if it is trained with that in this epoch."""
        has_previous = self._chance("previous text", sample, epoch).random() < self.previous_text_share
        return self.previous.get(sample.id, "") if has_previous else ""

    def order(self, epoch: int, first: Sample) -> Random:
        """Return the chance by which the clips of a step are joined."""
        return self._chance("windows", first, epoch)

    def cut(self, samples: Sequence[Sample], epoch: int, step: Sequence[Sample]) -> tuple[Sample, float] | None:
        """Return which clip the end of a step's window cuts, and the share of it that is heard; None if it cuts none.

        A chance on `samples`, not on what is left of an epoch, so that it is the same after a resume.
        """
        if not self.has_timestamps(step[0], epoch):
            return None
        chance = self._chance("cut", step[0], epoch)
        sample, share = chance.choice(samples), chance.uniform(*HEARD)
        fits = sample.text and sample.way == step[0].way and sample not in step
        return (sample, share) if fits and chance.random() < CUT else None

    def noise(self, first: Sample, epoch: int) -> np.ndarray | None:
        """Return a waveform from white to brown noise for some of the steps with timestamps; None for the others.

        A model that hears speech in all windows of its training writes words whatever it hears.
        """
        chance = self._chance("noise", first, epoch)
        if chance.random() >= NO_SPEECH:
            return None
        samples = round(chance.uniform(*NO_SPEECH_S) * SAMPLE_RATE)
        spectrum = np.fft.rfft(np.random.default_rng(chance.getrandbits(64)).standard_normal(samples))
        spectrum[1:] /= np.arange(1, len(spectrum)) ** chance.uniform(0.0, 1.0)
        waveform = np.fft.irfft(spectrum, samples)
        return (10 ** chance.uniform(-4.0, -1.0) * waveform / np.abs(waveform).max()).astype(np.float32)

    def longest_label(self, tokens: int, encoder: LabelEncoder) -> int:
        """The most that a label without timestamps and previous text may come to, of so many tokens."""
        if self.timestamps_share:
            # Two timestamps a part, and no <|notimestamps|>; a token may be two where a text without spaces is divided.
            tokens += 3 * self.most_parts - 2
        if self.previous_text_share:
            tokens += min(tokens, encoder.max_tokens // 2)  # another text, without this one's prompt
        return min(tokens, encoder.max_tokens)

    def masked(self, log_mel: np.ndarray, sample: Sample, epoch: int) -> np.ndarray:
        """SpecAugment (1904.08779) without time warping: log_mel [80|128, frames] with its mean in the masks."""
        if not self.mask_time_prob and not self.mask_feature_prob:
            return log_mel
        chance = self._chance("masks", sample, epoch)
        bins, frames = log_mel.shape
        hidden = np.zeros(log_mel.shape, dtype=bool)
        for start, end in _masks(frames, self.mask_time_prob, self.mask_time_length, chance):
            hidden[:, start:end] = True
        for start, end in _masks(bins, self.mask_feature_prob, self.mask_feature_length, chance):
            hidden[start:end] = True
        hidden.flat[log_mel.argmax()] = False  # the loudest value says how loud silence is, see `pad_log_mel`
        return np.where(hidden, log_mel.mean(dtype=np.float64).astype(log_mel.dtype), log_mel)

    def _chance(self, what: str, sample: Sample, epoch: int) -> Random:
        return Random(f"{what} {self.seed} {epoch} {sample.id}")


_OTHERS = ("seed", "longest_s", "most_parts", "previous")
PROFILE_KEYS = [f.name for f in dataclasses.fields(Augmentation) if f.name not in _OTHERS]
UNCHANGED = Augmentation()


def augmentation_of(profile: Profile, samples: Sequence[Sample]) -> Augmentation:
    """Make the augmentation of training clips, which come in the order of their manifest.

    What is said before a clip is the text of the row before, if that has the same language and task: in most data
    sets the rows of a recording follow each other.
    """
    return Augmentation(
        seed=profile.seed,
        longest_s=max((sample.duration_s for sample in samples), default=0.0),
        most_parts=max((len(said_in(sample.timed_text)) for sample in samples if sample.timed_text), default=1),
        previous={own.id: before.text for before, own in pairwise(samples) if before.way == own.way},
        **{key: value for key in PROFILE_KEYS if (value := getattr(profile, key)) is not None},
    )


def _masks(size: int, share: float, length: int, chance: Random) -> list[tuple[int, int]]:
    """Begin and end of each mask on an axis. They cover at most about `share` of it, on average; they may overlap.

    As transformers' `mask_time_prob` and `mask_time_length`, but masks are shorter on a short axis.
    """
    length = min(length, size // PARTS)
    count = int(share * size / length + chance.random()) if length else 0
    starts = [chance.randrange(size - length + 1) for _ in range(count)]
    return [(start, start + length) for start in starts]
