"""Shards -> the batches of each optimizer step.

Work is divided among *shards*, one for each host (see shards.py). A rank that trains alone may take several; the batch
of a step is then the union of what its shards give, exactly what their hosts would train together.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, compress, islice
from typing import Any, Protocol

import numpy as np
import torch

from whisper_tuner.config import Profile
from whisper_tuner.data.augment import UNCHANGED, augmentation_of
from whisper_tuner.data.batch_shapes import LABEL_GRID, clips_within, equal_part, padded_tokens
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.features import FeatureCache, pad_log_mel
from whisper_tuner.data.labels import IGNORED, Label, LabelEncoder
from whisper_tuner.data.problems import Problem
from whisper_tuner.data.shards import assign_shards
from whisper_tuner.errors import DataError

Assign = Callable[[Sequence[Sample], Sequence[str], Sequence[float]], list[list[Sample]]]


class MissingAudio(Protocol):
    """Brings audio that this host lacks."""

    def order(self, samples: Sequence[Sample]) -> None: ...

    def wait(self, sample: Sample, given_up: Callable[[], bool]) -> None:
        """Until its audio is there, or will not come, or nobody needs it any more."""


Batch = dict[str, Any]
"""`input_features` float32 [B, 80|128, frames], `labels` int64 [B, L] padded with -100, `ids` list of B strings.

