"""Manifests: lists of audio files with what is said in each.

A row that cannot be used is left out and listed with its line and the reason. Only a manifest that cannot be used at
all is an error.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from whisper_tuner.config import TASKS
from whisper_tuner.data.audio_check import SHORTEST_S, AudioIndex
from whisper_tuner.data.formats.layouts import part_of
from whisper_tuner.data.formats.rows import (
    AS_IT_IS,
    LANGUAGE_COLUMNS,
    SPEAKER_COLUMNS,
    TASK_COLUMNS,
    TIMED_COLUMNS,
    UNLIKE,
    WRITTEN,
    AudioNames,
    BadRow,
    Cells,
    ClipIds,
    Part,
    Reading,
    Row,
    cell,
    closeness,
)
from whisper_tuner.data.formats.times import OTHER_S, agree, is_whole, span_of
from whisper_tuner.errors import ConfigError, DataError
from whisper_tuner.files import expanded, write_shared
from whisper_tuner.languages import language_code
from whisper_tuner.problems import Kind, Problem, place_of
from whisper_tuner.text import counted
from whisper_tuner.timed_text import why_unusable

MAX_DURATION_S = 30.0  # the longest input of Whisper's encoder
PARTS = "its rows are parts of longer recordings (offset, or start and end)"
MOST_LETTERS = 10_000  # of a short clip's text, and 100 more a second: a tokenizer would take long for millions
AT_ONCE = 200  # rows whose audio is looked at together


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip and its transcript; `line` is where its manifest names it, in `file` if it is of several files.

    An empty text says that there is no speech. language, task: this clip's, "" if they are the profile's. speaker: who
    speaks, in the manifest's own words; "" if it does not say. timed_text: the text with the times of its parts (see
    timed_text.py), "" if they are not known.
    """

    id: str
    audio: Path
    text: str
    duration_s: float
    line: int = 0
    language: str = ""
    task: str = ""
    speaker: str = ""
    file: str = ""
    timed_text: str = ""

    @property
    def way(self) -> tuple[str, str]:
        """Return its language and task, which go into the prompt."""
        return self.language, self.task

    def with_text(self, text: str) -> Sample:
        """Return a copy with another text. Times stay if it differs in its spaces only."""
        unusable = self.timed_text and why_unusable(self.timed_text, text, self.duration_s)
        return replace(self, text=text, timed_text="" if unusable else self.timed_text)


@dataclass(frozen=True)
class Manifest:
    """notes: what its reader decided by itself, and its user must know. language: see Part.

    added: other lists, whose clips are among the samples as well, behind those of its own.
    """

    path: Path
    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    language: str = ""
    added: tuple[Manifest, ...] = ()

    @property
    def lists(self) -> tuple[Manifest, ...]:
        """Return a manifest of its own samples, and those that were added."""
        own = len(self.samples) - sum(len(each.samples) for each in self.added)
        return replace(self, samples=self.samples[:own], added=()), *self.added


def load_manifest(
    path: str | Path,
    *,
    max_duration_s: float = MAX_DURATION_S,
    check_audio: bool = True,
    index: AudioIndex | None = None,
    no_speech: bool = False,
    reading: Reading = AS_IT_IS,
    kind: str = "train",
    repeats: bool = False,
) -> Manifest:
    """Read a data set of any layout whose audio can be used where it lies. Every header is read, through `index`.

    no_speech: a row without text is a clip without speech. Else it cannot be used. reading: what the user says of it.
    kind: which part of a folder that has several. repeats: a recording may be named again, as in a run's own lists.

    With `check_audio=False` no audio file is opened: a host has only its own shard of them. Then each row must state
    its duration.
    Raises DataError for what cannot be read as a whole, as a header without an audio and a text column.
    """
    part = part_of(Path(path), reading, kind)
    if part.cut:
        raise _must_be_imported(path, part.cut)
    index = (index or AudioIndex()) if check_audio else None
    reader = PartReader(part, index, max_duration_s=max_duration_s, no_speech=no_speech, repeats=repeats)
    samples: list[Sample] = []
    problems: list[Problem] = []
    for found in reader.read(part.rows()):
        if isinstance(found, Sample):
            samples.append(found)
        else:
            problems.append(found)
    return Manifest(
        part.path, tuple(samples), tuple(problems), (*part.notes, *reader.notes), stated_language(part, samples)
    )


def stated_language(part: Part, samples: Iterable[Sample]) -> str:
    """Return what all clips are in, by their own word, such as zh-CN; "" if some do not say, or differ."""
    stated = {sample.language for sample in samples}
    return part.language or (stated.pop() if len(stated) == 1 else "")


