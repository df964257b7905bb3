"""Finds manifests near the current folder by name and header alone, and splits one into three."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.formats import READERS, BadRow
from whisper_tuner.errors import DataError

from .draft import numbered

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

Manifests = dict[str, Path]
"""A training manifest, with the others that belong to it by name; by kind."""


def find(folder: Path) -> list[Manifests]:
    """The nearest first; after SEARCH_S seconds, those found by then."""
    return [files for files in _grouped(filter(is_manifest, _files(folder))) if "train" in files]


def beside(manifest: Path) -> Manifests:
    """The manifest that the user named, to train on, with those of its format that belong to it by name."""
    same = [path for path in sorted(manifest.parent.iterdir()) if path.suffix.lower() == manifest.suffix.lower()]
    groups = _grouped([manifest, *filter(is_manifest, same)])
    return next((files for files in groups if files.get("train") == manifest), {"train": manifest})


def is_manifest(path: Path) -> bool:
    """Whether its first line names an audio and a text column."""
    try:
        with path.open("rb") as file:
            line = file.read(HEADER_BYTES).split(b"\n")[0].decode("utf-8-sig")
        row = next(READERS[path.suffix.lower()](path, line), None)
    except (OSError, ValueError, DataError):
        return False
    return row is None or not isinstance(row[1], BadRow)


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


def new_names(manifest: Path, kinds: Iterable[str]) -> Manifests:
    """Files beside a manifest that do not exist yet: mine.csv -> mine-train.csv, mine-test.csv."""
    match = STEM.fullmatch(manifest.stem)
    stem = (match[1] if match else manifest.stem) or "split"
    offers = ({kind: manifest.with_name(f"{name}-{kind}.csv") for kind in kinds} for name in numbered(stem))
    return next(files for files in offers if not any(path.exists() for path in files.values()))


def _key(sample: Sample) -> str:
    return " ".join(sample.text.casefold().split())


def _grouped(paths: Iterable[Path]) -> list[Manifests]:
    """Files of one folder whose names differ only in their kind; of two of a kind, the first one."""
    groups: dict[tuple[Path, str, str], Manifests] = {}
    for path in paths:
        match = STEM.fullmatch(path.stem)
        prefix, kind = (match[1], KIND_OF[match[2].lower()]) if match else (path.stem, "train")
        key = (path.parent, prefix, "" if match else path.suffix)
        groups.setdefault(key, {}).setdefault(kind, path)
    return list(groups.values())


def _files(folder: Path) -> Iterator[Path]:
    """Those that may be manifests, level by level."""
    deadline = time.monotonic() + SEARCH_S
    waiting = deque([(folder, 0)])
    while waiting and time.monotonic() < deadline:
        place, depth = waiting.popleft()
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError:
            continue
        if depth and any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in SKIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting += [(Path(entry.path), depth + 1)] if depth < DEPTH else []
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                yield Path(entry.path)
