"""Long recordings with subtitles beside them (talk.mp4, talk.srt or talk.vtt), cut at cues into clips of up to 30 s.

Another kind of text with times needs a line in READERS, and a function that gives its cues.
"""

from __future__ import annotations

import contextlib
import html
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from whisper_tuner.data.formats.place import Place, first_line, parts_by_folder, read_bytes, read_text
from whisper_tuner.data.formats.rows import AUDIO_COLUMNS, BadRow, Part, Parts, Reading, Row
from whisper_tuner.errors import DataError
from whisper_tuner.files import AUDIO_SUFFIXES, is_audio
from whisper_tuner.problems import Kind
from whisper_tuner.text import counted, parse_json
from whisper_tuner.timed_text import Said, timed_text_of, without_overlaps

LONGEST_S = 30.0  # what Whisper hears at once
LONGEST_GAP_S = 1.0  # in a longer one something may be said that no cue has
ROLLING_S = 0.1  # how long such captions show a line alone
SAME_S = 0.5  # between the times of two files of one recording
WHY_CUT = "its clips are parts of long recordings"
TIME = r"(?:(\d+):)?(\d{1,2}):(\d{1,2})[.,](\d{1,3})"
TIMES = re.compile(rf"\s*{TIME}\s*-->\s*{TIME}(?:\s.*)?")
MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")  # <i>, <c.yellow>, <00:00:01.000>; {\an8}
NO_CUES = ("NOTE", "STYLE", "REGION")


@dataclass(frozen=True)
class Cue:
    """Seconds, the lines of text, and where they stand in the file."""

    start: float
    end: float
    lines: tuple[str, ...]
    line: int


Found = Cue | tuple[int, BadRow]
"""A cue; or what looks like one and is none, with its line."""


def cues(text: str) -> Iterator[Found]:
    """Yield the cues of an SRT or a WebVTT file."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        block = at
        while at < len(lines) and lines[at].strip():
            at += 1
        if block < at:
            yield from _cue(lines[block:at], block + 1)
        at += 1


def _cue(block: list[str], first: int) -> Iterator[Found]:
    """Read lines without an empty one between; the first stands in this line of the file."""
    numbered = block[0].strip().isdigit()
    place = next((number for number, line in enumerate(block[:2]) if "-->" in line), None)
    if place is None:
        header = first == 1 and block[0].lstrip("\ufeff").startswith("WEBVTT")
        if not (header or block[0].startswith(NO_CUES) or (len(block) == 1 and numbered)):
            what = f"no times of a cue: {block[numbered].strip()[:60]}"
            yield first + numbered, BadRow(Kind.COLUMNS, what)
        return
    if not (match := TIMES.fullmatch(block[place])):
        yield first + place, BadRow(Kind.COLUMNS, f"not the times of a cue: {block[place].strip()[:60]}")
        return
    lines = [html.unescape(MARKUP.sub("", text)) for text in block[place + 1 :]]
    yield from _timed(_seconds(match.groups()[:4]), _seconds(match.groups()[4:]), lines, first + place)


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = (part or "0" for part in parts)
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + int(fraction.ljust(3, "0")) / 1000


def whisper_json(text: str) -> Iterator[Found]:
    """Yield the segments of a JSON that Whisper has written, or whisper.cpp."""
    for number, one in enumerate(_segments(text) or (), 1):
        try:
            times = one["offsets"] if "offsets" in one else {"from": 1000 * one["start"], "to": 1000 * one["end"]}
            yield from _timed(times["from"] / 1000, times["to"] / 1000, [one["text"]], 1)
        except (TypeError, KeyError, AttributeError, OverflowError):
            yield 1, BadRow(Kind.COLUMNS, f"segment {number} has no start, end and text")


def _segments(text: str | bytes) -> list[Any] | None:
    """The segments of a JSON of Whisper's; None in any other."""
    with contextlib.suppress(ValueError):
        whole = parse_json(text)
        if not isinstance(whole, dict) or set(whole) & set(AUDIO_COLUMNS):  # a row of a list of recordings
            return None
        found = whole.get("segments", whole.get("transcription"))
        if isinstance(found, list) and all(isinstance(one, dict) and "text" in one for one in found):
            return found if found or {"text", "result"} & set(whole) else None
    return None


