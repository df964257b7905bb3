"""Finds everything that is wrong with a profile's manifests before anything is trained."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from whisper_tuner.config import Profile
from whisper_tuner.data.audio_check import AudioIndex
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.data.labels import TokenLimit, check_special_tokens, token_limit
from whisper_tuner.data.splitting import repeated_notes
from whisper_tuner.errors import DataError
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.problems import Kind, Problem, counts, listed, place_of, write_problems
from whisper_tuner.text import counted

PROBLEMS_FILE = "data-problems.csv"
SHOWN = 5  # problems of each manifest on the screen; the list has all of them
REFUSED_SHOWN = 20  # problems on the screen where bad_rows = refuse ends the run


def check_data(profile: Profile, run_dir: Path, store: Path) -> dict[str, Manifest]:
    """Return the profile's manifests by kind (train, validation, test), without the rows that cannot be used.

    Those are listed in run_dir/data-problems.csv. With `bad_rows = refuse` the list goes to `store`, which outlives the
    run folder, and DataError is raised. Headers of audio files are kept below `store`.
    """
    paths = {kind: path for kind in ("train", "validation", "test") if (path := getattr(profile, kind))}
    no_speech = profile.no_speech == "train"
    reading = Reading.of(profile)
    manifests = {
        kind: check_manifest(path, profile.max_duration_s, store, no_speech=no_speech, reading=reading, kind=kind)
        for kind, path in paths.items()
    }
    for kind, manifest in manifests.items():
        if kind != "train":
            notes = repeated_notes(manifests["train"], manifest)
            manifests[kind] = replace(manifest, notes=(*manifest.notes, *notes))
    limit = token_limit(profile.base_model, language=profile.language, task=profile.task)
    check_special_tokens(profile)
    for kind in paths:
        if kind != "test":  # its texts are not trained on, so they may be of any length
            manifests[kind] = trainable(manifests[kind], limit)
    problems = [(manifest.path, manifest.problems) for manifest in manifests.values() if manifest.problems]
    if problems and profile.bad_rows == "refuse":
        _refuse(problems, store / PROBLEMS_FILE)
    for manifest in manifests.values():
        check_usable(manifest)
    if problems:
        write_problems(run_dir / PROBLEMS_FILE, problems)
    return manifests


def check_manifest(
    path: Path,
    max_duration_s: float,
    store: Path,
    stop: threading.Event | None = None,
    *,
    no_speech: bool = False,
    reading: Reading = AS_IT_IS,
    kind: str = "train",
) -> Manifest:
    """Return a manifest without its unusable rows and without copies of a recording that it has already.

    no_speech, reading, kind: see `load_manifest`. Raises Stopped once `stop` is set; the headers read by then are kept.
    """
    index = AudioIndex(FactStore(store / CACHE), stop)
    try:
        return _without_twins(
            load_manifest(
                path, max_duration_s=max_duration_s, index=index, no_speech=no_speech, reading=reading, kind=kind
            ),
            index,
        )
    finally:
        index.save()


def check_usable(manifest: Manifest) -> None:
    if not manifest.samples:
        raise DataError(f"{manifest.path}: no usable row", remedy=described(manifest.problems))


def described(problems: Sequence[Problem]) -> str:
    """Return the counts by kind, then the first few problems, one a line."""
    if not problems:
        return "It has no rows."
    rows = counted(len(problems), "row")
    return f"{rows} left out: {counts(problems)}\n  " + "\n  ".join(listed(problems, SHOWN))


def _without_twins(manifest: Manifest, index: AudioIndex) -> Manifest:
    by_audio = {sample.audio: sample for sample in manifest.samples}
    problems = []
    for audio, first in index.twins(by_audio).items():
        sample, other = by_audio[audio], by_audio[first]
        same = sample.text == other.text
        where = place_of(other.file, other.line)
        what = f"{audio.name} holds the same audio {'and text ' if same else ''}as {first.name} of {where}"
        problems.append(_problem(sample, what, Kind.SAME_ROW if same else Kind.SAME_AUDIO))
    return _without(manifest, problems)


def trainable(manifest: Manifest, limit: TokenLimit) -> Manifest:
    """Leave out the rows in a language that the model does not know, and those whose text has too many tokens."""
    problems = []
    for sample in manifest.samples:
        if sample.language and not limit.knows(sample.language):
            what = f"{sample.id}: the model does not know the language '{sample.language}'"
            problems.append(_problem(sample, what, Kind.LANGUAGE))
        elif excess := limit.excess(sample.text, *sample.way):
            problems.append(_problem(sample, f"{sample.id}: {excess}", Kind.TOKENS))
    return _without(manifest, problems)


def _problem(sample: Sample, what: str, kind: Kind) -> Problem:
    return Problem(sample.line, what, kind, sample.file)


def _without(manifest: Manifest, problems: Sequence[Problem]) -> Manifest:
    bad = {(problem.file, problem.line) for problem in problems}
    kept = tuple(sample for sample in manifest.samples if (sample.file, sample.line) not in bad)
    every = tuple(sorted([*manifest.problems, *problems], key=attrgetter("file", "line")))
    return replace(manifest, samples=kept, problems=every)


def _refuse(problems: Sequence[tuple[Path, Sequence[Problem]]], list_path: Path) -> None:
    write_problems(list_path, problems)
    every = [problem for _, found in problems for problem in found]
    named = [replace(one, file=f"{path.name} {one.file}".strip()) for path, found in problems for one in found]
    rows, shown = counted(len(every), "row"), "\n  ".join(listed(named, REFUSED_SHOWN))
    raise DataError(
        f"{rows} cannot be used ({counts(every)}), and bad_rows = refuse:\n  {shown}",
        remedy=f"All of them are listed in {list_path}. Fix or remove them, or set bad_rows = skip.",
    )
