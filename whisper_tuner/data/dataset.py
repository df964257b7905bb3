"""Manifests: lists of audio files with what is said in each.

A row that cannot be used is left out and listed with its line and the reason. Only a manifest that cannot be used at
all is an error.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.data.audio_check import SHORTEST_S, AudioIndex
from whisper_tuner.data.formats import AUDIO_COLUMNS, TEXT_COLUMNS, BadRow, cell, manifest_rows
from whisper_tuner.data.problems import Kind, Problem
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import write_shared
from whisper_tuner.languages import language_code
from whisper_tuner.paths import expanded

DURATION_COLUMNS = ("duration_s", "duration")
ID_COLUMNS = ("id",)
LANGUAGE_COLUMNS = ("language",)
SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
MAX_DURATION_S = 30.0  # the longest input of Whisper's encoder
# A stated duration that differs by more from the measured one means another recording, or one cut short.
DIFFERENT_S, DIFFERENT_SHARE = 0.5, 0.1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip and its transcript; `line` is where its manifest names it.

    An empty text says that there is no speech. language: the code of this clip's, "" if it is the profile's.
    speaker: who speaks, in the manifest's own words; "" if it does not say.
    """

    id: str
    audio: Path
    text: str
    duration_s: float
    line: int = 0
    language: str = ""
    speaker: str = ""


@dataclass(frozen=True)
class Manifest:
    path: Path
    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...]


def load_manifest(
    path: str | Path,
    *,
    max_duration_s: float = MAX_DURATION_S,
    check_audio: bool = True,
    index: AudioIndex | None = None,
    no_speech: bool = False,
) -> Manifest:
    """Read a manifest; audio paths are relative to its folder. Every audio file's header is read, through `index`.

    no_speech: a row without text is a clip without speech. Else it cannot be used.

    With `check_audio=False` no audio file is opened: a host has only its own shard of them. Then each row must state
    its duration.
    Raises DataError for a missing or unreadable file, or a header without an audio and a text column.
    """
    path = Path(path)
    rows = list(manifest_rows(path))
    index = (index or AudioIndex()) if check_audio else None
    if index is not None:
        index.fill(path.parent / name for _, row in rows if (name := _audio_of(row)))
    samples: list[Sample] = []
    problems = []
    seen: dict[tuple[str, str], Sample] = {}
    for line, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            sample = _sample(row, line, path.parent, max_duration_s, index, no_speech=no_speech)
            _check_unseen(sample, seen)
            samples.append(sample)
        except BadRow as reason:
            problems.append(Problem(line, str(reason), reason.kind))
    return Manifest(path, tuple(samples), tuple(problems))


def _check_unseen(sample: Sample, seen: dict[tuple[str, str], Sample]) -> None:
    """Raise BadRow for the id or the audio of an earlier row; else remember both."""
    own_id, audio = ("id", sample.id), ("audio", os.path.normpath(sample.audio))
    if (first := seen.get(audio)) and first.text == sample.text:
        raise BadRow(Kind.SAME_ROW, f"the same audio and text as line {first.line}")
    if first:
        raise BadRow(Kind.SAME_AUDIO, f"{sample.audio.name} was already used on line {first.line}")
    if first := seen.get(own_id):
        raise BadRow(Kind.SAME_ID, f"id '{sample.id}' was already used on line {first.line}")
    seen[own_id] = seen[audio] = sample


def write_manifest(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write a CSV that `load_manifest` reads back; audio inside the manifest's folder is named relative to it."""
    path = Path(path)
    listing = io.StringIO()
    writer = csv.writer(listing)
    samples = list(samples)
    more = [name for name in ("language", "speaker") if any(getattr(sample, name) for sample in samples)]
    writer.writerow(["id", "audio_path", "transcription", "duration_s", *more])
    for sample in samples:
        inside = sample.audio.is_relative_to(path.parent)
        audio = sample.audio.relative_to(path.parent) if inside else sample.audio
        own = [getattr(sample, name) for name in more]
        writer.writerow([sample.id, audio.as_posix(), sample.text, f"{sample.duration_s:.3f}", *own])
    write_shared(path, listing.getvalue())


def _sample(
    row: dict[str, object],
    line: int,
    folder: Path,
    max_duration_s: float,
    index: AudioIndex | None,
    *,
    no_speech: bool,
) -> Sample:
    name, text = _audio_name(row), cell(row, TEXT_COLUMNS)
    if not name:
        raise BadRow(Kind.NO_AUDIO, "no audio path")
    audio = folder / name
    if index is not None and (found := index[audio].kind):
        raise BadRow(Kind(found), index[audio].what)
    if not (text or no_speech):
        raise BadRow(Kind.NO_TEXT, "empty text")
    seconds = _duration(cell(row, DURATION_COLUMNS), audio, index)
    longest = max(seconds, index[audio].seconds) if index is not None else seconds
    if longest > max_duration_s:
        raise BadRow(Kind.TOO_LONG, f"{name} lasts {longest:.1f} s, more than {max_duration_s:g} s")
    return Sample(
        id=cell(row, ID_COLUMNS) or str(name),
        audio=audio,
        text=text,
        duration_s=seconds,
        line=line,
        language=_language(cell(row, LANGUAGE_COLUMNS)),
        speaker=cell(row, SPEAKER_COLUMNS),
    )


def _language(stated: str) -> str:
    try:
        return language_code(stated) if stated else ""
    except ConfigError as error:
        raise BadRow(Kind.LANGUAGE, error.args[0]) from None


def _duration(stated: str, audio: Path, index: AudioIndex | None) -> float:
    """Seconds, as stated or else as measured."""
    if not stated:
        if index is None:
            raise BadRow(Kind.DURATION, "no duration is stated, and its audio is not on this machine")
        return index[audio].seconds
    try:
        seconds = float(stated)
    except ValueError:
        raise BadRow(Kind.DURATION, f"duration '{stated}' is not a number of seconds") from None
    if not SHORTEST_S <= seconds < float("inf"):
        raise BadRow(Kind.DURATION, f"{audio.name} lasts {seconds:g} s")
    if index is not None:
        measured = index[audio].seconds
        if abs(seconds - measured) > max(DIFFERENT_S, DIFFERENT_SHARE * measured):
            raise BadRow(Kind.DURATION, f"{audio.name} lasts {measured:.2f} s, but the manifest says {seconds:g} s")
    return seconds


def _audio_of(row: dict[str, object] | BadRow) -> Path | None:
    try:
        return _audio_name(row) if isinstance(row, dict) else None
    except BadRow:
        return None


def _audio_name(row: dict[str, object]) -> Path | None:
    name = cell(row, AUDIO_COLUMNS)
    return expanded(name) if name else None
