"""Shards -> the batches of each optimizer step.

Work is divided among *shards*, one for each host (see steps.py). A rank that trains alone may take several; the batch
of a step is then the union of what its shards give, exactly what their hosts would train together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain, compress
from typing import Any, Protocol

import numpy as np
import torch

from whisper_tuner.config import Profile
from whisper_tuner.data.augment import UNCHANGED, augmentation_of
from whisper_tuner.data.batch_shapes import (
    BatchLayout,
    Lengths,
    bucket_edges,
    clips_within,
    even_parts,
    frames_of,
    micro_batches,
    padded_frames,
    padded_tokens,
    positions,
)
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.encoder_store import EncoderStore
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.features import log_mel, pad_log_mel
from whisper_tuner.data.labels import IGNORED, Label, LabelEncoder
from whisper_tuner.data.steps import (
    MEL_FRAMES,
    Cost,
    assign_shards,
    balanced,
    balanced_rounds,
    in_order,
    rounds_of,
    spread_sizes,
    whose_turn,
)
from whisper_tuner.data.windows import Clip, Window
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Problem
from whisper_tuner.timed_text import Said

Assign = Callable[[Sequence[Sample], Sequence[str], Sequence[float]], list[list[Sample]]]

FULL_FROM = 1 / 3  # of the fastest host's speed
FEWEST = 0.1  # of the clips that a host had, if it had none that are padded to the full length
SEVERAL = 2  # clips in a step, from which on it can have fewer than others
MOST_TEXTS = 200  # that are read to know how many tokens a byte of text makes


class MissingAudio(Protocol):
    """Brings audio that this host lacks."""

    def order(self, samples: Sequence[Sample]) -> None: ...

    def wait(self, sample: Sample, given_up: Callable[[], bool]) -> None:
        """Until its audio is there, or will not come, or nobody needs it any more."""


Batch = dict[str, Any]
"""`input_features` float32 [B, 80|128, frames], `ids` list of B strings, and what pad_labels gives.

