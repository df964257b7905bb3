"""Folders of recordings with a text of the same name beside each: a.wav and a.txt.

LibriTTS has two, a.original.txt and a.normalized.txt, in which numbers are words: that one is used.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from whisper_tuner.data.formats.place import Place, parts_by_folder, read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.errors import DataError
from whisper_tuner.files import AUDIO_SUFFIXES
from whisper_tuner.problems import Kind
from whisper_tuner.text import counted

TEXT, NORMALIZED, ORIGINAL = ".txt", ".normalized.txt", ".original.txt"
LIBRITTS = f"texts are those in {NORMALIZED}, with numbers as words, not those in {ORIGINAL}"


def recognises(place: Place) -> bool:
    if place.is_file:
        return place.path.suffix.lower() in AUDIO_SUFFIXES and place.path.with_suffix(TEXT).is_file()
    audio = {file.with_suffix("") for file in place.files if file.suffix.lower() in AUDIO_SUFFIXES}
    return any(_recording(file, audio) in audio for file in place.named(f"*{TEXT}"))


def parts(place: Place, reading: Reading) -> Parts:
    if place.is_file:
        names = [PurePosixPath(place.path.name), PurePosixPath(place.path.with_suffix(TEXT).name)]
        return {"train": _part(place.path.parent, reading, place.path, names)}
    twins = {file.with_name(file.name.replace(NORMALIZED, ORIGINAL)) for file in place.named(f"*{NORMALIZED}")}
    ours = [file for file in place.files if file.suffix.lower() in (*AUDIO_SUFFIXES, TEXT) and file not in twins]
    return parts_by_folder(place, ours, partial(_part, place.path, reading))


def _recording(text: PurePosixPath, recordings: Container[PurePosixPath]) -> PurePosixPath:
    """Return the name of the recording that a text belongs to, without its extension."""
    whole = text.with_suffix("")
    return whole.with_suffix("") if text.name.endswith(NORMALIZED) and whole not in recordings else whole


def _part(root: Path, reading: Reading, path: Path, files: Sequence[PurePosixPath]) -> Part:
    texts = sum(file.suffix.lower() == TEXT for file in files)
    return Part(
        path=path,
        layout="recordings with a text beside each",
        rows=partial(_rows, root, files, reading),
        folder=root,
        facts={"files": f"{counted(len(files) - texts, 'recording')}, {counted(texts, 'text')}"},
        notes=(LIBRITTS,) if any(file.name.endswith(NORMALIZED) for file in files) else (),
    )


def _rows(root: Path, files: Sequence[PurePosixPath], reading: Reading) -> Iterator[Row]:
    groups: dict[PurePosixPath, list[PurePosixPath]] = {}
    audio_names = {file.with_suffix("") for file in files if file.suffix.lower() != TEXT}
    for file in files:
        is_text = file.suffix.lower() == TEXT
        groups.setdefault(_recording(file, audio_names) if is_text else file.with_suffix(""), []).append(file)
    for name, group in groups.items():
        texts = [file for file in group if file.suffix.lower() == TEXT]
        audio = [file for file in group if file not in texts]
        cells: dict[str, object] | BadRow
        if not audio:
            cells = BadRow(Kind.NO_AUDIO, f"there is no recording {name.name} beside it")
        elif not texts:
            cells = BadRow(Kind.NO_TEXT, f"there is no {name.name}{TEXT} beside it")
        elif len(audio) > 1 or len(texts) > 1:
            several = ", ".join(file.name for file in (audio if len(audio) > 1 else texts))
            cells = BadRow(Kind.NO_AUDIO, f"several files of this name ({several}): rename or remove one")
        else:
            try:
                words = read_text(root / texts[0], reading)[0].split()
                cells = {"id": str(name), "audio": str(audio[0]), "text": " ".join(words)}
                if texts[0].name.endswith(NORMALIZED):
                    cells["speaker"] = name.name.partition("_")[0]
            except DataError as error:
                cells = BadRow(Kind.NO_TEXT, " ".join(str(error).split()))
        yield Row(0, cells, str((texts or audio)[0]))
