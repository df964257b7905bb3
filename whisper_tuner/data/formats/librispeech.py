"""LibriSpeech's tree: train-clean-100/84/121123/84-121123.trans.txt, and each utterance as a FLAC beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from whisper_tuner.data.formats.place import Place, by_kind, read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.problems import Kind

LISTS = ".trans.txt"
CAPITALS = "its texts are all in capitals, without punctuation, and a model learns to write so"


def recognises(place: Place) -> bool:
    return place.path.name.endswith(LISTS) if place.is_file else bool(place.named(f"*{LISTS}"))


def parts(place: Place, reading: Reading) -> Parts:
    """Subsets of one kind, such as train-clean-100 and train-clean-360, are one part."""
    if place.is_file:
        return {"train": _part(place.path.parent, [PurePosixPath(place.path.name)], place.path, reading)}
    lists = place.named(f"*{LISTS}")
    kinds, others = by_kind(lists)
    if "train" not in kinds:
        return {"train": _part(place.path, lists, place.path, reading)}
    notes = tuple({f"{file.parts[0]} is no part, and not used": None for file in others})
    found = {}
    for kind, files in kinds.items():
        names = list(dict.fromkeys(file.parts[0] for file in files))
        path = place.path / names[0] if len(names) == 1 else place.path
        found[kind] = _part(place.path, files, path, reading, {"subsets": ", ".join(names)}, notes)
    return found


def _part(
    root: Path,
    lists: Sequence[PurePosixPath],
    path: Path,
    reading: Reading,
    facts: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Part:
    return Part(
        path=path,
        layout="LibriSpeech",
        rows=partial(_rows, root, lists, reading),
        folder=root,
        facts={**(facts or {}), "lists": f"{len(lists)} files {LISTS}", "speaker": "the number before the first -"},
        notes=(*notes, CAPITALS),
    )


def _rows(root: Path, lists: Sequence[PurePosixPath], reading: Reading) -> Iterator[Row]:
    for file in lists:
        text, _, _ = read_text(root / file, reading)
        for number, line in enumerate(text.splitlines(), 1):
            utterance, _, words = line.strip().partition(" ")
            speaker, dash, _ = utterance.partition("-")
            if not utterance:
                continue
            if not dash:
                what = f"no utterance such as 84-121123-0000 at its beginning: {line.strip()[:40]}"
                yield Row(number, BadRow(Kind.COLUMNS, what), str(file))
                continue
            audio = file.parent / f"{utterance}.flac"
            if not (root / audio).is_file():  # some have converted it
                audio = file.parent / utterance
            yield Row(number, {"id": utterance, "audio": str(audio), "text": words, "speaker": speaker}, str(file))
