"""Shards -> the batches of each optimizer step.

Work is divided among *shards* (one for each host, see shards.py). A rank serves one shard or several; the batch of a
step is the union of what its shards give, so one process that serves two shards trains exactly as two processes that
serve one each.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from whisper_tuner.dataset import Sample
from whisper_tuner.errors import DataError
from whisper_tuner.features import FeatureCache, pad_log_mel
from whisper_tuner.labels import LabelEncoder, pad_labels
from whisper_tuner.problems import Problem

Batch = dict[str, Any]
"""`input_features` float32 [B, 80|128, frames], `labels` int64 [B, L] padded with -100, `ids` list of B strings."""

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


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How many clips make a step, and how long their inputs are.

    `micro_batch` None computes a step's batch in one go; `edges` () means `bucket_edges` of all samples.
    """

    batch_size: int = 8  # clips of one shard in one optimizer step
    micro_batch: int | None = None
    audio_context: Literal["cropped", "full"] = "cropped"
    edges: tuple[int, ...] = ()


class ShardBatches:
    """The batches of a rank: a BatchSource.

    It is built from the samples of every shard, so all ranks agree on the number of steps and on which durations are
    trained when, without asking each other; only the audio of the shards in `serves` is opened.
    Step k takes batch number p[k] of every shard, counted from the longest clips, p being one shuffle that all share:
    so the ranks' inputs of a step are about equally long, and none waits for another.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Sample]],
        *,
        serves: Sequence[int],
        features: FeatureCache,
        labels: LabelEncoder,
        shape: BatchShape,
        seed: int = 0,
        shuffle: bool = True,
        on_problem: Callable[[Problem], None] = lambda problem: None,
    ):
        self.serves = tuple(serves)
        self._shape = shape
        extractor = features.extractor
        self._full_frames = extractor.nb_max_frames
        self._frames_per_s = extractor.sampling_rate / extractor.hop_length
        self.edges = shape.edges or bucket_edges(
            [sample for shard in shards for sample in shard], self._full_frames, frames_per_s=self._frames_per_s
        )
        self._shards = [sorted(shard, key=lambda s: (-s.duration_s, s.id)) for shard in shards]
        self._features, self._labels = features, labels
        self._seed, self._shuffle = seed, shuffle
        self._on_problem = on_problem
        self.steps_per_epoch = max((math.ceil(len(shard) / shape.batch_size) for shard in shards), default=0)

    @property
    def samples(self) -> list[Sample]:
        """Everything that this rank trains on in an epoch."""
        return [sample for shard in self.serves for sample in self._shards[shard]]

    def plan(self, epoch: int) -> list[list[Sample]]:
        """The samples of each step of an epoch on this rank; an empty list where its shards have run out."""
        steps = list(range(self.steps_per_epoch))
        if self._shuffle:
            random.Random(f"steps {self._seed} {epoch}").shuffle(steps)
        orders = [self._ordered(shard, epoch) for shard in self.serves]
        size = self._shape.batch_size
        return [[s for order in orders for s in order[step * size : (step + 1) * size]] for step in steps]

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[list[Batch]]:
        """The micro-batches of each optimizer step; the next step is read while this one trains."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
            ahead = None
            for samples in self.plan(epoch)[first_step:]:
                pending, ahead = ahead, reader.submit(self._step, samples)
                if pending is not None:
                    yield pending.result()
            if ahead is not None:
                yield ahead.result()

    def collate(self, samples: Sequence[Sample], mels: Sequence[np.ndarray]) -> Batch:
        """One batch from samples and their log-mels [80|128, frames]."""
        frames = self._frames(max(mel.shape[1] for mel in mels))
        return {
            "input_features": torch.from_numpy(np.stack([pad_log_mel(mel[:, :frames], frames) for mel in mels])),
            "labels": pad_labels([self._labels.encode(sample.text) for sample in samples]),
            "ids": [sample.id for sample in samples],
        }

    def _ordered(self, shard: int, epoch: int) -> list[Sample]:
        """A shard's samples from the longest bucket to the shortest, shuffled inside each."""
        samples = self._shards[shard]
        if not self._shuffle:
            return samples
        chance = random.Random(f"samples {self._seed} {epoch} {shard}")
        return sorted(samples, key=lambda s: (-self._frames(s.duration_s * self._frames_per_s), chance.random()))

    def _frames(self, frames: float) -> int:
        """The length that a clip of this many frames is padded to."""
        if self._shape.audio_context == "full":
            return self._full_frames
        return next((edge for edge in self.edges if frames <= edge), self._full_frames)

    def _step(self, samples: list[Sample]) -> list[Batch]:
        ready = [(sample, mel) for sample in samples if (mel := self._log_mel(sample)) is not None]
        size = self._shape.micro_batch or max(len(ready), 1)
        parts = [ready[at : at + size] for at in range(0, len(ready), size)]
        return [self.collate([sample for sample, _ in part], [mel for _, mel in part]) for part in parts]

    def _log_mel(self, sample: Sample) -> np.ndarray | None:
        """None for a file that cannot be read: the step goes on without it, since the other ranks count on this one."""
        try:
            return self._features.log_mel(sample.audio)
        except DataError as error:
            self._on_problem(Problem(sample.line, str(error)))
            return None
