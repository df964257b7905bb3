"""Finds manifests near the current folder by name and header alone, and splits one into three."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.formats import AUDIO_COLUMNS, TEXT_COLUMNS
from whisper_tuner.json_text import parse_json

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
DEPTH = 4  # levels of folders below the current one
SEARCH_S = 2.0  # a home folder holds too much to search it all while a person waits
HEADER_BYTES = 1 << 16  # a header longer than this is no header
SKIPPED = {"runs", "node_modules", "site-packages", "__pycache__", "build", "dist", "tests"}
KIND_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "eval"),
}
KIND_OF = {name: kind for kind, names in KIND_NAMES.items() for name in names}
STEM = re.compile(rf"(.*?)[-_. ]?({'|'.join(KIND_OF)})", re.IGNORECASE)
PART = 0.1  # of the clips, for validation and for test each


@dataclass(frozen=True)
class Found:
    """A training manifest, with the others that belong to it by name."""

    files: dict[str, Path]

    @property
    def train(self) -> Path:
        return self.files["train"]


def find(folder: Path) -> list[Found]:
    """The nearest first; after SEARCH_S seconds, those found by then."""
    groups: dict[tuple[Path, str, str], dict[str, Path]] = {}
    for path in _candidates(folder):
        match = STEM.fullmatch(path.stem)
        prefix, kind = (match[1], KIND_OF[match[2].lower()]) if match else (path.stem, "train")
        key = (path.parent, prefix, "" if match else path.suffix)
        groups.setdefault(key, {}).setdefault(kind, path)
    return [Found(files) for files in groups.values() if "train" in files]


def beside(manifest: Path) -> Found:
    """The manifest that the user named, to train on, with those that belong to it by name."""
    siblings = [path for path in sorted(manifest.parent.iterdir()) if path.suffix.lower() == manifest.suffix.lower()]
    match = STEM.fullmatch(manifest.stem)
    files = {"train": manifest}
    if match and KIND_OF[match[2].lower()] == "train":
        for path in siblings:
            other = STEM.fullmatch(path.stem)
            if other and other[1] == match[1] and is_manifest(path):
                files.setdefault(KIND_OF[other[2].lower()], path)
    return Found(files)


def is_manifest(path: Path) -> bool:
    """Whether its first line names an audio and a text column."""
    try:
        with path.open("rb") as file:
            line = file.read(HEADER_BYTES).split(b"\n")[0].decode("utf-8-sig")
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            row = parse_json(line)
            names = list(row) if isinstance(row, dict) else []
        else:
            names = next(csv.reader([line], delimiter="\t" if path.suffix.lower() == ".tsv" else ","), [])
    except (OSError, ValueError, csv.Error):
        return False
    lowered = {str(name).strip().lower() for name in names}
    return bool(lowered & set(AUDIO_COLUMNS)) and bool(lowered & set(TEXT_COLUMNS))


def rows(path: Path) -> int:
    """About how many clips a manifest names."""
    with path.open("rb") as file:
        lines = sum(1 for line in file if line.strip())
    return lines if path.suffix.lower() in (".jsonl", ".ndjson") else lines - 1


def split(samples: Sequence[Sample], kinds: Sequence[str]) -> dict[str, tuple[Sample, ...]]:
    """`kinds` of validation and test get a tenth of the clips each, train the rest.

    Decided by a hash of the text, so the same files always give the same parts, and no sentence is in two of them.
    Raises ValueError where there are too few different texts.
    """
    texts = sorted({_key(sample) for sample in samples}, key=lambda text: hashlib.sha256(text.encode()).digest())
    share = max(1, round(PART * len(texts)))
    if len(texts) <= len(kinds) * share:
        raise ValueError(f"{len(texts)} different texts are too few to split")
    kind_of = {text: kind for number, kind in enumerate(kinds) for text in texts[number * share : (number + 1) * share]}
    parts: dict[str, list[Sample]] = {kind: [] for kind in ("train", *kinds)}
    for sample in samples:
        parts[kind_of.get(_key(sample), "train")].append(sample)
    return {kind: tuple(part) for kind, part in parts.items()}


def new_names(manifest: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Files beside a manifest that do not exist yet: mine.csv -> mine-train.csv, mine-test.csv."""
    match = STEM.fullmatch(manifest.stem)
    stem = (match[1] if match else manifest.stem) or "split"
    for number in ("", *(f"{n}-" for n in range(2, 100))):
        names = {kind: manifest.with_name(f"{stem}-{number}{kind}.csv") for kind in kinds}
        if not any(path.exists() for path in names.values()):
            return names
    raise ValueError(f"no free name beside {manifest}")


def _key(sample: Sample) -> str:
    return " ".join(sample.text.casefold().split())


def _candidates(folder: Path) -> Iterator[Path]:
    deadline = time.monotonic() + SEARCH_S
    level = [folder]
    for _ in range(DEPTH + 1):
        below = []
        for place in level:
            if time.monotonic() > deadline:
                return
            files, folders = _entries(place)
            below += folders
            yield from (path for path in files if is_manifest(path))
        level = below


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files that may be manifests, and folders to look into."""
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name in SKIPPED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not Path(entry.path, "pyvenv.cfg").exists():
                        folders.append(Path(entry.path))
                elif Path(entry.name).suffix.lower() in SUFFIXES:
                    files.append(Path(entry.path))
    except OSError:
        pass
    return sorted(files), sorted(folders)
