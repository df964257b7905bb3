"""`multimac data import`: recordings of any usual layout become manifests of our own. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from exogym.config import nearest
from multimac.view.progress import working
from multimac.view.terminal import Console
from whisper_tuner.config import ConfigFile, read_text, with_sections
from whisper_tuner.data.audio import quiet_mp3
from whisper_tuner.data.dataset import MAX_DURATION_S, stated_language
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.data.formats.table import DELIMITERS
from whisper_tuner.data.importing import LEFT_OUT, ImportedPart, Tell, import_source, read_corrections
from whisper_tuner.errors import ConfigError, DataError, ExitStatus
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import expanded, shown, write_shared
from whisper_tuner.languages import language_code
from whisper_tuner.problems import Kind, Problem, counts, listed
from whisper_tuner.text import counted, duration

from .options import CONFIG, Config, command

SHOWN = 5  # rows that were left out, of each part
LACKED = {"test": "no WER is measured", "validation": "no loss after each epoch"}


@command("data import")
@awake()
def data_import(
    source: Annotated[
        str, Argument(help="A file, a folder, or the id of a data set on the Hugging Face hub (owner/name).")
    ],
    out: Annotated[Path, Option("--out", help="Folder to write: manifests, and clips where audio is cut.")],
    layout: Annotated[str, Option(help="Layout, where files fit several; docs/data.md lists them.")] = "",
    audio_column: Annotated[str, Option(help="Column of the audio's names; without a header, its number.")] = "",
    text_column: Annotated[str, Option(help="Column of the text; without a header, its number.")] = "",
    encoding: Annotated[str, Option(help="Encoding of texts that are not UTF-8, e.g. cp1251.")] = "",
    delimiter: Annotated[str, Option(help="Between columns: comma, semicolon, tab or bar.")] = "",
    language: Annotated[str, Option(help="Language of the speech, for the lines for config.ini.")] = "",
    keep_empty: Annotated[bool, Option("--keep-empty", help="Keep rows without text, for no_speech = train.")] = False,
    keep_long: Annotated[
        bool, Option("--keep-long", help="Keep clips over 30 s, for `data check --fix --model` to cut.")
    ] = False,
    split_off: Annotated[
        bool, Option("--split", help="Make the missing validation and test sets, each of a tenth of the clips.")
    ] = False,
    outside: Annotated[
        list[Path] | None, Option("--outside", metavar="FOLDER", help="Another folder that may hold audio; repeatable.")
    ] = None,
    save: Annotated[str, Option("--save", metavar="NAME", help="Write [dataset:NAME] into config.ini.")] = "",
    as_json: Annotated[bool, Option("--json", help="Print only what was found, as JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Read recordings of any usual layout, and write manifests for config.ini. After a stop, it goes on."""
    if delimiter and delimiter not in DELIMITERS:
        what = f"--delimiter {delimiter}: no such delimiter{nearest(delimiter, DELIMITERS)}"
        raise ConfigError(what, remedy=f"Known: {', '.join(DELIMITERS)}.")
    language = language_code(language) if language else ""
    reading = Reading(
        layout=layout, audio_column=audio_column, text_column=text_column, encoding=encoding, delimiter=delimiter
    )
    console, out = Console(stderr=as_json), expanded(out)
    if save:
        _check_free(config, save, out)
    with _reading(console, source) as tell:
        found = import_source(
            expanded(source),
            out,
            reading,
            keep_empty=keep_empty,
            keep_long=keep_long,
            split_off=split_off,
            outside=[expanded(folder) for folder in outside or ()],
            facts=FactStore(PROJECT / STORE / CACHE),
            tell=tell,
        )
    unknown = read_corrections(out).unknown(found)
    keys, lines = _section(found, language, save or out.name, whole=bool(save))
    if as_json:
        print(json.dumps(_record(source, found, unknown, lines), indent=2))
    else:
        _show(console, source, out, found, unknown, kept_long=keep_long)
    _check_usable(found)
    said = _save(config, save, keys) if save else "For config.ini:"
    if not as_json:
        _show_section(console, said, lines, keys, shlex.quote(str(shown(out.absolute()))))
    return ExitStatus.OK


@contextlib.contextmanager
def _reading(console: Console, source: str) -> Iterator[Tell]:
    """Show how far an import is; if it is stopped, say that nothing is lost."""
    try:
        with quiet_mp3(), working(console, f"reading {source}") as tell:
            yield tell
    except KeyboardInterrupt:
        console.print("Stopped. The same command again goes on from here.")
        raise


def _section(
    found: Sequence[ImportedPart], language: str, name: str, *, whole: bool
) -> tuple[dict[str, str], list[str]]:
    """(keys, lines) of a [dataset:NAME]; whole: with whole paths, else as its user would type them here."""
    paths = {one.kind: one.manifest.absolute() for one in found if one.samples}
    spoken = language or _stated(found)
    keys = {kind: str(path if whole else shown(path)) for kind, path in paths.items()}
    keys |= {"language": spoken} if spoken else {}
    return keys, [f"[dataset:{name}]", *(f"{key} = {value}" for key, value in keys.items())]