def _must_be_imported(path: str | Path, why: str) -> DataError:
    return DataError(
        f"{path}: {why}, and must be taken out first",
        remedy=f"Run: multimac data import {shlex.quote(str(path))} --out NAME; then name NAME/train.csv in its place.",
    )


class PartReader:
    """Makes samples of the rows of a part. `index`: the headers of its audio; None if that is not here."""

    def __init__(
        self, part: Part, index: AudioIndex | None, *, max_duration_s: float, no_speech: bool, repeats: bool = False
    ):
        self._part, self._index = part, index
        self._names = AudioNames((part.folder, *part.beside), part.bounds) if index is not None else None
        self._max_duration_s, self._no_speech, self._repeats = max_duration_s, no_speech, repeats
        self._ids = ClipIds()
        self._closest: dict[Path, int] | None = None  # how closely any row names a file
        self._seen: dict[str, tuple[str, str]] = {}  # where a file was used, and its text
        self._retold = 0  # rows that give such a file another text
        self._untimed: dict[str, list[int]] = {}  # lines, by why their times are not used
        self._unknown: dict[str, list[int]] = {}  # lines, by the locale that Whisper does not know

    @property
    def notes(self) -> list[str]:
        """How names of audio were understood that are not those of the files; which times are not used."""
        own = self._part.path.name
        changed = self._names.changed.most_common() if self._names else ()
        names = [f"{own}: {number} names of audio were {how}" for how, number in changed]
        times = [
            f"{own}: the timed_text of {counted(len(lines), 'row')} {why}, first on line {lines[0]}: it is not used"
            for why, lines in self._untimed.items()
        ]
        times += [
            f"{own}: Whisper knows no language {name!r}, so it is not used ({counted(len(lines), 'row')})"
            for name, lines in self._unknown.items()
        ]
        if lines := self._ids.renamed:
            told = f"the id of {counted(len(lines), 'row')} is that of an earlier one, first on line {lines[0]}"
            names.append(f"{own}: {told}: it is called by its file")
        return names + times

    def read(self, rows: Iterable[Row]) -> Iterator[Sample | Problem]:
        """Read rows in their order; headers are read for many rows at once. Raises DataError."""
        rows = iter(rows)
        while some := list(islice(rows, AT_ONCE)):
            found = [self._audio(row) for row in some]
            if self._index is not None:
                self._index.fill(audio for audio in found if isinstance(audio, Path))
            for row, audio in zip(some, found, strict=True):
                try:
                    sample = self._sample(row, audio)
                    if not self._repeats:
                        self._check_unseen(sample)
                    yield sample
                except BadRow as reason:
                    yield Problem(row.line, str(reason), reason.kind, row.file)
        if self._retold > len(self._seen) / 2:
            told = counted(self._retold, "row")
            what = f"{self._part.path}: {told} with a recording of an earlier one, and another text"
            times = "a file segments" if self._part.layout == "Kaldi" else "columns start and end"
            remedy = f"If they are parts of it, write their times in {times}. Else keep one row of each."
            raise DataError(what, remedy=remedy)

    def _audio(self, row: Row) -> Path | BadRow:
        """Find the file of a row, or why there is none."""
        try:
            if isinstance(row.cells, BadRow):
                return row.cells
            if self._part.bounds:  # its text may be in a link, too
                self._part.bounds.check(self._part.folder / row.file if row.file else self._part.path)
            if not (name := cell(row.cells, self._part.reading.audio_names)):
                return BadRow(Kind.NO_AUDIO, "no audio path")
            if not self._names:
                return self._part.folder / expanded(name)
            found = self._names.find(name)
            if closeness(name, found) and self._is_of_another_row(name, found):
                return BadRow(Kind.NO_AUDIO, f"there is no {name}, and {found.name} is another row's")
            return found
        except BadRow as reason:
            return reason

    def _is_of_another_row(self, name: str, found: Path) -> bool:
        """Tell whether another row, of whatever part, names more closely the file that was found for this name."""
        if self._closest is None:  # read only now: most data sets name their files as they are
            self._closest = {}
            names = AudioNames((self._part.folder, *self._part.beside), self._part.bounds)
            for row in (self._part.all_rows or self._part.rows)():
                with contextlib.suppress(BadRow):
                    if isinstance(row.cells, BadRow) or not (other := cell(row.cells, self._part.reading.audio_names)):
                        continue
                    file = names.find(other)
                    self._closest[file] = min(closeness(other, file), self._closest.get(file, UNLIKE))
        return self._closest.get(found, UNLIKE) < closeness(name, found)

    def _sample(self, row: Row, audio: Path | BadRow) -> Sample:
        cells, index = row.cells, self._index
        if isinstance(cells, BadRow):
            raise cells
        name = cell(cells, self._part.reading.audio_names)
        # Before any reason to leave it out, so that others keep theirs once it is mended.
        own_id = self._ids.of(row, cells, name)
        if isinstance(audio, BadRow):
            raise audio
        text = cell(cells, self._part.reading.text_names)
        if index is not None and (found := index[audio].kind):
            raise BadRow(Kind(found), index[audio].what)
        if not (text or self._no_speech):
            raise BadRow(Kind.NO_TEXT, "empty text")
        seconds = self._duration(cells, audio)
        longest = max(seconds, index[audio].seconds) if index is not None else seconds
        if longest > self._max_duration_s:
            raise BadRow(Kind.TOO_LONG, f"{name} lasts {longest:.1f} s, more than {self._max_duration_s:g} s")
        if len(text) > MOST_LETTERS + 100 * seconds:
            raise BadRow(Kind.TOKENS, f"the text of {name} has {len(text)} characters")
        timed_text = cell(cells, TIMED_COLUMNS)
        if timed_text and (why := why_unusable(timed_text, text, seconds)):
            self._untimed.setdefault(why, []).append(row.line)
            timed_text = ""
        language = cell(cells, LANGUAGE_COLUMNS)
        try:
            language = language_code(language) if language else ""
        except ConfigError as error:
            if cell(cells, LANGUAGE_COLUMNS[:1]):
                raise BadRow(Kind.LANGUAGE, error.args[0]) from None
            self._unknown.setdefault(language, []).append(row.line)  # a locale may be of any language
            language = ""
        task = cell(cells, TASK_COLUMNS)
        return Sample(
            id=own_id,
            audio=audio,
            text=text,
            duration_s=seconds,
            language=language,
            task=task if task in TASKS else "",
            speaker=cell(cells, SPEAKER_COLUMNS),
            line=row.line,
            file=row.file,
            timed_text=timed_text,
        )

    def _duration(self, cells: Cells, audio: Path) -> float:
        """Seconds, as stated; as measured where nothing is stated, or something rounded."""
        start, seconds = span_of(cells)
        measured = self._index[audio].seconds if self._index is not None else seconds
        if measured is None:
            raise BadRow(Kind.DURATION, "no duration is stated, and its audio is not on this machine")
        if start is not None and not (start == 0 if seconds is None else is_whole(start, seconds, measured)):
            raise _must_be_imported(self._part.path, PARTS)
        if seconds is None:
            return measured
        if not SHORTEST_S <= seconds < float("inf"):
            raise BadRow(Kind.DURATION, f"{audio.name} lasts {seconds:g} s")
        if not agree(seconds, measured):
            raise BadRow(Kind.DURATION, f"{audio.name} lasts {measured:.2f} s, but the manifest says {seconds:g} s")
        return seconds if abs(seconds - measured) <= OTHER_S else measured

    def _check_unseen(self, sample: Sample) -> None:
        """Raise BadRow for the audio of an earlier row; else remember it."""
        audio = os.path.normpath(sample.audio)
        where = place_of(sample.file, sample.line)
        if first := self._seen.get(audio):
            if first[1] == sample.text:
                raise BadRow(Kind.SAME_ROW, f"the same audio and text as {first[0]}")
            self._retold += 1
            raise BadRow(Kind.SAME_AUDIO, f"{sample.audio.name} was already used on {first[0]}")
        self._seen[audio] = (where, sample.text)


def write_manifest(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write a CSV that `load_manifest` reads back; audio inside the manifest's folder is named relative to it."""
    path = Path(path)
    listing = io.StringIO()
    writer = csv.writer(listing)
    samples = list(samples)
    names = ("language", "task", "speaker", "timed_text")
    more = [name for name in names if any(getattr(sample, name) for sample in samples)]
    writer.writerow([*WRITTEN, *more])
    for sample in samples:
        inside = sample.audio.is_relative_to(path.parent)
        audio = sample.audio.relative_to(path.parent) if inside else sample.audio
        own = [getattr(sample, name) for name in more]
        writer.writerow([sample.id, audio.as_posix(), sample.text, f"{sample.duration_s:.3f}", *own])
    write_shared(path, listing.getvalue(), mode=0o600)
