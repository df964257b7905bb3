"""Asks which recordings: data sets of config.ini or manifests nearby. They are read, shown, and split if need be."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import Manifest, load_manifest
from whisper_tuner.data.problems import counts
from whisper_tuner.errors import DataError, TunerError
from whisper_tuner.paths import expanded, shown
from whisper_tuner.text import duration

from .draft import KINDS, Data
from .manifests import beside, find, new_names, rows, split
from .questions import Option, Questions

SHOWN_ROWS = 3
SHOWN_PROBLEMS = 3
AGAIN = Option(value="again", title="choose other data (or fix this first, then choose it again)")


def ask_data(questions: Questions, config: ConfigFile, console: Console) -> Data:
    with console.status("looking for manifests"):
        offers = _offers(config)
        options = [_option(name, data) for name, data in offers.items()]
    while True:
        answer = _choose(questions, options)
        data = offers.get(answer) or Data(manifests=beside(expanded(answer).absolute()))
        try:
            _read(data, console)
        except TunerError as error:
            console.print(f"[red]{escape(str(error))}[/red]")
            questions.again("This data cannot be used.", [AGAIN], error)
        else:
            _ask_split(questions, data, console)
            return data


def _offers(config: ConfigFile) -> dict[str, Data]:
    """By section, else by the path of the training manifest. None stands there twice."""
    offers = {}
    for name in config.names("dataset"):
        values, folder = config.section("dataset", name).values, config.path.parent
        manifests = {kind: (folder / expanded(values[kind])).absolute() for kind in KINDS if values.get(kind)}
        if "train" in manifests:
            offers[name] = Data(section=name, language=values.get("language", ""), manifests=manifests)
    known = {data.manifests["train"] for data in offers.values()}
    found = {str(files["train"]): Data(manifests=files) for files in find(Path.cwd()) if files["train"] not in known}
    return offers | found


def _option(name: str, data: Data) -> Option:
    train = data.manifests["train"]
    count = f"{rows(train)} clips" if train.is_file() else "not there"
    others = [kind for kind in KINDS[1:] if kind in data.manifests]
    beside = f", with {' and '.join(others)}" if others else ""
    label = f"{name} ({shown(train)})" if data.section else str(shown(train))
    return Option(value=name, short=data.section or label, title=f"{label}: {count}{beside}")


def _choose(questions: Questions, options: list[Option]) -> str:
    if not options:
        message = "Manifest of your recordings (CSV, TSV or JSON lines with an audio and a text column):"
        return questions.text("data", message, "", _check)
    default = options[0].value
    return questions.select("data", "Which recordings?", options, default, other="another manifest", check=_check)


def _check(text: str) -> None:
    if not text or not expanded(text).is_file():
        raise ValueError("there is no such file")


def _read(data: Data, console: Console) -> None:
    """Read each manifest and show what is in it. Raises DataError."""
    for kind, path in data.manifests.items():
        with console.status(f"reading {shown(path)}"):
            manifest = load_manifest(path)
        if not manifest.samples:
            listed = "\n  ".join(str(problem) for problem in manifest.problems[:SHOWN_PROBLEMS])
            raise DataError(f"{shown(path)}: no usable row", remedy=listed)
        data.samples[kind] = manifest.samples
        if kind == "train":
            _show_clips(console, manifest)
        _show_counts(console, kind, manifest)


def _show_clips(console: Console, manifest: Manifest) -> None:
    table = Table(header_style="bold")
    table.add_column("clip", overflow="ellipsis", no_wrap=True, max_width=20)
    table.add_column("s", justify="right")
    table.add_column("text", overflow="fold")
    for sample in manifest.samples[:SHOWN_ROWS]:
        table.add_row(escape(sample.audio.name), f"{sample.duration_s:.1f}", escape(sample.text))
    console.print(table)


def _show_counts(console: Console, kind: str, manifest: Manifest) -> None:
    total = duration(sum(sample.duration_s for sample in manifest.samples))
    unit = "h:mm:ss" if total.count(":") > 1 else "min:s"
    count = len(manifest.problems)
    skipped = f"{count} rows skipped" + (f": {counts(manifest.problems)}" if count else "")
    console.print(f"{kind}: {len(manifest.samples)} clips, {total} of speech ({unit}), {skipped}")
    for problem in manifest.problems[:SHOWN_PROBLEMS]:
        console.print(f"  {escape(str(problem))}", style="yellow")
    if count > SHOWN_PROBLEMS:
        console.print(f"  and {count - SHOWN_PROBLEMS} more", style="yellow")


def _ask_split(questions: Questions, data: Data, console: Console) -> None:
    """Offer to split the training clips, but only if the test set is missing: without it no WER can be measured."""
    missing = [kind for kind in KINDS[1:] if kind not in data.manifests]
    if "test" not in missing:
        return
    message = f"There is no {' and no '.join(missing)} set. Split off a tenth of the clips for each?"
    if not questions.confirm("split", message, True):
        console.print("Without a test set no WER is measured.")
        return
    try:
        parts = split(data.samples["train"], missing)
        data.split = new_names(data.manifests["train"], parts)
    except ValueError as error:
        console.print(f"Not split: {error}.", style="yellow")
        return
    data.samples |= parts
    listed = ", ".join(f"{shown(data.split[kind])}: {len(part)} clips" for kind, part in parts.items())
    console.print(f"{listed} (written at the end)")
