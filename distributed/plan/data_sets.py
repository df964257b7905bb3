"""The clips of a run: its own manifests, what other sets add to them, and the sets that it is to keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

from distributed.hosts.paths import PROJECT, STORE
from whisper_tuner.config import Profile
from whisper_tuner.data.check import check_data, check_manifest, check_usable, described, trainable
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.data.labels import token_limit
from whisper_tuner.data.splitting import repeated_notes
from whisper_tuner.errors import ConfigError, DataError
from whisper_tuner.files import shown
from whisper_tuner.hub import check_files, check_model, model_folder
from whisper_tuner.languages import text_language
from whisper_tuner.text import counted

from .job import Job, OtherSet

RARE = 5  # training clips that have a rare term, at most


def checked_data(
    job: Job, profile: Profile, ranks: int, run_dir: Path, show_status: Callable[[str], AbstractContextManager]
) -> tuple[dict[str, Manifest], list[Manifest]]:
    """Return the manifests by kind, and those of the sets to keep, once model and data are known to be usable.

    Raises ConfigError, DataError, ModelError.
    """
    if profile.shards and ranks > 1:
        raise ConfigError("shards is for one machine that trains alone", remedy="Remove shards from the profile.")
    check_model(profile)
    terms: tuple[str, ...] = ()
    if profile.terms:
        from whisper_tuner.eval.terms import read_terms

        terms = read_terms(profile.terms)
    with show_status("reading the manifests, and the headers of the audio"):
        checked = check_data(profile, run_dir, PROJECT / STORE)
        own = len(checked["train"].samples)
        if terms and profile.terms_times > 1:
            checked["train"] = _with_rare_terms(checked["train"], terms, profile)
        for other in job.added:
            try:
                checked["train"] = _with_more(checked, other, profile, other.most * own)
            except DataError as error:
                if "also_train" in job.origin:
                    raise
                what = f"{other.name}: none of it is trained, so it may be forgotten: {str(error).splitlines()[0]}"
                train = checked["train"]  # nobody has asked for these clips
                checked["train"] = dataclasses.replace(train, notes=(*train.notes, what))
        of_which = job.keeps if "also_train" in job.origin else job.added  # who has the key knows what it says
        trained = {other.name for other in of_which}
        kept = [_checked_kept(one, profile, checked["train"], is_trained=one.name in trained) for one in job.keeps]
    check_files(model_folder(profile.base_model, show=True))  # a download may take long: in sight, before any worker
    return checked, kept


def _with_rare_terms(train: Manifest, terms: Sequence[str], profile: Profile) -> Manifest:
    """Return the training clips, with those of rare terms several times."""
    from whisper_tuner.eval.terms import texts_with
    from whisper_tuner.eval.wer import text_normalizer

    normalize = text_normalizer(text_language(profile.language or None, profile.task))
    having = texts_with(terms, normalize, (sample.text for sample in train.samples))
    rare = [numbers for numbers in having if 0 < len(numbers) <= RARE]
    clips = [train.samples[number] for number in sorted({number for numbers in rare for number in numbers})]
    turns = range(2, profile.terms_times + 1)
    more = tuple(dataclasses.replace(clip, id=f"{clip.id}*{turn}") for turn in turns for clip in clips)
    what = f"terms: {counted(len(clips), 'clip')} of {counted(len(rare), 'rare term')}"
    note = f"{what} {'is' if len(clips) == 1 else 'are'} trained {profile.terms_times} times an epoch (terms_times)"
    return dataclasses.replace(train, samples=train.samples + more, notes=(*train.notes, note))


def _with_more(checked: Mapping[str, Manifest], other: OtherSet, profile: Profile, most: float) -> Manifest:
    """Return the training clips with a share of another set's, at most so many, drawn by the profile's seed.

    Of a share of 2.5 each clip stands there twice, and half of them a third time. Raises DataError.
    """
    train = checked["train"]
    limit = token_limit(profile.base_model, language=other.language, task=other.task)
    found = _usable(trainable(_read(other, profile, "train"), limit), profile)
    language = other.language if other.language != profile.language else ""
    task = other.task if other.task != profile.task else ""
    known = {(sample.audio, sample.task or profile.task) for sample in train.samples}
    new = [
        dataclasses.replace(clip, language=clip.language or language, task=clip.task or task)
        for clip in found.samples
        if (clip.audio, clip.task or other.task) not in known
    ]
    count = math.ceil(min(other.share * len(new), most))
    again, rest = divmod(count, max(1, len(new)))
    drawn = [*range(len(new))] * again + sorted(Random(profile.seed).sample(range(len(new)), rest))
    more = tuple(
        dataclasses.replace(clip, id=f"{other.name}-{clip.id}" + f"*{turn + 1}" * bool(turn))
        for turn, clip in ((number // len(new), new[at]) for number, at in enumerate(drawn))
    )
    what = f"{other.name}: {counted(min(len(more), len(new)), 'clip')} of {len(found.samples)} are trained as well"
    what += f", {other.share:g} times an epoch (also_train)" if other.share > 1 else " (also_train)"
    notes = [f"{what}, so that less is forgotten"] if more else []
    notes += [f"{shown(found.path)}: {described(found.problems)}"] if found.problems else []
    tested = [manifest for kind, manifest in checked.items() if kind != "train"]
    drawn_set = dataclasses.replace(found, samples=more)
    notes += [note for manifest in tested for note in repeated_notes(drawn_set, manifest)]
    return dataclasses.replace(
        train,
        samples=train.samples + more,
        notes=(*train.notes, *found.notes, *notes),
        added=(*train.added, drawn_set),
    )


def _read(other: OtherSet, profile: Profile, kind: str) -> Manifest:
    """Return a set's clips, read by the rules of the profile. Raises DataError."""
    no_speech = profile.no_speech == "train"
    return check_manifest(
        other.clips, profile.max_duration_s, PROJECT / STORE, no_speech=no_speech, reading=other.reading, kind=kind
    )


def _usable(manifest: Manifest, profile: Profile) -> Manifest:
    """Return a set's clips. Raises DataError if there are none, or some cannot be used and must be."""
    check_usable(manifest)
    if manifest.problems and profile.bad_rows == "refuse":
        remedy = "Fix or remove them, or set bad_rows = skip."
        raise DataError(f"{manifest.path}: {described(manifest.problems)}\n  and bad_rows = refuse", remedy=remedy)
    return manifest


def _checked_kept(kept: OtherSet, profile: Profile, train: Manifest, *, is_trained: bool) -> Manifest:
    """Return the test clips of a set to keep. is_trained: no word of its training clips is needed. Raises DataError."""
    manifest = _usable(_read(kept, profile, "test"), profile)
    language = f"its language is taken to be {kept.language}, and " if kept.is_list and kept.language else ""
    remedy = f"Give [dataset:{kept.name}] a list of clips to train: train = ..."
    if kept.is_list:
        remedy = "A [dataset:NAME] with language, train and test says otherwise."
    untrained = f"{kept.name}: {language}none of it is trained, so it may be forgotten. {remedy}"
    notes = [*repeated_notes(train, manifest), *([] if is_trained else [untrained])]
    return dataclasses.replace(manifest, notes=(*manifest.notes, *notes))
