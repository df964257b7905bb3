"""Splits clips into parts: validation and test get some, train the rest. The same clips always give the same parts.

A model knows the voices and the sentences that it was trained on. So no sentence is ever in two parts. Nor is a speaker
where all are named, else a recording where all clips are cut from longer ones, if enough of them say other things.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from whisper_tuner.data.dataset import Manifest, Sample
from whisper_tuner.text import counted, text_key

PART = 0.1  # of the clips, for validation and for test each
FEW = 100  # clips of a test set
LOOKS_BETTER = "what is measured will look better than it is"
# A part of speakers may be so many times smaller or larger than it should be. Beyond that they are too few to split by.
OFF = 2.0
# Of the other clips: if more of them have sentences of the part split off, all have about the same ones, as commands.
MOST_LEFT_OUT = 0.2
# What was cut from a longer recording has for its id the recording's name and the time; its file's name, see
# `flac_of`, has the seconds, too, and a digest that tells recordings of one name apart.
CUT, CUT_FILE = re.compile(r"(.+)-\d{8}"), re.compile(r"(.+)-\d{8}-\d{5,}(-[0-9a-f]{8}\.flac)")


@dataclass(frozen=True)
class Split:
    """left_out: clips in no part, since their sentence is in another part.

    voices: whether speakers are named, and are in several parts.
    """

    parts: dict[str, tuple[Sample, ...]]
    by: str  # speaker, recording or sentence
    left_out: int = 0
    voices: bool = False

    @property
    def told(self) -> str:
        """Say in a line what a person should know of the split."""
        notes = [f"split by {self.by}"]
        if self.voices:
            notes.append("the speakers are too few, or say the same, so each voice may be in several parts")
        if self.left_out:
            notes.append(f"{counted(self.left_out, 'clip')} left out, whose sentence is in another part")
        if (count := len(self.parts.get("test", ()))) and count < FEW:
            notes.append(f"{counted(count, 'clip')} for the test: few, so much of their WER is chance")
        return "; ".join(notes)


def split(samples: Sequence[Sample], kinds: Sequence[str]) -> Split:
    """`kinds` of validation and test get about a tenth of the clips each. Raises ValueError where they are too few."""
    for by, group in (("speaker", lambda sample: sample.speaker), ("recording", _recording)):
        groups = [group(sample) for sample in samples]
        parts, share = _dealt(samples, groups, kinds) if all(groups) else None, PART * len(samples)
        is_even = parts and all(share / OFF <= len(parts[kind]) <= share * OFF for kind in kinds)
        if parts and is_even and (found := _without_repeated(parts, by)):
            return found
    sentences = [_sentence(sample) for sample in samples]
    if not (parts := _dealt(samples, sentences, kinds)):
        what = f"{counted(len(set(sentences)), 'different text')} in {counted(len(samples), 'clip')}"
        raise ValueError(f"no {' and no '.join(kinds)} set can be made of {what}, for no text may be in two parts")
    return Split(_frozen(parts), "sentence", voices=any(sample.speaker for sample in samples))


def repeated_notes(train: Manifest, other: Manifest) -> list[str]:
    """Name the clips and sentences that a set shares with each list of the training set."""
    return [note for each in train.lists if (note := _repeated_note(each, other))]


def _repeated_note(train: Manifest, other: Manifest) -> str:
    audio = {sample.audio for sample in train.samples}
    # A copy of a file under another name has the same length, too, to the sample.
    copies = {(text_key(sample.text), sample.duration_s) for sample in train.samples}
    texts = {text for text, _ in copies}
    same = sum(s.audio in audio or (text_key(s.text), s.duration_s) in copies for s in other.samples)
    alike = sum(text_key(sample.text) in texts for sample in other.samples)
    found = [counted(same, "clip")] * bool(same) + [f"the sentences of {counted(alike, 'clip')}"] * (alike > same)
    if not found:
        return ""
    one, two = (each.path.relative_to(each.path.parent.parent) for each in (other, train))  # many are called train.csv
    return f"{one} shares {' and '.join(found)} of {len(other.samples)} with {two}: {LOOKS_BETTER}"


def _sentence(sample: Sample) -> str:
    """Return a key for texts that `data check` takes for one; clips without any words are of their own."""
    return text_key(sample.text) or sample.text or sample.id


def _recording(sample: Sample) -> str:
    if file := CUT_FILE.fullmatch(sample.audio.name):
        return file[1] + file[2]
    found = CUT.fullmatch(sample.id)
    return found[1] if found else ""


def _dealt(samples: Sequence[Sample], groups: Sequence[str], kinds: Sequence[str]) -> dict[str, list[Sample]] | None:
    """Whole groups to each kind, in the order of their hashes; None unless each part gets one."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    share, kind_of = max(1.0, PART * len(samples)), {}
    # One that is far too large is taken last, else it would be the whole test set.
    waiting = sorted(sizes, key=lambda group: (sizes[group] > OFF * share, hashlib.sha256(group.encode()).digest()))
    for kind in kinds:
        taken = 0
        for group in [group for group in waiting if group not in kind_of]:
            if not taken or taken + sizes[group] / 2 <= share:  # nearer to the share with it than without
                kind_of[group] = kind
                taken += sizes[group]
            if taken >= share:
                break
    parts: dict[str, list[Sample]] = {kind: [] for kind in ("train", *kinds)}
    for sample, group in zip(samples, groups, strict=True):
        parts[kind_of.get(group, "train")].append(sample)
    return parts if all(parts.values()) else None


def _without_repeated(parts: dict[str, list[Sample]], by: str) -> Split | None:
    """Clips whose sentence is in the test set leave the others, and those of the validation set leave train.

    Returns None where these are too many.
    """
    kept, texts, left_out = {}, set(), 0
    for kind in reversed(parts):  # train is the first
        kept[kind] = [sample for sample in parts[kind] if _sentence(sample) not in texts]
        left_out += len(parts[kind]) - len(kept[kind])
        texts |= {_sentence(sample) for sample in kept[kind]}
    if left_out > MOST_LEFT_OUT * sum(map(len, parts.values())) or not all(kept.values()):
        return None
    return Split(_frozen({kind: kept[kind] for kind in parts}), by, left_out)


def _frozen(parts: dict[str, list[Sample]]) -> dict[str, tuple[Sample, ...]]:
    return {kind: tuple(part) for kind, part in parts.items()}