Where an EncoderStore has what the encoder says of all clips: `encoder_states` float32 [B, frames / 2, d_model] instead.
With `lengths`, a Lengths, clips stand one after the other: features [80|128, frames], states [frames / 2, d_model], and
decoder inputs and labels [L].
"""

VERSION = 8  # raise it when the same clips come to be planned otherwise: an older run is then not resumed


class ShardBatches:
    """A manifest's samples, planned and read: the `Samples` of exogym's ElasticSampler.

    Every rank has the same list of samples, so all agree on who trains which when, without asking each other; audio is
    opened when its turn comes. Each step of a shard has clips of all lengths, which add up alike (see `balanced`): so
    steps take equally long, and no rank waits for another. It is computed in micro-batches: of like length, padded, or
    without padding. A step has `batch_size` clips of all shards together, so that a run has as many steps on one host
    as on several. What a shard has of them varies (see spread_sizes), and may be nothing in some steps.

    shuffle: for training, where clips also change from epoch to epoch as the profile says (see augment.py).
    steps_in_round: that hosts make between two exchanges. cost: the unit in which steps are to cost alike.
    missing_audio: brings the audio that this host lacks.
    A profile with `shards` makes a rank train them all at once. layout: how this rank computes its clips; it may be
    replaced before any are read.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        profile: Profile,
        *,
        features: FeatureStore,
        labels: LabelEncoder,
        encoder_store: EncoderStore | None = None,
        shuffle: bool = True,
        missing_audio: MissingAudio | None = None,
        assign: Assign = assign_shards,
        steps_in_round: int = 1,
        cost: Cost = MEL_FRAMES,
        on_problem: Callable[[Problem], None] = lambda problem: None,
    ):
        self.samples = list(samples)
        extractor = features.extractor
        self._full_frames = extractor.nb_max_frames
        self._frames_per_s = extractor.sampling_rate / extractor.hop_length
        self.edges = bucket_edges(self.samples, self._full_frames, frames_per_s=self._frames_per_s)
        self._longest = max((frames_of(sample, self._frames_per_s) for sample in self.samples), default=0)
        self._most_clips = math.ceil(profile.batch_size / profile.accumulation)  # that are computed at once
        self._number = {sample.id: number for number, sample in enumerate(self.samples)}
        self._features, self._labels, self._encoder_store = features, labels, encoder_store
        self._profile, self._shuffle = profile, shuffle
        self._augmentation = augmentation_of(profile, self.samples) if shuffle else UNCHANGED
        self._full_share = profile.full_share if profile.audio_context == "mixed" and shuffle else 0.0
        self._widest = Window(
            frames=min(self._full_frames, round((profile.batch_size + 1) * self._longest)),
            frames_per_s=self._frames_per_s,
            labels=labels,
        )
        self._turns = list(range(len(self.samples)))  # the order in which they are padded to 30 s
        random.Random(f"full {profile.seed}").shuffle(self._turns)
        self._full: dict[int, set[int]] = {}  # by epoch, which samples are padded to the full length
        self._epoch = 0
        self._assign, self._missing_audio, self._on_problem = assign, missing_audio, on_problem
        self._steps_in_round, self.has_larger_steps = steps_in_round, steps_in_round > 1
        self._cost_of = cost
        self.layout = BatchLayout()

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return the speeds at which clips may be played."""
        return self._augmentation.speeds

    def begin_epoch(self, epoch: int) -> None:
        """Read the clips of this epoch from now on."""
        self._epoch = epoch

    # what is trained when

    def plan(
        self,
        epoch: int,
        left: Iterable[Any] | None,
        members: Sequence[str],
        weights: Sequence[float],
        steps_before: int = 0,
    ) -> list[list[list[int]]]:
        """Give each member the samples of each step of an epoch; none in some, where it has fewer clips than steps."""
        alone = self._profile.shards
        names, weights = (alone, [1.0] * len(alone)) if alone else (members, weights)
        samples = self.samples if left is None else [*compress(self.samples, left)]
        shards = self._assign(samples, names, self._weights_of_clips(samples, weights))
        self._full[epoch] = self._padded_in_full(shards, weights, epoch)
        batch_size = self._profile.batch_size * (1 if self._shuffle else len(shards))  # validation takes no steps
        sizes = spread_sizes([*map(len, shards)], batch_size, self._steps_in_round)
        plan = self._steps(shards, sizes, epoch, steps_before, are_unequal=len({*weights}) > 1)
        # One rank with several shards trains what their hosts would have trained at the same time.
        return [[[*chain(*at_once)] for at_once in zip(*plan, strict=True)]] if alone else plan

    def _steps(
        self,
        shards: Sequence[Sequence[Sample]],
        sizes: Sequence[Sequence[int]],
        epoch: int,
        steps_before: int,
        *,
        are_unequal: bool,
    ) -> list[list[list[int]]]:
        """Give each shard the numbers of its samples in each step, as many as `sizes` say.

        Where hosts make rounds of several steps and their shares are unequal, about as many in a round (see
        balanced_rounds). Where shards are alike, their steps with a dear clip are in the same rounds.
        """
        turns = list(range(len(sizes[0])))  # of the steps, the same for all shards: who gets the longest clips
        has_rounds = self._steps_in_round > 1 and are_unequal
        rounds = rounds_of(len(turns), self._steps_in_round, steps_before) if has_rounds else []
        if self._shuffle:
            random.Random(f"steps {self._profile.seed} {epoch}").shuffle(turns)
        plan = []
        for number, (shard, own) in enumerate(zip(shards, sizes, strict=True)):
            by_length = sorted(shard, key=lambda s: (-s.duration_s, s.id))
            chance = random.Random(f"samples {self._profile.seed} {epoch} {number}")
            costs = [self._cost(sample, self._number[sample.id] in self._full[epoch]) for sample in by_length]
            if not self._shuffle:
                steps = in_order(len(shard), own)
            elif rounds and len(shard) >= SEVERAL * sum(map(bool, own)):
                steps = balanced_rounds(costs, own, turns, rounds, chance)
            else:
                steps = balanced(costs, own, turns, chance)
            plan.append([[self._number[by_length[place].id] for place in step] for step in steps])
        return plan

    def _weights_of_clips(self, samples: Sequence[Sample], weights: Sequence[float]) -> Sequence[float]:
        """Share clips out so that all that hosts compute is in proportion to `weights`: who has none that are
        padded to the full length has more of the others.
        """
        of_full = _weights_of_full_clips(weights)
        if not self._full_share or min(of_full) > 0 or not samples:
            return weights
        cropped, full = (sum(self._cost(sample, is_full) for sample in samples) for is_full in (False, True))
        more = self._full_share * (full - cropped)
        shares = [weight / sum(weights) for weight in weights]
        return [
            max((cropped + more) * share - more * weight / sum(of_full), FEWEST * cropped * share)
            for share, weight in zip(shares, of_full, strict=True)
        ]

    def _padded_in_full(self, shards: Sequence[Sequence[Sample]], weights: Sequence[float], epoch: int) -> set[int]:
        """Choose as many of each shard as its weight says; in each epoch others. Where what an encoder says is kept, it
        is always the same ones. Slow hosts have none: one may take them longer than a round.
        """
        weights = _weights_of_full_clips(weights)
        due = self._full_share * sum(map(len, shards)) / sum(weights)
        found: set[int] = set()
        for shard, weight in zip(shards, weights, strict=True):
            if not weight:
                continue
            order = sorted((self._number[sample.id] for sample in shard), key=self._turns.__getitem__)
            now = whose_turn(len(order), due * weight, epoch if self._profile.trains_encoder else 0)
            found |= {order[turn] for turn in now}
        return found

    def cost(self, epoch: int, numbers: Sequence[int]) -> float:
        """Estimate what computing these samples costs, each in its turn at its length."""
        return sum(self._cost(self.samples[number], number in self._full[epoch]) for number in numbers)

    def _cost(self, sample: Sample, is_full: bool) -> int:
        """Estimate what computing a sample costs: the same on all ranks, whatever their devices."""
        is_full = is_full or self._profile.audio_context == "full"
        frames = padded_frames(frames_of(sample, self._frames_per_s), self._full_frames)
        around, of_byte = self._usual_tokens
        tokens = around + of_byte * len(sample.text.encode())
        return round(self._cost_of.of(self._full_frames if is_full else frames, tokens))

    @cached_property
    def _usual_tokens(self) -> tuple[int, float]:
        """Count tokens of a label without text, and for each byte of text: by some of the samples, as all take long."""
        around, tokens, read = len(self._labels.encode("")), 0, 0
        for sample in self.samples[:: math.ceil(len(self.samples) / MOST_TEXTS) or 1]:
            with contextlib.suppress(DataError):  # it is left out when its turn comes
                tokens += len(self._labels.encode(sample.text)) - around
                read += len(sample.text.encode())
        return around, tokens / max(read, 1)

    def plan_settings(self) -> dict[str, Any]:
        """Return what decides about plans: of the profile, the settings that are marked `changes_plan`.

        One that is off is left out, as in runs from before there was such a setting. How many clips are computed at
        once is each rank's own affair.
        """
        listing = "\n".join(f"{sample.id} {sample.duration_s}" for sample in self.samples)
        off = self._augmentation.off | (set() if self._full_share else {"full_share"})
        marked = [field.name for field in dataclasses.fields(Profile) if field.metadata["changes_plan"]]
        return {
            "version": VERSION,
            "clips": hashlib.sha256(listing.encode()).hexdigest()[:16],
            "steps_in_round": self._steps_in_round,
            "edges": list(self.edges),
            "shuffle": self._shuffle,
            **{name: getattr(self._profile, name) for name in marked if name not in off},
        }

    # the batches of each step

    def prefetch(self, steps: Iterable[Sequence[int]]) -> None:
        """Audio that this host lacks is sent to it while it does other things."""
        if self._missing_audio:
            wanted = [[self.samples[number] for number in numbers] for numbers in steps]
            cut = (self._cut(step) for step in wanted)
            of_steps = ([*step, *(found[:1] if found else ())] for step, found in zip(wanted, cut, strict=True))
            self._missing_audio.order([*chain(*of_steps)])

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

    def _step(self, samples: list[Sample], given_up: Callable[[], bool]) -> list[Batch]:
        """Read the clips of a step, and put those together that are computed at once."""
        clips, epoch = [clip for sample in samples if (clip := self._clip(sample, samples[0], given_up))], self._epoch
        if not clips:
            return []
        if self._window and clips[0].timed:
            cut = self._cut(samples)
            last = self._clip(cut[0], samples[0], given_up) if cut else None
            order = self._augmentation.order(epoch, samples[0])
            clips = self._window.of(clips, order, last.cut(cut[1]) if cut and last else None)
            if (noise := self._augmentation.noise(samples[0], epoch)) is not None:
                language, task = samples[0].way
                silent = self._labels.encode("", language=language, task=task, timed=[Said(0.0, 0.0, "")])
                mel = log_mel(noise, self._features.extractor)[:, : self._window.frames]
                clips.append(Clip(ids=(), log_mel=mel, label=silent))
        full = self._full.get(epoch, set()) if self._has_windows else set()
        is_full = [any(self._number[name] in full for name in clip.ids) for clip in clips]
        frames = [self._full_frames if it else self._frames(c.frames) for c, it in zip(clips, is_full, strict=True)]
        tokens = [len(clip.label) for clip in clips]
        if not self.layout.is_padded:
            sizes = [positions(*one) for one in zip(frames, tokens, strict=True)]
            parts = even_parts(sizes, self.layout.most_positions, self._most_clips)
        else:
            longest = self._tokens(max(tokens))
            # What is stored of a clip is that of its own length: none is padded to another's.
            fixed_cost = 0 if self._encoder_store else self.layout.fixed_cost
            parts = micro_batches(frames, lambda frames: self.at_once(frames, longest), fixed_cost)
        return [self.collate([clips[n] for n in part], [frames[n] for n in part]) for part in parts]

    def _clip(self, sample: Sample, first: Sample, given_up: Callable[[], bool]) -> Clip | None:
        """Read a clip of the step that begins with `first`.

        None if its file cannot be read, or its text is too long: the step goes on without it, since the other ranks
        count on this one.
        """
        try:
            epoch, changes = self._epoch, self._augmentation
            timed, previous = changes.timed(sample, epoch, first), changes.previous_text(sample, epoch)
            language, task = sample.way
            label = self._labels.encode(sample.text, language=language, task=task, timed=timed, previous=previous)
            if self._missing_audio:
                self._missing_audio.wait(sample, given_up)
            if given_up():
                return None
            mel = self._features.log_mel(sample.audio, changes.speed(sample, epoch))
            return Clip(
                ids=(sample.id,),
                log_mel=changes.masked(mel, sample, epoch),
                label=label,
                timed=timed,
                way=sample.way,
                previous=previous,
            )
        except DataError as error:
            self._on_problem(Problem(sample.line, str(error)))
            return None

    def _cut(self, step: Sequence[Sample]) -> tuple[Sample, float] | None:
        """Return the clip that the end of this step's window cuts, and the share of it that is heard."""
        return self._augmentation.cut(self.samples, self._epoch, step) if self._window and step else None

    def collate(self, clips: Sequence[Clip], lengths: Sequence[int]) -> Batch:
        """lengths: the mel frames that each clip is padded to on its own."""
        ids, labels = [name for clip in clips for name in clip.ids], [clip.label for clip in clips]
        is_padded = self.layout.is_padded
        if is_padded:
            targets = pad_labels(labels, self._labels.end, self._tokens(max(map(len, labels))))
            rest: Batch = {**targets, "ids": ids}
            lengths = [max(lengths)] * len(clips)
        else:
            inputs = [token for label in labels for token in label.inputs]  # one clip's after the other's
            written = [token for label in labels for token in label.targets]
            rest = {"decoder_input_ids": torch.tensor(inputs), "labels": torch.tensor(written)}
            rest |= {"lengths": Lengths(lengths, [*map(len, labels)]), "ids": ids}
        mels = [pad_log_mel(clip.log_mel[:, :frames], frames) for clip, frames in zip(clips, lengths, strict=True)]
        if self._encoder_store:
            keys = [self._encoder_store.key(mel) for mel in mels]
            if (states := self._encoder_store.get(keys)) is not None:
                return {"encoder_states": torch.stack(states) if is_padded else torch.cat(states), **rest}
            rest["encoder_keys"] = keys
        features = np.stack(mels) if is_padded else np.concatenate(mels, axis=1)
        return {"input_features": torch.from_numpy(features), **rest}

    def _frames(self, frames: float) -> int:
        """The length that a clip of this many frames is padded to, unless it is a full one among cropped ones."""
        if self._profile.audio_context == "full":
            return self._full_frames
        # Where the encoder's outputs are kept, a clip must have the same length in each batch.
        stored_padded = self._encoder_store is not None and self.layout.is_padded
        if not (self.layout.few_lengths or stored_padded):
            return padded_frames(frames, self._full_frames)
        return next((edge for edge in self.edges if frames <= edge), self._full_frames)

    def _tokens(self, tokens: int) -> int:
        """The length that labels of so many tokens are padded to."""
        return padded_tokens(tokens, self._labels.max_tokens, self.layout.label_grid)

    # memory

    def at_once(self, frames: int, tokens: int) -> int:
        """The most that are computed together of clips with so many mel frames and label tokens.

        One that is longer than all others is padded to the full length in its turn, and computed alone.
        """
        if self._has_windows and frames > self._frames(self._longest):
            return 1
        return min(self._most_clips, clips_within(self.layout.most_positions, frames, tokens))

    def longest(self) -> tuple[int, int]:
        """(mel frames, label tokens) of the clips that take the most memory, as many as are computed at once."""
        others, full = (self._frames(self._longest), self._longest_label()), self.full_clip()
        return full if full and positions(*full) >= self.at_once(*others) * positions(*others) else others

    def full_clip(self) -> tuple[int, int] | None:
        """(mel frames, label tokens) of the longest that is padded or joined to more than a clip; None if none is."""
        if not self._has_windows:
            return None
        frames = self._full_frames if self._full_share or not self._window else self._frames(self._window.frames)
        tokens = self._window.most_tokens if self._window else 0
        return frames, max(self._longest_label(), self._tokens(tokens))

    def _longest_label(self) -> int:
        tokens, around = 0, len(self._labels.encode(""))
        for text in sorted((sample.text for sample in self.samples), key=lambda text: -len(text.encode())):
            if len(text.encode()) + 1 + around <= tokens:
                break  # Whisper's tokens are byte-level: never more of them than bytes
            with contextlib.suppress(DataError):  # it is left out when its turn comes
                tokens = max(tokens, len(self._labels.encode(text)))
        return self._tokens(self._augmentation.longest_label(tokens, self._labels))

    @property
    def _has_windows(self) -> bool:
        """Tell if some are longer than their clip: padded to the full length in their turn, or of several clips."""
        return (self._full_share > 0 and self.layout.pads_in_full) or self._window is not None

    @property
    def _window(self) -> Window | None:
        """None where clips are not joined: what an encoder store keeps is of single ones."""
        joins = self._augmentation.timestamps_share and self._encoder_store is None and self.layout.pads_in_full
        return self._widest if joins else None

    def blank(self, clips: int, longest: tuple[int, int]) -> Batch:
        """A batch of so many silent clips of this length, for what does not depend on values."""
        frames, tokens = longest
        mels, end, ids = self._features.extractor.feature_size, self._labels.end, [""] * clips
        if self.layout.is_padded:
            labels = torch.full((clips, tokens), end)
            return {"input_features": torch.zeros(clips, mels, frames), "labels": labels, "ids": ids}
        labels = torch.full((clips * tokens,), end)
        given = {"input_features": torch.zeros(mels, clips * frames), "decoder_input_ids": labels, "labels": labels}
        return {**given, "ids": ids, "lengths": Lengths([frames] * clips, [tokens] * clips)}

    def seconds(self, frames: int) -> float:
        return frames / self._frames_per_s

    def stored_bytes(self, numbers: Sequence[int]) -> int:
        """Return how many bytes the encoder's outputs of these samples take."""
        if self._encoder_store is None:
            return 0
        full = set(numbers) & set().union(*self._full.values()) if self._has_windows else set()
        lengths = [self._frames(frames_of(self.samples[number], self._frames_per_s)) for number in {*numbers} - full]
        return self._encoder_store.bytes_of([*lengths, *[self._full_frames] * len(full)])


def _weights_of_full_clips(weights: Sequence[float]) -> list[float]:
    return [weight if weight > FULL_FROM * max(weights) else 0.0 for weight in weights]


def pad_labels(labels: Sequence[Label], end: int, length: int | None = None) -> dict[str, torch.Tensor]:
    """`decoder_input_ids` and `labels`, int64 [B, length or longest].

    Labels are filled up with -100; not with the pad token: it is end-of-text, to be learnt.
    """
    length = length or max(map(len, labels))
    inputs = [label.inputs + [end] * (length - len(label)) for label in labels]
    targets = [label.targets + [IGNORED] * (length - len(label)) for label in labels]
    return {"decoder_input_ids": torch.tensor(inputs), "labels": torch.tensor(targets)}
