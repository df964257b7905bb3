"""LibriSpeech's tree: train-clean-100/84/121123/84-121123.trans.txt, and each utterance as a FLAC beside it.

And that of MLS, made from it: train/transcripts.txt with tabs, and train/audio/84/121123/84_121123_000000.flac.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from whisper_tuner.data.formats.place import Place, first_line, parts_by_folder, read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.problems import Kind

LISTS, MLS = ".trans.txt", "transcripts.txt"
OF_MLS = re.compile(r"\d+_\d+_\d+\t")
SUFFIXES = (".flac", ".opus")
CAPITALS = "its texts are all in capitals, without punctuation, and a model learns to write so"
SMALL = "its texts are all in small letters, without punctuation, and a model learns to write so"


def recognises(place: Place) -> bool:
    return _is_ours(place.path) if place.is_file else bool(_lists(place))


def parts(place: Place, reading: Reading) -> Parts:
    if place.is_file:
        return {"train": _part(place.path.parent, reading, place.path, [PurePosixPath(place.path.name)])}
    return parts_by_folder(place, _lists(place), partial(_part, place.path, reading), with_others=False)


def _is_ours(path: Path) -> bool:
    return path.name.endswith(LISTS) or (path.name == MLS and OF_MLS.match(first_line(path)) is not None)


def _lists(place: Place) -> list[PurePosixPath]:
    return [file for file in place.named(f"*{LISTS}", MLS) if _is_ours(place.path / file)]


def _part(root: Path, reading: Reading, path: Path, lists: Sequence[PurePosixPath]) -> Part:
    is_mls = lists[0].name == MLS
    return Part(
        path=path,
        layout="MLS" if is_mls else "LibriSpeech",
        rows=partial(_rows, root, lists, reading),
        folder=root,
        facts={"lists": f"{len(lists)} files {lists[0].name if is_mls else LISTS}", "speaker": "the first number"},
        notes=(SMALL if is_mls else CAPITALS,),
    )


def _rows(root: Path, lists: Sequence[PurePosixPath], reading: Reading) -> Iterator[Row]:
    for file in lists:
        mark, between = ("_", "\t") if file.name == MLS else ("-", " ")
        text, _, _ = read_text(root / file, reading)
        for number, line in enumerate(text.splitlines(), 1):
            utterance, _, words = line.strip().partition(between)
            speaker, *more = utterance.split(mark)
            if not utterance:
                continue
            if not more:
                what = f"no utterance such as 84{mark}121123{mark}0000 at its beginning: {line.strip()[:40]}"
                yield Row(number, BadRow(Kind.COLUMNS, what), str(file))
                continue
            folder = file.parent / "audio" / speaker / more[0] if file.name == MLS else file.parent
            there = (folder / f"{utterance}{suffix}" for suffix in SUFFIXES)
            audio = next((path for path in there if (root / path).is_file()), folder / utterance)  # it may be converted
            yield Row(number, {"id": utterance, "audio": str(audio), "text": words, "speaker": speaker}, str(file))