def _timed(start: float, end: float, lines: Iterable[str], line: int) -> Iterator[Found]:
    """The cue, if it has words."""
    spoken = tuple(said for text in lines if (said := " ".join(text.split())))
    if not 0 <= start < end < math.inf:
        yield line, BadRow(Kind.DURATION, f"a cue that ends before it begins: {start:g} s to {end:g} s")
    elif spoken:
        yield Cue(start, end, spoken, line)


READERS: dict[str, Callable[[str], Iterator[Found]]] = {".srt": cues, ".vtt": cues, ".json": whisper_json}


def holds_cues(path: Path) -> bool:
    """Tell if a file has text with times by its name; of a JSON, which may be anything, by what is in it."""
    if path.suffix.lower() != ".json":
        return path.suffix.lower() in READERS
    try:
        return first_line(path).lstrip().startswith("{") and _segments(read_bytes(path)) is not None
    except DataError:
        return False


def recognises(place: Place) -> bool:
    if not place.is_file:
        audio = {file.with_suffix("") for file in place.files if is_audio(file)}
        return any(_recording(file, audio) and holds_cues(place.path / file) for file in place.files)
    if not is_audio(place.path):
        return holds_cues(place.path)
    beside = (path for path in place.path.parent.iterdir() if holds_cues(path))
    return any(_recording(PurePosixPath(path.name), {PurePosixPath(place.path.stem)}) for path in beside)


def parts(place: Place, reading: Reading) -> Parts:
    if not place.is_file:
        ours = [file for file in place.files if is_audio(file) or holds_cues(place.path / file)]
        return parts_by_folder(place, ours, partial(_part, place.path, reading))
    path, is_text = place.path, not is_audio(place.path)
    stem, is_wanted = path.stem, is_audio if is_text else holds_cues
    if is_text and not any(path.with_suffix(suffix).is_file() for suffix in AUDIO_SUFFIXES):
        stem = Path(stem).stem  # of talk.en.srt
    same = [file for file in sorted(path.parent.iterdir()) if file.name.startswith(f"{stem}.") and file.is_file()]
    names = [PurePosixPath(file.name) for file in same if file == path or is_wanted(file)]
    return {"train": _part(path.parent, reading, path, names)}


def _part(root: Path, reading: Reading, path: Path, files: Sequence[PurePosixPath]) -> Part:
    texts = sum(not is_audio(file) for file in files)
    return Part(
        path=path,
        layout="recordings with subtitles beside each",
        rows=partial(_rows, root, files, reading),
        folder=root,
        facts={
            "files": f"{counted(len(files) - texts, 'recording')}, {counted(texts, 'subtitle file')}",
            "clips": f"neighbouring cues, joined up to {LONGEST_S:g} s where less than {LONGEST_GAP_S:g} s is between",
        },
        cut=WHY_CUT,
    )


def _rows(root: Path, files: Sequence[PurePosixPath], reading: Reading) -> Iterator[Row]:
    recordings: dict[PurePosixPath, list[PurePosixPath]] = {}
    for file in files:
        if is_audio(file):
            recordings.setdefault(file.with_suffix(""), []).append(file)
    texts: dict[PurePosixPath, list[PurePosixPath]] = {name: [] for name in recordings}
    for file in files:
        if not is_audio(file):
            if name := _recording(file, recordings):
                texts[name].append(file)
            else:
                yield Row(0, BadRow(Kind.NO_AUDIO, "there is no recording of this name beside it"), str(file))
    for name, audio in recordings.items():
        yield from _rows_of(root, audio, texts[name], reading)