If a clip has a previous text, also `decoder_input_ids` int64 [B, L]."""

Clip = tuple[Sample, np.ndarray, Label]
"""With its log-mel [80|128, frames]."""

_GRID = 50  # mel frames between possible edges; even, because the encoder halves the length


def bucket_edges(
    samples: Sequence[Sample], full_frames: int, *, frames_per_s: float = 100.0, count: int = 6
) -> tuple[int, ...]:
    """At most `count` lengths in mel frames, those that add the least padding; every clip fits under the last one.

    Few shapes on purpose: Apple's GPU allocator fragments on many.
    """
    spare = 2  # frames: the STFT windows that reach past the end, and a duration rounded down
    lengths = [math.ceil((s.duration_s * frames_per_s + spare) / _GRID) * _GRID for s in samples]
    clips = Counter(min(length, full_frames) for length in lengths)
    # best[edge]: (padded frames of all clips up to this edge, the edges used), one more edge allowed in each turn
    best = {0: (0, ())}
    for _ in range(count):
        for edge in sorted(clips, reverse=True):
            for lower, (cost, edges) in [*best.items()]:
                if lower < edge:
                    more = cost + edge * sum(n for length, n in clips.items() if lower < length <= edge)
                    best[edge] = min(best.get(edge, (math.inf, ())), (more, (*edges, edge)))
    return best[max(clips)][1] if clips else (full_frames,)


class ShardBatches:
    """A manifest's samples, planned and read: the `Samples` of exogym's ElasticSampler.

    Every rank has the same list of samples, so all agree on who trains which when, without asking each other; audio is
    opened when its turn comes. Step k takes batch number p[k] of every shard, counted from the longest clips, p being
    one shuffle that all share: so the ranks' inputs of a step are about equally long, and none waits for another. With
    unequal weights the size of a shard's batches varies (see spread_sizes), and may be 0 in some steps.

    shuffle: for training, where clips also change from epoch to epoch as the profile says (see augment.py).
    missing_audio brings the audio that this host lacks. A profile with `shards` makes a rank train them all at once.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        profile: Profile,
        *,
        features: FeatureCache,
        labels: LabelEncoder,
        shuffle: bool = True,
        missing_audio: MissingAudio | None = None,
        assign: Assign = assign_shards,
        on_problem: Callable[[Problem], None] = lambda problem: None,
    ):
        self.samples = list(samples)
        extractor = features.extractor
        self._full_frames = extractor.nb_max_frames
        self._frames_per_s = extractor.sampling_rate / extractor.hop_length
        self.edges = bucket_edges(self.samples, self._full_frames, frames_per_s=self._frames_per_s)
        self._number = {sample.id: number for number, sample in enumerate(self.samples)}
        self._features, self._labels = features, labels
        self._profile, self._shuffle = profile, shuffle
        self._augmentation = augmentation_of(profile, self.samples) if shuffle else UNCHANGED
        self._epoch = 0
        self._assign, self._missing_audio, self._on_problem = assign, missing_audio, on_problem
        self._most: int | None = None
        self._most_positions: int | None = None
        self._label_grid = 1

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def clips_at_once(self) -> int:
        """The most that are computed together, also on a host that gets more than batch_size for its speed."""
        whole = math.ceil(self._profile.batch_size * max(1, len(self._profile.shards)) / self._profile.accumulation)
        return equal_part(whole, self._most) if self._most else whole

    def at_once(self, frames: int, tokens: int) -> int:
        """The most that are computed together of clips with so many mel frames and label tokens."""
        whole, positions = self.clips_at_once, self._most_positions
        return equal_part(whole, clips_within(positions, frames, tokens)) if positions else whole

    def compute_at_most(self, clips: int) -> None:
        """Cut what a step computes into equal parts of so many clips at most; its clips stay the same."""
        self._most = clips

    def limit_positions(self, most: int) -> None:
        """The same, of clips times positions (see `clips_within`): more short clips than long ones."""
        self._most_positions = most

    def use_few_lengths(self) -> None:
        """Pad labels to few lengths, for a device on which each shape of a batch has its price."""
        self._label_grid = LABEL_GRID

    def begin_epoch(self, epoch: int) -> None:
        """See Samples."""
        self._epoch = epoch

    def longest(self) -> tuple[int, int]:
        """(mel frames, label tokens) that a clip can have here."""
        seconds, tokens = max(sample.duration_s for sample in self.samples), 0
        around = len(self._labels.encode(""))
        for text in sorted((sample.text for sample in self.samples), key=lambda text: -len(text.encode())):
            if len(text.encode()) + 1 + around <= tokens:
                break  # Whisper's tokens are byte-level: never more of them than bytes
            with contextlib.suppress(DataError):  # it is left out when its turn comes
                tokens = max(tokens, len(self._labels.encode(text)))
        tokens = self._augmentation.longest_label(tokens, self._labels)
        return self._frames(seconds * self._frames_per_s), self._tokens(tokens)

    def blank(self, clips: int, longest: tuple[int, int]) -> Batch:
        """A batch of so many silent clips of this length, for what does not depend on values."""
        frames, tokens = longest
        return {
            "input_features": torch.zeros(clips, self._features.extractor.feature_size, frames),
            "labels": torch.full((clips, tokens), self._labels.end),
            "ids": [""] * clips,
        }

    def seconds(self, frames: int) -> float:
        return frames / self._frames_per_s

    def plan_settings(self) -> dict[str, Any]:
        """See Samples.plan_settings. How many clips are computed at once is each rank's own affair."""
        listing = "\n".join(f"{sample.id} {sample.duration_s}" for sample in self.samples)
        return {
            "clips": hashlib.sha256(listing.encode()).hexdigest()[:16],
            "batch_size": self._profile.batch_size,
            "audio_context": self._profile.audio_context,
            "edges": list(self.edges),
            "seed": self._profile.seed,
            "shuffle": self._shuffle,
            "shards": list(self._profile.shards),
            **self._augmentation.settings(),
        }

    def plan(
        self, epoch: int, left: Sequence[bool] | None, members: Sequence[str], weights: Sequence[float]
    ) -> list[list[list[int]]]:
        """For each member the samples of each step of an epoch; none where its shard has run out. See Samples.plan."""
        alone = self._profile.shards
        names, weights = (alone, [1.0] * len(alone)) if alone else (members, weights)
        samples = self.samples if left is None else [*compress(self.samples, left)]
        shards = self._assign(samples, names, weights)
        sizes = equal_sizes if len(set(weights)) == 1 else spread_sizes
        plan = self._steps(shards, sizes(list(map(len, shards)), self._profile.batch_size), epoch)
        # One rank with several shards trains what their hosts would have trained at the same time.
        return [[[*chain(*at_once)] for at_once in zip(*plan, strict=True)]] if alone else plan

    def prefetch(self, steps: Iterable[Sequence[int]]) -> None:
        """Audio that this host lacks is sent to it while it does other things."""
        if self._missing_audio:
            self._missing_audio.order([self.samples[number] for numbers in steps for number in numbers])

    def read(self, steps: Iterable[Sequence[int]]) -> Iterator[list[Batch]]:
        """The micro-batches of each optimizer step; the next step is read while this one trains."""
        steps = list(steps)
        self.prefetch(steps)
        given_up = threading.Event()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
            try:
                ahead = None
                for numbers in steps:
                    samples = [self.samples[number] for number in numbers]
                    pending, ahead = ahead, reader.submit(self._step, samples, given_up.is_set)
                    if pending is not None:
                        yield pending.result()
                if ahead is not None:
                    yield ahead.result()
            finally:
                given_up.set()  # the reader, which is joined now, may be waiting for audio

    def _steps(
        self, shards: Sequence[Sequence[Sample]], sizes: Sequence[Sequence[int]], epoch: int
    ) -> list[list[list[int]]]:
        """For each shard the numbers of its samples in each step, `sizes` of them; see the class for the order."""
        places = list(range(len(sizes[0])))  # of each step, counted from the one with the longest clips
        if self._shuffle:
            random.Random(f"steps {self._profile.seed} {epoch}").shuffle(places)
        by_length = sorted(places, key=places.__getitem__)
        plan = []
        for number, (shard, own) in enumerate(zip(shards, sizes, strict=True)):
            rest = iter([self._number[sample.id] for sample in self._ordered(shard, epoch, number)])
            taken = {step: list(islice(rest, own[step])) for step in by_length}
            plan.append([taken[step] for step in range(len(own))])
        return plan

    def collate(self, clips: Sequence[Clip]) -> Batch:
        samples, mels, labels = zip(*clips, strict=True)
        frames, tokens = self._shape(clips)
        return {
            "input_features": torch.from_numpy(np.stack([pad_log_mel(mel[:, :frames], frames) for mel in mels])),
            **self._padded(labels, tokens),
            "ids": [sample.id for sample in samples],
        }

    def _padded(self, labels: Sequence[Label], tokens: int) -> dict[str, torch.Tensor]:
        if any(label.prompt[0] != self._labels.start for label in labels):
            return pad_labels(labels, self._labels.end, tokens)
        return {"labels": torch.tensor([label.shifted + [IGNORED] * (tokens - len(label)) for label in labels])}

    def _ordered(self, shard: Sequence[Sample], epoch: int, number: int) -> list[Sample]:
        """A shard's samples from the longest bucket to the shortest, shuffled inside each."""
        samples = sorted(shard, key=lambda s: (-s.duration_s, s.id))
        if not self._shuffle:
            return samples
        chance = random.Random(f"samples {self._profile.seed} {epoch} {number}")
        return sorted(samples, key=lambda s: (-self._frames(s.duration_s * self._frames_per_s), chance.random()))

    def _frames(self, frames: float) -> int:
        """The length that a clip of this many frames is padded to."""
        if self._profile.audio_context == "full":
            return self._full_frames
        return next((edge for edge in self.edges if frames <= edge), self._full_frames)

    def _tokens(self, tokens: int) -> int:
        """The length that labels of so many tokens are padded to."""
        return padded_tokens(tokens, self._labels.max_tokens, self._label_grid)

    def _shape(self, clips: Sequence[Clip]) -> tuple[int, int]:
        """(mel frames, label tokens) that these clips are padded to."""
        _, mels, labels = zip(*clips, strict=True)
        frames = self._frames(max(mel.shape[1] for mel in mels))
        return frames, self._tokens(max(map(len, labels)))

    def _step(self, samples: list[Sample], given_up: Callable[[], bool]) -> list[Batch]:
        ready = [clip for sample in samples if (clip := self._clip(sample, given_up))]
        if not ready:
            return []
        size = self.at_once(*self._shape(ready))
        parts = [ready[at : at + size] for at in range(0, len(ready), size)]
        return [self.collate(part) for part in parts]

    def _clip(self, sample: Sample, given_up: Callable[[], bool]) -> Clip | None:
        """None if its file cannot be read, or its text is too long: the step goes on without it, since the other ranks
        count on this one.
        """
        try:
            epoch, changes = self._epoch, self._augmentation
            label = changes.label(sample, epoch, self._labels)
            if self._missing_audio:
                self._missing_audio.wait(sample, given_up)
            if given_up():
                return None
            mel = self._features.log_mel(sample.audio, changes.speed(sample, epoch))
            return sample, changes.masked(mel, sample, epoch), label
        except DataError as error:
            self._on_problem(Problem(sample.line, str(error)))
            return None


