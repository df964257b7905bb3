"""`multimac data import`: recordings of any usual layout become manifests of our own. Imports no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from multimac.view.progress import working
from multimac.view.terminal import Console
from whisper_tuner.data.dataset import MAX_DURATION_S
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.data.formats.table import DELIMITERS
from whisper_tuner.data.importing import LEFT_OUT, ImportedPart, import_source, read_corrections
from whisper_tuner.data.problems import Kind, Problem, counts
from whisper_tuner.errors import ConfigError, DataError, ExitStatus
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.languages import language_code
from whisper_tuner.paths import expanded, shown
from whisper_tuner.settings import nearest
from whisper_tuner.text import counted, duration

SHOWN = 5  # rows that were left out, of each part


@awake()
def data_import(
    source: str,
    out: Path,
    *,
    layout: str = "",
    audio_column: str = "",
    text_column: str = "",
    encoding: str = "",
    delimiter: str = "",
    language: str = "",
    keep_empty: bool = False,
    keep_long: bool = False,
    split_off: bool = False,
    outside: Sequence[Path] = (),
    as_json: bool = False,
) -> ExitStatus:
    if delimiter and delimiter not in DELIMITERS:
        what = f"--delimiter {delimiter}: no such delimiter{nearest(delimiter, DELIMITERS)}"
        raise ConfigError(what, remedy=f"Known: {', '.join(DELIMITERS)}.")
    language = language_code(language) if language else ""
    reading = Reading(
        layout=layout, audio_column=audio_column, text_column=text_column, encoding=encoding, delimiter=delimiter
    )
    console = Console(highlight=False, markup=False, stderr=as_json)
    path, out = expanded(source), expanded(out)
    with working(console, f"reading {source}") as tell:
        about = {"keep_empty": keep_empty, "keep_long": keep_long, "split_off": split_off}
        about["outside"] = [expanded(folder) for folder in outside]
        found = import_source(path, out, reading, **about, facts=FactStore(PROJECT / STORE / CACHE), tell=tell)
    unknown = read_corrections(out).unknown(found)
    lines = _config_lines(out, found, language)
    if as_json:
        print(json.dumps(_record(source, found, unknown, lines), indent=2))
    else:
        console.print(f"{source}: {found[0].part.layout}", soft_wrap=True)
        for one, before in zip(found, [None, *found], strict=False):
            _show(console, one, told=before.part.facts if before else {})
        if unknown:
            console.print(f"blacklist.txt or patches.csv name ids that no row has: {', '.join(unknown[:SHOWN])}")
        if any(one.problems for one in found):
            console.print(f"all that was left out: {shown((out / LEFT_OUT).absolute())}", soft_wrap=True)
        for line in _about_long(out, found, kept=keep_long):
            console.print(line, soft_wrap=True)
    _check_usable(found)
    if not as_json:
        if not any(one.kind == "test" for one in found):
            console.print()
            console.print("There is no test set, and without one no WER is measured: --split makes one.")
        console.print()
        console.print("For config.ini:")
        console.print()
        for line in lines:
            console.print(f"    {line}", soft_wrap=True)
    return ExitStatus.OK


def _show(console: Console, one: ImportedPart, told: Mapping[str, str]) -> None:
    """`told`: what has been said of the part before."""
    part = one.part
    console.print()
    console.print(f"{one.kind}: {shown(part.path.absolute())} -> {shown(one.manifest.absolute())}", soft_wrap=True)
    for what, fact in part.facts.items():
        if told.get(what) != fact:
            console.print(f"  {what}: {fact}", soft_wrap=True)
    for sample in one.samples[:1]:
        text = f"{sample.text[:100]}..." if len(sample.text) > 100 else sample.text
        console.print(f"  first clip: {sample.id} ({sample.duration_s:.1f} s): {text}", soft_wrap=True)
    speakers = counted(one.speakers, "speaker") if one.speakers else "speakers are not named"
    clips = f"{counted(len(one.samples), 'clip')}, {duration(one.seconds)} of speech"
    console.print(f"  {clips}, {speakers}", style="bold", soft_wrap=True)
    if one.written or one.kept:
        console.print(f"  cut to FLAC: {one.written} now, {one.kept} before", soft_wrap=True)
    if one.blacklisted or one.patched:
        corrected = f"{len(one.blacklisted)} left out by blacklist.txt, {len(one.patched)} texts from patches.csv"
        console.print(f"  {corrected}", soft_wrap=True)
    for note in one.notes:
        console.print(f"  note: {note}", style="yellow", soft_wrap=True)
    _show_problems(console, one)


def _show_problems(console: Console, one: ImportedPart) -> None:
    if not one.problems:
        console.print("  0 rows left out")
        return
    rows = counted(len(one.problems), "row")
    console.print(f"  {rows} left out: {counts(one.problems)}", style="yellow", soft_wrap=True)
    for problem in one.problems[:SHOWN]:
        console.print(f"    {_place(one, problem)}: {problem.what}", soft_wrap=True)
    if len(one.problems) > SHOWN:
        console.print(f"    and {len(one.problems) - SHOWN} more")


def _about_long(out: Path, found: Sequence[ImportedPart], *, kept: bool) -> Iterator[str]:
    """How clips that are too long can be cut."""
    manifests = [one.manifest for one in found if any(sample.duration_s > MAX_DURATION_S for sample in one.samples)]
    names = " ".join(shlex.quote(str(shown(path.absolute()))) for path in manifests)
    if manifests:
        yield "Training leaves out what is longer than 30 s. To cut it at pauses:"
        yield f"    multimac data check {names} --fix NAME --model MODEL"
    elif not kept and any(one.kind == Kind.TOO_LONG for each in found for one in each.problems):
        yield "To have clips that are too long cut at pauses, import with --keep-long."


def _place(one: ImportedPart, problem: Problem) -> str:
    return f"{problem.file or one.part.path.name}:{problem.line}"


def _record(source: str, found: Sequence[ImportedPart], unknown: Sequence[str], lines: Sequence[str]) -> dict:
    parts = [
        {
            "kind": one.kind,
            "source": str(one.part.path),
            "manifest": str(one.manifest),
            "facts": dict(one.part.facts),
            "notes": list(one.notes),
            "clips": len(one.samples),
            "seconds": round(one.seconds, 3),
            "speakers": one.speakers,
            "cut now": one.written,
            "cut before": one.kept,
            "blacklisted": len(one.blacklisted),
            "patched": len(one.patched),
            "left out": [{"place": _place(one, problem), **asdict(problem)} for problem in one.problems],
        }
        for one in found
    ]
    return {
        "source": source,
        "layout": found[0].part.layout,
        "parts": parts,
        "unknown ids": list(unknown),
        "config": list(lines),
    }


def _config_lines(out: Path, found: Sequence[ImportedPart], language: str) -> list[str]:
    lines = [f"[dataset:{out.name}]", *(f"{one.kind} = {shown(one.manifest.absolute())}" for one in found)]
    return [*lines, f"language = {language}"] if language else lines


def _check_usable(found: Sequence[ImportedPart]) -> None:
    """Raises DataError without any clip to train on."""
    train = next(one for one in found if one.kind == "train")
    if not train.samples:
        first = train.problems[0] if train.problems else None
        reason = f"{_place(train, first)}: {first.what}" if first else "It has no rows."
        raise DataError(f"{train.part.path}: no usable row", remedy=reason)
