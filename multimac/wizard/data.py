"""Asks which recordings: data sets of config.ini or lists nearby. They are read, shown, cut and split if need be.

Manifests are found by name and header alone.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from multimac.view.findings import by_kind, rows_in_words
from multimac.view.progress import working
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.audio import quiet_mp3
from whisper_tuner.data.audio_check import AudioIndex
from whisper_tuner.data.check import check_usable, described
from whisper_tuner.data.checks.finding import Finding, Needs
from whisper_tuner.data.checks.material import Material
from whisper_tuner.data.checks.table import findings
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest
from whisper_tuner.data.formats.columns import UnclearColumn
from whisper_tuner.data.formats.layouts import kinds_inside, parts_of, with_siblings
from whisper_tuner.data.formats.lists import STEM, TABLES, is_list
from whisper_tuner.data.formats.pairs import TEXT
from whisper_tuner.data.formats.rows import AS_IT_IS, KIND_OF, Reading
from whisper_tuner.data.importing import LEFT_OUT, ImportedPart, OutsideAudio, import_source, is_free, outside_of
from whisper_tuner.data.splitting import split
from whisper_tuner.errors import ConfigError, DataError, TunerError
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import expanded, is_audio, shown
from whisper_tuner.languages import language_code
from whisper_tuner.problems import Kind
from whisper_tuner.text import counted, duration

from .draft import KINDS, Data, numbered
from .questions import Option, Questions

SUFFIXES = (*TABLES, ".jsonl", ".ndjson")
DEPTH = 4  # levels of folders below the current one
SEARCH_S = 2.0  # a home folder holds too much to search it all while a person waits
SKIPPED = {"runs", "node_modules", "site-packages", "__pycache__", "build", "dist", "tests"}
SHOWN = 3  # clips
COLUMNS = {"audio_column": "recordings' names", "text_column": "texts"}
OTHER_DATA = "another folder or table (CSV, Excel, JSON), such as ~/recordings"
AGAIN = Option(value="again", title="choose other data (or fix this first, then choose it again)")
Manifests = dict[str, Path]  # by kind: one to train on, and those that belong to it by name


def ask_data(questions: Questions, config: ConfigFile, console: Console) -> Data:
    nearby = "data" not in questions.answers
    offers, options = questions.once("offers", None, lambda: _found(config, console, nearby=nearby))
    while True:
        if options:
            message, other, first = "Which recordings?", OTHER_DATA, options[0].value
            answer = questions.select("data", message, options, first, other=other, check=_check)
        else:
            message = "Your recordings: a folder or table (CSV, Excel, JSON; docs/data.md):"
            answer = questions.text("data", message, "", _check)
        try:
            data = _chosen(questions, offers.get(answer), typed_path(answer), console)
        except TunerError as error:
            questions.earlier.pop("data", None)  # what is refused is not suggested again
            questions.again("This data cannot be used.", [AGAIN], error)
        else:
            _show_checks(questions, data, console)
            return data


def _chosen(questions: Questions, offer: Data | None, named: Path, console: Console) -> Data:
    """Read the recordings of an offer, else those that were named; asks for a column that cannot be told."""
    path = Path(os.path.normpath(named.absolute()))
    said = {key: questions.answers[key] for key in COLUMNS if key in questions.answers}
    questions.taken |= said
    reading = replace(offer.reading if offer else AS_IT_IS, **said)
    while True:
        try:
            if offer:
                data = replace(offer, samples={}, split={}, reading=reading)  # without those of an earlier answer
            elif own := bring_in(questions, path, reading, console):
                data = Data(manifests=own)
            else:
                data = Data(manifests=beside(path, reading), reading=reading)
            train = data.manifests["train"]
            inside = dict.fromkeys(kinds_inside(train, data.reading), train)
            data.manifests, data.source = inside | data.manifests, train
            with quiet_mp3():
                _read(questions, data, console)
            return data
        except UnclearColumn as error:
            if not questions.interactive:
                raise
            message = f"Which column is that of the {COLUMNS[error.key]}?"
            options = [Option(value=name, title=name) for name in error.names]
            reading = replace(reading, **{error.key: questions.select(error.key, message, options, error.names[0])})


def bring_in(questions: Questions, source: Path, reading: Reading, console: Console) -> dict[str, Path]:
    """Import recordings whose audio must be cut or taken out first, such as those with subtitles.

    Returns the new manifests, by kind; none where `source` can be used as it is. Raises DataError, ConfigError.
    """
    parts = questions.once("look", (source, reading), lambda: parts_of(source, reading))
    why = next((part.cut for part in parts.values() if part.cut), "")
    if not why:
        return {}
    console.print(f"{shown(source)}: {why}. They are written as clips of their own.", markup=False)
    folders = (Path.cwd() / name for name in numbered(f"{source.stem}-clips"))
    default = str(shown(next(folder for folder in folders if is_free(folder, source))))
    out = expanded(questions.text("import", "Folder for the clips and their manifests:", default)).absolute()

    def cut(outside: Sequence[Path] = ()) -> list[ImportedPart]:
        questions.cut += [out] if out not in questions.cut else []
        with working(console, f"cutting {shown(source)}") as tell:
            return import_source(source, out, reading, outside=outside, tell=tell)

    try:
        found = questions.once("cut", (source, out, reading), cut)
    except OutsideAudio as error:
        if not questions.confirm("outside", f"{error.args[0]}. May they be used?", False):
            raise
        found = questions.once("cut", (source, out, reading, error.folders), partial(cut, error.folders))
    problems = [problem for one in found for problem in one.problems]
    if problems:
        console.print(f"{described(problems)}\nall that was left out: {shown(out / LEFT_OUT)}", markup=False)
    if any(problem.kind == Kind.TOO_LONG for problem in problems):
        what = "To have clips that are too long cut at pauses, import with --keep-long first:"
        console.print(
            f"{what} multimac data import {shlex.quote(str(shown(source)))} --out NAME --keep-long", markup=False
        )
    return {one.kind: one.manifest for one in found}


def find(folder: Path) -> list[Manifests]:
    """Find manifests, and folders with a text beside each recording; after SEARCH_S seconds, those found by then."""
    return [files for files in _grouped(_files(folder)) if "train" in files]


def beside(manifest: Path, reading: Reading) -> Manifests:
    """Return what the user named, to train on, with what belongs to it: files of the same format, by their names.

    Raises DataError for a part to validate or test with.
    """
    if manifest.is_dir():
        return with_siblings(manifest, reading)
    same = [path for path in sorted(manifest.parent.iterdir()) if path.suffix.lower() == manifest.suffix.lower()]
    groups = _grouped([manifest, *filter(is_list, same)])
    [files] = [files for files in groups if manifest in files.values()]
    if "train" not in files:
        return {"train": manifest}
    if files["train"] != manifest:
        kind = next(kind for kind, path in files.items() if path == manifest)
        what = f"{shown(manifest)} is the {kind} set of {files['train'].name}, which lies beside it"
        remedy = f"Name {shown(files['train'])}. To train on this one all the same, give it another name."
        raise DataError(what, remedy=remedy)
    return files


def _found(config: ConfigFile, console: Console, *, nearby: bool) -> tuple[dict[str, Data], list[Option]]:
    """Find the data by section, else by the path of the training manifest. None stands there twice."""
    offers: dict[str, Data] = {}
    with working(console, "looking for manifests"):
        for name in config.names("dataset"):
            values, folder = config.section("dataset", name).values, config.path.parent
            manifests = {kind: (folder / expanded(values[kind])).absolute() for kind in KINDS if values.get(kind)}
            if "train" in manifests:
                language, reading = values.get("language", ""), Reading.of(values)
                offers[name] = Data(section=name, language=language, manifests=manifests, reading=reading)
        known = {data.manifests["train"] for data in offers.values()}
        found = [files for files in find(Path.cwd()) if files["train"] not in known] if nearby else []
        offers |= {str(files["train"]): Data(manifests=files) for files in found}
        if "demo" in offers:
            offers["demo"] = offers.pop("demo")  # one's own first
        return offers, [_option(name, data) for name, data in offers.items()]


def _option(name: str, data: Data) -> Option:
    train = data.manifests["train"]
    count = "a folder" if train.is_dir() else "an Excel table" if train.is_file() else "not there"
    if train.is_file() and train.suffix.lower() != ".xlsx":  # about as many as it has lines
        with train.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
        count = counted(lines if train.suffix.lower() in (".jsonl", ".ndjson") else lines - 1, "clip")
    others = [kind for kind in KINDS[1:] if kind in data.manifests]
    more = f"with {' and '.join(others)}" if others else ""
    about = [count, data.language, str(shown(train)), more] if data.section else [count, data.language, more]
    label = data.section or str(shown(train))  # what tells it from others comes first: a narrow terminal cuts the rest
    return Option(value=name, short=label, title=f"{label}: {', '.join(filter(None, about))}")


def _check(text: str) -> None:
    if not text or not typed_path(text).exists():
        raise ValueError("there is no such file or folder")


def typed_path(text: str) -> Path:
    """Return a path that was typed, or dropped into a terminal: in quotes, or with backslashes before blanks."""
    path = expanded(text)
    if path.exists():
        return path
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return expanded(text[1:-1])
    return expanded(re.sub(r"\\(.)", r"\1", text))


@awake()
def _read(questions: Questions, data: Data, console: Console) -> None:
    """Read each manifest and show what is in it. Raises DataError."""

    def load(path: Path, kind: str) -> Manifest:
        index = AudioIndex(FactStore(PROJECT / STORE / CACHE))  # a run asks for the same headers
        with working(console, f"reading {shown(path)}"):
            manifest = load_manifest(path, kind=kind, index=index, reading=data.reading)
        index.save()
        check_usable(manifest)
        return manifest

    for kind, path in data.manifests.items():
        manifest = questions.once("read", (kind, path, _stamp(path), data.reading), partial(load, path, kind))
        data.samples[kind] = manifest.samples
        for note in manifest.notes:
            console.print(note, markup=False, style="yellow")
        if folders := outside_of(path, (sample.audio for sample in manifest.samples)):  # it may be somebody else's
            there = ", ".join(map(str, folders))
            console.print(f"{path.name} has clips outside of its folder, in {there}", style="yellow")
        if kind == "train":
            data.stated_language = _code(manifest.language)
            table = Table(header_style="bold")
            table.add_column("clip", overflow="fold", max_width=32)
            table.add_column("s", justify="right")
            table.add_column("text", overflow="fold")
            for sample in manifest.samples[:SHOWN]:
                table.add_row(sample.audio.name, f"{sample.duration_s:.1f}", sample.text)
            console.print(table)
        total = duration(sum(sample.duration_s for sample in manifest.samples))
        unit = "h:mm:ss" if total.count(":") > 1 else "min:s"
        left_out, *listed = (described(manifest.problems) if manifest.problems else "0 rows left out").splitlines()
        clips = f"{kind}: {counted(len(manifest.samples), 'clip')}, {total} of speech ({unit}), {left_out}"
        console.print(clips, markup=False)
        for problem in listed:
            console.print(problem, markup=False, style="yellow")


def _stamps(data: Data) -> dict[str, tuple[Path, int | None]]:
    return {kind: (path, _stamp(path)) for kind, path in data.manifests.items()}


def _stamp(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _show_checks(questions: Questions, data: Data, console: Console) -> None:
    """Tell how many rows of each kind the checks of texts and parts find, which decode nothing."""
    language = spoken(questions, data)

    def look() -> list[Finding]:
        manifests = {kind: Manifest(data.manifests[kind], samples, ()) for kind, samples in data.samples.items()}
        with working(console, "checking the texts"):
            return findings(Material(manifests=manifests, language=language), [Needs.TEXT])

    found = questions.once("check", (_stamps(data), language), look)
    if not found:
        console.print("No check of the texts has found anything. `multimac data check` also listens to the recordings.")
        return
    counts = "; ".join(f"{kind.name}: {rows_in_words(rows)}" for kind, rows in by_kind(found))
    console.print(f"Look at: {counts}.", style="yellow", markup=False)
    # A folder of recordings is no manifest, and what was said of columns stands in the profile alone.
    # What is to be split is to be compared part by part, too.
    is_whole = "test" not in data.manifests
    if is_whole or data.reading != AS_IT_IS or not all(path.is_file() for path in data.manifests.values()):
        data.is_doubtful = True
        return
    named = shlex.join(str(shown(path)) for path in data.manifests.values())
    console.print(f"This shows them, and listens to the recordings: multimac data check {named}", markup=False)


def spoken(questions: Questions, data: Data) -> str:
    """Return the code of the language that was given, else of what the data says of itself; "" if nothing does."""
    return _code(questions.answers.get("language", "") or data.language) or data.stated_language


def _code(language: str) -> str:
    try:
        return language_code(language) if language else ""
    except ConfigError:
        return ""  # not one that Whisper knows; of a section it is told where the language is asked for


def ask_split(questions: Questions, data: Data, console: Console) -> Data:
    """Offer to split the training clips, but only if the test set is missing: without it no WER can be measured."""
    missing = [kind for kind in KINDS[1:] if kind not in data.manifests]
    if "test" not in missing:
        return data
    each = " for each" if len(missing) > 1 else ""
    message = f"No {' or '.join(missing)} set. Split off a tenth of the clips{each}?"
    if not questions.confirm("split", message, True):
        console.print("Without a test set no WER is measured.")
        return data
    try:
        done = questions.once("split", (_stamps(data), missing), lambda: split(data.samples["train"], missing))
    except ValueError as error:
        console.print(f"Not split: {error}.", style="yellow")
        return data
    # Files beside the manifest that do not exist yet: mine.csv -> mine-train.csv, mine-test.csv.
    if data.reading != AS_IT_IS:  # all lists of a profile are read alike
        done = replace(done, parts={kind: data.samples[kind] for kind in data.manifests} | done.parts)
    manifest = data.manifests["train"]
    match = STEM.fullmatch(manifest.stem)
    stem = (match[1] if match else manifest.stem) or "split"
    folder = manifest.parent if os.access(manifest.parent, os.W_OK) else Path.cwd()  # as of a card or a share
    offers = ({kind: folder / f"{name}-{kind}.csv" for kind in done.parts} for name in numbered(stem))
    files = next(files for files in offers if _free_or_same(files, done.parts))
    listed = ", ".join(f"{shown(files[kind])}: {counted(len(part), 'clip')}" for kind, part in done.parts.items())
    again = all(path.exists() for path in files.values())
    console.print(f"{listed} ({'split before' if again else 'to be written'})", markup=False)
    console.print(f"{done.told[0].upper()}{done.told[1:]}.", markup=False)
    samples = data.samples | done.parts
    if again:
        return replace(data, samples=samples, manifests=data.manifests | files)
    return replace(data, samples=samples, split=files)


def _free_or_same(files: Mapping[str, Path], parts: Mapping[str, Sequence[Sample]]) -> bool:
    """Tell whether none of the files is there, or all are, with the clips that an equal split has written before."""
    there = [kind for kind, path in files.items() if path.exists()]
    try:
        return not there or all(
            _content(load_manifest(path, check_audio=False).samples) == _content(parts[kind])
            for kind, path in files.items()
        )
    except TunerError:  # a file that is no manifest, or only some of them are there
        return False


def _content(samples: Sequence[Sample]) -> list[tuple[Path, str]]:
    return [(sample.audio, sample.text) for sample in samples]


def _grouped(paths: Iterable[Path]) -> list[Manifests]:
    """Group files of one folder whose names differ only in their kind; of two of a kind, the first one counts."""
    groups: dict[tuple[Path, str, str], Manifests] = {}
    for path in paths:
        match = STEM.fullmatch(path.stem)
        prefix, kind = (match[1], KIND_OF[match[2].lower()]) if match else (path.stem, "train")
        key = (path.parent, prefix, "" if match else path.suffix or "/")  # a folder is no part of tables of its name
        groups.setdefault(key, {}).setdefault(kind, path)
    return list(groups.values())


def _files(folder: Path) -> Iterator[Path]:
    """Give manifests, tables beside recordings or above them, and folders of recordings with texts, level by level."""
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
        names = [Path(entry.name) for entry in entries if not entry.name.startswith(".")]
        texts = {name.stem for name in names if name.suffix.lower() == TEXT}
        audio = [name for name in names if is_audio(name)]
        if depth and any(name.stem in texts for name in audio):
            yield place
        files = []
        for entry in entries:
            if entry.name.startswith((".", "~$")) or entry.name in SKIPPED:  # "~$": Excel's while a file is open
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting += [(Path(entry.path), depth + 1)] if depth < DEPTH else []
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                files.append(Path(entry.path))
        # Beside recordings, a table without known columns may list them all the same.
        tables = [file for file in files if file.suffix.lower() in TABLES]
        listed = [*filter(is_list, files)]
        yield from listed or (tables if audio or (tables and any(map(_holds_audio, entries))) else [])


def _holds_audio(entry: os.DirEntry) -> bool:
    """Tell whether it is a folder of recordings, among which those of a table in the folder above may be."""
    try:
        return entry.is_dir() and any(map(is_audio, Path(entry).iterdir()))
    except OSError:
        return False