def pad_labels(labels: Sequence[Label], end: int, length: int | None = None) -> dict[str, torch.Tensor]:
    """`decoder_input_ids` and `labels`, int64 [B, length or longest].

    Labels are filled up with -100; not with the pad token: it is end-of-text, to be learnt.
    """
    length = length or max(map(len, labels))
    inputs = [label.inputs + [end] * (length - len(label)) for label in labels]
    targets = [label.targets + [IGNORED] * (length - len(label)) for label in labels]
    return {"decoder_input_ids": torch.tensor(inputs), "labels": torch.tensor(targets)}


def equal_sizes(counts: Sequence[int], batch_size: int) -> list[list[int]]:
    """For each shard the size of the batch in each step: all full, so that a smaller shard runs out."""
    return [[batch_size] * max(math.ceil(count / batch_size) for count in counts)] * len(counts)


def spread_sizes(counts: Sequence[int], batch_size: int) -> list[list[int]]:
    """The same for shards that are to end together: batch_size is the mean of all, and a shard's own differ by one.

    All shards take what is over in the same steps, as far as they have it, so that a host rests where the others have
    less to do. Reversed bits (van der Corput) put these steps far from each other: a host has work in any
    2 * steps / clips steps on end, and in the last one.
    """
    steps = math.ceil(sum(counts) / (batch_size * len(counts)))
    turns = sorted(range(steps), key=lambda step: f"{steps - 1 - step:b}"[::-1])
    sizes = []
    for count in counts:
        each, over = divmod(count, max(steps, 1))
        fuller = set(turns[:over])
        sizes.append([each + (step in fuller) for step in range(steps)])
    return sizes