def _recording(text: PurePosixPath, recordings: Container[PurePosixPath]) -> PurePosixPath | None:
    """talk.srt and talk.en.srt both belong to talk.mp4."""
    whole = text.with_suffix("")
    return next((name for name in (whole, whole.with_suffix("")) if name in recordings), None)


def _rows_of(
    root: Path, audio: Sequence[PurePosixPath], texts: Sequence[PurePosixPath], reading: Reading
) -> Iterator[Row]:
    file = str((texts or audio)[0])
    try:
        file, found = _read(root, audio, texts, reading)
    except BadRow as reason:
        yield Row(0, reason, file)
        return
    yield from (Row(one[0], one[1], file) for one in found if isinstance(one, tuple))
    if not found:
        yield Row(0, BadRow(Kind.NO_TEXT, "there is no cue in it"), file)
    stem = audio[0].with_suffix("")
    for group in _joined(_without_rolling([one for one in found if isinstance(one, Cue)])):
        start, end = group[0].start, max(cue.end for cue in group)
        said = [Said(cue.start - start, cue.end - start, " ".join(cue.lines)) for cue in group]
        apart = [*without_overlaps(said)]  # times within the clip; those of one part would be the clip's
        cells = {
            "id": f"{stem}-{round(start * 1000):08d}",
            "audio": str(audio[0]),
            "offset": start,
            "duration": round(end - start, 3),
            "text": " ".join(one.text for one in said),
            "timed_text": timed_text_of(apart) if len(apart) > 1 else "",
        }
        yield Row(group[0].line, cells, file)


def _read(
    root: Path, audio: Sequence[PurePosixPath], texts: Sequence[PurePosixPath], reading: Reading
) -> tuple[str, list[Found]]:
    """Read the subtitles of a recording; of several files that say the same, one. Raises BadRow."""
    if not texts:
        raise BadRow(Kind.NO_TEXT, "there are no subtitles of this name beside it")
    texts = sorted(texts, key=lambda text: [*READERS].index(text.suffix.lower()))
    try:
        first, *others = (list(READERS[text.suffix.lower()](read_text(root / text, reading)[0])) for text in texts)
    except DataError as error:
        raise BadRow(Kind.NO_TEXT, " ".join(str(error).split())) from None
    if len(audio) > 1 or not all(_alike(first, other) for other in others):
        several = ", ".join(one.name for one in (audio if len(audio) > 1 else texts))
        raise BadRow(Kind.COLUMNS, f"several files of this name that differ ({several}): move all but one away")
    return str(texts[0]), first


def _alike(*files: Sequence[Found]) -> bool:
    """Tell if two files say the same words, and begin and end at the same time."""
    one, other = (_without_rolling([cue for cue in found if isinstance(cue, Cue)]) for found in files)
    words, same = (" ".join(line for cue in found for line in cue.lines) for found in (one, other))
    is_far = one and other and max(abs(one[0].start - other[0].start), abs(one[-1].end - other[-1].end)) > SAME_S
    return words == same and not is_far


def _without_rolling(found: Sequence[Cue]) -> list[Cue]:
    """YouTube's own captions show each line twice, as it is said and above the next one: the first time counts."""
    kept: list[Cue] = []
    before: tuple[str, ...] = ()
    for cue in sorted(found, key=lambda cue: cue.start):
        lines = cue.lines
        is_rolling = len(lines) > 1 or cue.end - cue.start < ROLLING_S  # else somebody says it once more
        if kept and lines[0] == before[-1] and cue.start - kept[-1].end <= LONGEST_GAP_S and is_rolling:
            lines = lines[1:]
        before = cue.lines
        if lines:
            kept.append(Cue(cue.start, cue.end, lines, cue.line))
    return kept


def _joined(found: Sequence[Cue]) -> Iterator[list[Cue]]:
    """Neighbours that make one clip, up to LONGEST_S, unless they are far apart."""
    group: list[Cue] = []
    for cue in found:
        if group and (cue.end - group[0].start > LONGEST_S or cue.start - group[-1].end > LONGEST_GAP_S):
            yield group
            group = []
        group.append(cue)
    if group:
        yield group
