"""Folders of recordings with a text of the same name beside each: a.wav and a.txt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from whisper_tuner.data.formats.encoding import read_text
from whisper_tuner.data.formats.place import Place, by_kind
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.data.problems import Kind
from whisper_tuner.errors import DataError
from whisper_tuner.paths import AUDIO_SUFFIXES

TEXT = ".txt"


def recognises(place: Place) -> bool:
    if place.is_file:
        return place.path.suffix.lower() in AUDIO_SUFFIXES and place.path.with_suffix(TEXT).is_file()
    audio = {file.with_suffix("") for file in place.files if file.suffix.lower() in AUDIO_SUFFIXES}
    return any(file.with_suffix("") in audio for file in place.named(f"*{TEXT}"))


def parts(place: Place, reading: Reading) -> Parts:
    if place.is_file:
        names = [PurePosixPath(place.path.name), PurePosixPath(place.path.with_suffix(TEXT).name)]
        return {"train": _part(place.path.parent, place.path, names, reading)}
    ours = [file for file in place.files if file.suffix.lower() in (*AUDIO_SUFFIXES, TEXT)]
    return in_folders(place, ours, partial(_part, place.path), reading)


def in_folders(place: Place, files: Sequence[PurePosixPath], part, reading: Reading) -> Parts:
    """Parts by the folders train/, dev/ and test/ where there is a train/; else one. `part(path, files, reading)`.

    What is outside of these folders is trained on, too.
    """
    kinds, others = by_kind(files)
    if "train" not in kinds:
        return {"train": part(place.path, files, reading)}
    kinds["train"] = [*others, *kinds["train"]]
    return {kind: part(_common(place.path, found), found, reading) for kind, found in kinds.items()}


def _common(root: Path, files: Sequence[PurePosixPath]) -> Path:
    first = {file.parts[0] for file in files}
    return root / first.pop() if len(first) == 1 else root


def _part(root: Path, path: Path, files: Sequence[PurePosixPath], reading: Reading) -> Part:
    texts = sum(file.suffix.lower() == TEXT for file in files)
    return Part(
        path=path,
        layout="recordings with a text beside each",
        rows=partial(_rows, root, files, reading),
        folder=root,
        facts={"files": f"{len(files) - texts} recordings, {texts} texts"},
    )


def _rows(root: Path, files: Sequence[PurePosixPath], reading: Reading) -> Iterator[Row]:
    groups: dict[PurePosixPath, list[PurePosixPath]] = {}
    for file in files:
        groups.setdefault(file.with_suffix(""), []).append(file)
    for name, group in groups.items():
        texts = [file for file in group if file.suffix.lower() == TEXT]
        audio = [file for file in group if file not in texts]
        yield Row(1, _cells(root, name, audio, texts, reading), str((texts or audio)[0]))


def _cells(root: Path, name: PurePosixPath, audio: list, texts: list, reading: Reading) -> dict[str, object] | BadRow:
    if not audio:
        return BadRow(Kind.NO_AUDIO, f"there is no recording {name.name} beside it")
    if not texts:
        return BadRow(Kind.NO_TEXT, f"there is no {name.name}{TEXT} beside it")
    if len(audio) > 1 or len(texts) > 1:
        several = ", ".join(file.name for file in (audio if len(audio) > 1 else texts))
        return BadRow(Kind.NO_AUDIO, f"several files of this name ({several}): rename or remove one")
    try:
        words = read_text(root / texts[0], reading)[0].split()
    except DataError as error:
        return BadRow(Kind.NO_TEXT, " ".join(str(error).split()))
    return {"id": str(name), "audio": str(audio[0]), "text": " ".join(words)}
