"""Reads manifests, headers, audio and tokenizer: all that checks look at."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from whisper_tuner.data.audio import LONG_S
from whisper_tuner.data.check import header_index
from whisper_tuner.data.checks.facts_store import FILE, FactsStore, Told
from whisper_tuner.data.checks.material import PARTS, TEST, TRAIN, VALIDATION, Material
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.data.problems import Kind
from whisper_tuner.errors import DataError
from whisper_tuner.hub import loading, model_file

_KIND_OF = dict.fromkeys(("train", "training"), TRAIN) | dict.fromkeys(("test", "eval"), TEST)
_KIND_OF |= dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION)
_KIND = re.compile(rf"(?:^|[-_. ])({'|'.join(_KIND_OF)})$", re.IGNORECASE)


def read(
    path: Path,
    store: Path,
    *,
    max_duration_s: float,
    no_speech: bool = False,
    reading: Reading = AS_IT_IS,
    kind: str = TRAIN,
) -> Manifest:
    """A manifest with the rows that can be used, and those that cannot. Headers of its audio are kept below `store`.

    Raises DataError, also for a data set of several lists: rows are told by their lines.
    """
    index = header_index(path, store)
    about = {"max_duration_s": max_duration_s, "no_speech": no_speech, "reading": reading, "kind": kind}
    try:
        manifest = load_manifest(path, index=index, **about)
    finally:
        index.save()
    if any(row.file for row in (*manifest.samples, *manifest.problems)):
        remedy = f"Run: multimac data import {shlex.quote(str(path))} --out NAME; then check NAME/{kind}.csv."
        raise DataError(f"{path} is not one list of clips", remedy=remedy)
    return manifest


def too_long(manifest: Manifest, store: Path, *, reading: Reading = AS_IT_IS, kind: str = TRAIN) -> list[Sample]:
    """The rows that are left out of the manifest because their clips are too long; not those without text."""
    lines = {problem.line for problem in manifest.problems if problem.kind == Kind.TOO_LONG}
    if not lines:
        return []
    whole = read(manifest.path, store, max_duration_s=LONG_S, reading=reading, kind=kind)
    return [sample for sample in whole.samples if sample.line in lines]


def decode(material: Material, store: Path, told: Told) -> Material:
    """With facts of all its audio; those of earlier checks are kept below `store`."""
    files = (row.sample.audio for row in material.rows)
    return replace(material, facts=FactsStore(store / "cache" / FILE).facts_of(files, told))


def reading_back(base_model: str) -> Callable[[str], str] | None:
    """What a model's tokenizer makes of a text, there and back; None if it has no tokenizer.json. Raises ModelError."""
    with loading(f"{base_model}: its tokenizer does not load", remedy="Copy the model again."):
        if not (file := model_file(base_model, "tokenizer.json")):
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids).strip()


def parts_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Manifests that the user has named, by part: as their names say, else one to train on, else by their names."""
    found: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        match = _KIND.search(path.stem)
        kind = _KIND_OF[match[1].lower()] if match else TRAIN
        names = [kind, path.stem, "-".join(path.absolute().with_suffix("").parts[-2:])]
        found[next((name for name in names if name not in found), str(path))] = path
    return {part: found[part] for part in sorted(found, key=lambda part: PARTS.index(part) if part in PARTS else -1)}
