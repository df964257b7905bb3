"""Samples -> shards for hosts -> the batches of each optimizer step.

Work is divided among *shards* (one for each host). A rank serves one shard or several; the batch of a step is the union
of what its shards give, so one process that serves two shards trains exactly as two processes that serve one each.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from whisper_tuner.dataset import Problem, Sample
from whisper_tuner.errors import DataError
from whisper_tuner.features import FeatureCache, pad_log_mel
from whisper_tuner.labels import LabelEncoder, pad_labels

Batch = dict[str, Any]
"""`input_features` float32 [B, 80|128, frames], `labels` int64 [B, L] padded with -100, `ids` list of B strings."""

_GRID = 50  # mel frames between possible edges; even, because the encoder halves the length
_SLACK = 0.02  # a shard may run ahead of its due share by this much of it


def assign_shards(
    samples: Sequence[Sample], hosts: Sequence[str], weights: Sequence[float] | None = None
) -> list[list[Sample]]:
    """One list of samples for each host, in the samples' order; the same on every machine.

    Weighted rendezvous hashing with bounded loads (1608.01350): a sample stays where it is when other hosts come or go,
    unless that would put its host more than about 2 % over its share of the seconds or of the clips. The longest are
    placed first, so shards agree in each range of durations and not only in the sum.
    """
    weights = list(weights) if weights is not None else [1.0] * len(hosts)
    if not hosts or len(weights) != len(hosts) or min(weights) <= 0:
        raise ValueError("assign_shards needs hosts, and a positive weight for each")
    if len(set(hosts)) != len(hosts):
        raise ValueError("assign_shards needs distinct host names")
    placed = _place(sorted(samples, key=lambda s: (-s.duration_s, s.id)), hosts, [w / sum(weights) for w in weights])
    return [[sample for sample in samples if placed[sample.id] == host] for host in range(len(hosts))]


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


def _place(samples: Sequence[Sample], hosts: Sequence[str], shares: Sequence[float]) -> dict[str, int]:
    """Sample id -> host index, for samples in descending order of duration."""
    total_seconds = sum(sample.duration_s for sample in samples)
    spare = [(max(2.0, _SLACK * share * len(samples)), _SLACK * share * total_seconds) for share in shares]
    clips, seconds = [0] * len(hosts), [0.0] * len(hosts)
    placed, due_clips, due_seconds = {}, 0, 0.0
    for sample in samples:
        # How far each host is ahead of its share so far, 1 being as far as it may.
        ahead = [
            max((clips[h] - share * due_clips) / spare[h][0], (seconds[h] - share * due_seconds) / spare[h][1])
            for h, share in enumerate(shares)
        ]
        limit = max(1.0, min(ahead))
        free = [h for h in range(len(hosts)) if ahead[h] <= limit]
        best = max(free, key=lambda h: _score(sample.id, hosts[h], shares[h]))
        placed[sample.id] = best
        clips[best], seconds[best] = clips[best] + 1, seconds[best] + sample.duration_s
        due_clips, due_seconds = due_clips + 1, due_seconds + sample.duration_s
    return placed


def _score(sample_id: str, host: str, weight: float) -> float:
    """Weighted rendezvous score: the highest one wins, each host in proportion to its weight."""
    digest = hashlib.blake2b(f"{sample_id}\0{host}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -weight / math.log(uniform)