def _show_section(console: Console, said: str, lines: Sequence[str], keys: Mapping[str, str], recordings: str) -> None:
    """Print the lines for config.ini, and what is missing in `keys`. recordings: how `train` is told of them."""
    missing = [kind for kind in LACKED if kind not in keys]
    if missing:
        without = " and ".join(LACKED[kind] for kind in missing)
        sets = " and no ".join(f"{kind} set" for kind in missing)
        console.print(f"\nThere is no {sets}, so {without}: --split makes {'both' if missing[1:] else 'one'}.")
    console.print(f"\n{said}\n", soft_wrap=True)
    for line in lines:
        console.print(f"    {line}", soft_wrap=True)
    spoken = f" --language {keys['language']}" if "language" in keys else ""
    console.print(f"\nOr at once: multimac train {recordings}{spoken}", soft_wrap=True)


def _check_free(config: Path, name: str, out: Path) -> None:
    """Raise ConfigError where [dataset:NAME] cannot be written, or is of other recordings."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(
            f"--save {name}: not a name of a section", remedy="Use letters, digits, '-', '_' and '.' only."
        )
    before = ConfigFile(config, read_text(config))
    train = before.section("dataset", name).values.get("train") if before.has("dataset", name) else None
    if train is not None and (before.path.parent / expanded(train)).absolute() != (out / "train.csv").absolute():
        what = f"--save {name}: [dataset:{name}] has other recordings in {config.name}: train = {train}"
        raise ConfigError(what, remedy="Choose another name, or remove that section first.")


def _save(config: Path, name: str, keys: dict[str, str]) -> str:
    """Write [dataset:NAME], and say so; what else its user has written there stays. Raises ConfigError."""
    text, header = read_text(config), f"dataset:{name}"
    before = ConfigFile(config, text)
    own = before.section("dataset", name).values if before.has("dataset", name) else {}
    changed = [f"{key} = {own[key]}" for key, value in keys.items() if own.get(key, value) != value]
    text = with_sections(text, [(header, {**own, **keys})])
    held = ConfigFile(config, text).section("dataset", name).values
    for path in (value for key, value in keys.items() if held.get(key) != value):
        raise ConfigError(f"{path}: config.ini cannot hold this path", remedy="Rename the file or folder.")
    write_shared(config, text)
    return f"Written to {shown(config.absolute())}{' in place of ' * bool(changed)}{', '.join(changed)}:"


def _stated(found: Sequence[ImportedPart]) -> str:
    """Return the code of the language that the recordings' own list gives; "" for one that Whisper does not know."""
    train = next(one for one in found if one.kind == "train")
    try:
        return language_code(stated_language(train.part, train.samples))
    except ConfigError:
        return ""


def _show(
    console: Console,
    source: str,
    out: Path,
    found: Sequence[ImportedPart],
    unknown: Sequence[str],
    *,
    kept_long: bool,
) -> None:
    console.print(f"{source}: {found[0].part.layout}", soft_wrap=True)
    told: set[str] = set()
    for one, before in zip(found, [None, *found], strict=False):
        _show_part(console, one, before.part.facts if before else {}, [note for note in one.notes if note not in told])
        told |= {*one.notes}
    if unknown:
        console.print(f"blacklist.txt or patches.csv name ids that no row has: {', '.join(unknown[:SHOWN])}")
    if any(one.problems for one in found):
        console.print(f"all that was left out: {shown((out / LEFT_OUT).absolute())}", soft_wrap=True)
    manifests = [one.manifest for one in found if any(sample.duration_s > MAX_DURATION_S for sample in one.samples)]
    if manifests:
        names = " ".join(shlex.quote(str(shown(path.absolute()))) for path in manifests)
        console.print("Training leaves out what is longer than 30 s. To cut it at pauses:")
        console.print(f"    multimac data check {names} --fix NAME --model MODEL", soft_wrap=True)
    elif not kept_long and any(one.kind == Kind.TOO_LONG for each in found for one in each.problems):
        console.print("To have clips that are too long cut at pauses, import with --keep-long.", soft_wrap=True)


def _show_part(console: Console, one: ImportedPart, told: Mapping[str, str], notes: Sequence[str]) -> None:
    """Print what was found in a part, but for the facts that were `told` of the part before; notes: its new ones."""
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
        kept = f"; {one.kept} that an earlier import has cut are kept" if one.kept else ""
        console.print(f"  {counted(one.written, 'clip')} cut to FLAC{kept}", soft_wrap=True)
    if one.blacklisted or one.patched:
        corrected = f"{len(one.blacklisted)} left out by blacklist.txt, {len(one.patched)} texts from patches.csv"
        console.print(f"  {corrected}", soft_wrap=True)
    for note in dict.fromkeys(notes):
        console.print(f"  note: {note}", style="yellow", soft_wrap=True)
    if not one.problems:
        console.print("  0 rows left out")
        return
    rows = counted(len(one.problems), "row")
    console.print(f"  {rows} left out: {counts(one.problems)}", style="yellow", soft_wrap=True)
    for line in listed((replace(problem, file=problem.file or part.path.name) for problem in one.problems), SHOWN):
        console.print(f"  - {line}", soft_wrap=True)


def _place(one: ImportedPart, problem: Problem) -> str:
    name = problem.file or one.part.path.name
    return f"{name}:{problem.line}" if problem.line else name


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


def _check_usable(found: Sequence[ImportedPart]) -> None:
    """Raise DataError without any clip to train on."""
    train = next(one for one in found if one.kind == "train")
    if not train.samples:
        first = train.problems[0] if train.problems else None
        reason = f"{_place(train, first)}: {first.what}" if first else "It has no rows."
        raise DataError(f"{train.part.path}: no usable row", remedy=reason)
