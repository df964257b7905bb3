"""Reads manifests, headers, audio and tokenizer: all that checks look at."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path

from whisper_tuner.data.audio import LONG_S
from whisper_tuner.data.audio_check import AudioIndex
from whisper_tuner.data.checks.facts import Facts, measure
from whisper_tuner.data.checks.material import PARTS, TRAIN, Material
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest
from whisper_tuner.data.formats.layouts import kinds_inside
from whisper_tuner.data.formats.rows import AS_IT_IS, KIND_OF, Reading
from whisper_tuner.errors import DataError
from whisper_tuner.fact_store import CACHE, FactStore, file_stamp
from whisper_tuner.hub import loading, model_file
from whisper_tuner.problems import Kind

FACT = "sound 1"  # raise its number when Facts change: those of older versions are then ignored
AHEAD = 4  # clips for each thread that may be decoded at once: what waits holds memory
KEPT_EVERY = 500  # clips, so that a check that is stopped goes on where it was

Told = Callable[[int, int], None]
"""Called with (clips done, clips in all)."""

_KIND = re.compile(rf"(?:^|[-_. ])({'|'.join(KIND_OF)})$", re.IGNORECASE)


def read(
    path: Path,
    store: Path,
    *,
    max_duration_s: float,
    no_speech: bool = False,
    reading: Reading = AS_IT_IS,
    kind: str = TRAIN,
) -> Manifest:
    """Read a manifest: the rows that can be used, and those that cannot. Headers of its audio are kept below `store`.

    Raises DataError, also for a data set of several lists: rows are told by their lines.
    """
    index = AudioIndex(FactStore(store / CACHE))
    try:
        manifest = load_manifest(
            path, max_duration_s=max_duration_s, index=index, no_speech=no_speech, reading=reading, kind=kind
        )
    finally:
        index.save()
    if any(sample.file for sample in manifest.samples) or any(problem.file for problem in manifest.problems):
        remedy = f"Run: multimac data import {shlex.quote(str(path))} --out NAME; then check NAME/{kind}.csv."
        raise DataError(f"{path} is not one list of clips", remedy=remedy)
    return manifest


def too_long(manifest: Manifest, store: Path, *, reading: Reading = AS_IT_IS, kind: str = TRAIN) -> list[Sample]:
    """Return the rows that the manifest leaves out because their clips are too long; not those without text."""
    lines = {problem.line for problem in manifest.problems if problem.kind == Kind.TOO_LONG}
    if not lines:
        return []
    whole = read(manifest.path, store, max_duration_s=LONG_S, reading=reading, kind=kind)
    return [sample for sample in whole.samples if sample.line in lines]


def decode(material: Material, store: Path, told: Told) -> Material:
    """Add facts of all its audio; those of earlier checks are kept below `store`."""
    files = (row.sample.audio for row in material.rows)
    return replace(material, facts=facts_by_file(files, FactStore(store / CACHE), told))


def facts_by_file(paths: Iterable[Path], store: FactStore, told: Told = lambda done, total: None) -> dict[Path, Facts]:
    """Measure each file that is there, on all cores. On Ctrl-C what was measured by then is kept.

    What could not be decoded is tried again next time: a program may be all that lacks.
    """
    spellings: dict[str, list[Path]] = {}  # of one file
    for path in paths:
        spellings.setdefault(str(path.absolute()), []).append(path)
    named = {name: those[0] for name, those in spellings.items()}
    stamps: dict[str, str] = {}
    for name, path in named.items():
        with contextlib.suppress(OSError, ValueError):
            stamps[name] = file_stamp(path.stat())
    found = {named[name]: Facts(*values) for name, values in store.known(FACT, stamps).items()}
    fresh: dict[str, tuple] = {}
    try:
        for path, facts in _measured([named[name] for name in stamps if named[name] not in found]):
            found[path] = facts
            if not facts.problem:
                fresh[str(path.absolute())] = astuple(facts)
            told(len(found), len(stamps))
            if len(fresh) == KEPT_EVERY:
                store.keep(FACT, stamps, fresh)
                fresh = {}
    finally:
        store.keep(FACT, stamps, fresh)
    told(len(found), len(stamps))
    return {path: found[those[0]] for those in spellings.values() if those[0] in found for path in those}


def _measured(paths: list[Path]) -> Iterator[tuple[Path, Facts]]:
    """Yield each as soon as it is done, with never many more in memory than there are threads."""
    threads = os.cpu_count() or 1
    left, running = iter(paths), dict[Future[Facts], Path]()
    with ThreadPoolExecutor(threads, "facts") as pool:
        try:
            while True:
                for path in islice(left, AHEAD * threads - len(running)):
                    running[pool.submit(measure, path)] = path
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def reading_back(base_model: str) -> Callable[[str], str] | None:
    """Return what a tokenizer makes of a text, there and back; None without a tokenizer.json. Raises ModelError."""
    with loading(f"{base_model}: its tokenizer does not load", remedy="Copy the model again."):
        if not (file := model_file(base_model, "tokenizer.json")):
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids).strip()


def parts_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Sort the named manifests by part: as their rows or names say, else one to train on, else by their names."""
    found: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        if (kinds := kinds_inside(path)) and not found.keys() & kinds:
            found |= dict.fromkeys(kinds, path)
            continue
        match = _KIND.search(path.stem)
        kind = KIND_OF[match[1].lower()] if match else TRAIN
        names = [kind, path.stem, "-".join(path.absolute().with_suffix("").parts[-2:])]
        found[next((name for name in names if name not in found), str(path))] = path
    return {part: found[part] for part in sorted(found, key=lambda part: PARTS.index(part) if part in PARTS else -1)}
