"""Kaldi's data folders: text and wav.scp, with segments and utt2spk where there are such files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from whisper_tuner.data.formats.place import Place, parts_by_folder, read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Kind

NO_FILE = re.compile(r"\||.*\|$|.*\.ark:\d+")  # a command whose output is the audio, or a place in an archive


def recognises(place: Place) -> bool:
    return bool(_lists(place))


def parts(place: Place, reading: Reading) -> Parts:
    return parts_by_folder(place, _lists(place), partial(_part, place.path, reading), with_others=False)


def _lists(place: Place) -> list[PurePosixPath]:
    return [file for file in place.named("text") if (place.path / file).with_name("wav.scp").is_file()]


def _part(root: Path, reading: Reading, path: Path, lists: Sequence[PurePosixPath]) -> Part:
    folders = [root / file.parent for file in lists]
    for folder in folders:
        for number, _, name in _lines(folder / "wav.scp", reading):
            if NO_FILE.match(name):
                what = f"{folder}/wav.scp line {number} names a command or a part of an archive: {name[:60]}"
                raise DataError(what, remedy="Write each recording into a file, and name that; no command is run.")
    return Part(
        path=path,
        layout="Kaldi",
        rows=partial(_rows, root, lists, reading),
        folder=root,
        beside=(*folders, *root.absolute().parents[:2]),  # a recipe runs above its data/train
        cut="its clips are parts of recordings" if any((one / "segments").is_file() for one in folders) else "",
    )


def _rows(root: Path, lists: Sequence[PurePosixPath], reading: Reading) -> Iterator[Row]:
    for file in lists:
        tables = ((root / file).with_name(name) for name in ("wav.scp", "segments", "utt2spk"))
        audio, segments, speakers = ({key: rest for _, key, rest in _lines(path, reading)} for path in tables)
        for number, utterance, words in _lines(root / file, reading):
            recording, *times = segments.get(utterance, "").split() or ["" if segments else utterance]
            if recording not in audio:
                lacks = f"wav.scp has no {recording}" if recording else f"segments has no {utterance}"
                none = "" if segments else ", and there is no segments, which would say whose part it is"
                yield Row(number, BadRow(Kind.NO_AUDIO, f"{lacks}{none}"), str(file))
                continue
            cells = {"id": utterance, "audio": audio[recording], "speaker": speakers.get(utterance, "")}
            try:
                start, end = map(float, times or (0, 0))
                span = {"offset": start, "duration": round(end - start, 3)} if times else {}
                yield Row(number, {**cells, "text": words, **span}, str(file))
            except ValueError:
                yield Row(number, BadRow(Kind.DURATION, f"segments: no times in seconds: {' '.join(times)}"), str(file))


def _lines(path: Path, reading: Reading) -> Iterator[tuple[int, str, str]]:
    """(number, first word, the rest); nothing where there is no such file. Raises DataError."""
    for number, line in enumerate(read_text(path, reading)[0].split("\n") if path.is_file() else (), 1):
        if words := line.split(maxsplit=1):
            yield number, words[0], " ".join(words[1:]).strip()
