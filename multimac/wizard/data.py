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


def ask_data(questions: Questions, config: ConfigFile, console: Console) -> Data:
    known = {name: _of_section(config, name) for name in config.names("dataset")}
    covered = {data.manifests.get("train") for data in known.values()}
    with console.status("looking for manifests"):
        found = {str(item.train): item for item in find(Path.cwd()) if item.train not in covered}
    options = [
        Option(value=name, short=name, title=_title(data.manifests, name))
        for name, data in known.items()
        if data.manifests
    ]
    options += [
        Option(value=value, short=str(shown(item.train)), title=_title(item.files)) for value, item in found.items()
    ]
    while True:
        answer = _choose(questions, options)
        if answer in known:
            data = known[answer]
        else:
            files = found[answer] if answer in found else beside(expanded(answer).absolute())
            data = Data(manifests=dict(files.files))
        try:
            _read(data, console)
            break
        except TunerError as error:
            console.print(f"[red]{escape(str(error))}[/red]")
            choices = [Option(value="again", title="choose other data (or fix this first, then choose it again)")]
            questions.again("This data cannot be used.", choices, error)
    _ask_split(questions, data, console)
    return data


def _choose(questions: Questions, options: list[Option]) -> str:
    if not options:
        message = "Manifest of your recordings (CSV, TSV or JSON lines with an audio and a text column):"
        return questions.text("data", message, "", _check)
    default = options[0].value
    return questions.select("data", "Which recordings?", options, default, other="another manifest", check=_check)


def _check(text: str) -> None:
    if not text or not expanded(text).is_file():
        raise ValueError("there is no such file")


def _of_section(config: ConfigFile, name: str) -> Data:
    values, folder = config.section("dataset", name).values, config.path.parent
    manifests = {kind: (folder / expanded(values[kind])).absolute() for kind in KINDS if values.get(kind)}
    return Data(section=name, language=values.get("language", ""), manifests=manifests if "train" in manifests else {})


def _title(files: dict[str, Path], section: str = "") -> str:
    train = files["train"]
    count = f"{rows(train)} clips" if train.is_file() else "not there"
    others = [kind for kind in KINDS[1:] if kind in files]
    beside = f", with {' and '.join(others)}" if others else ""
    name = f"{section} ({shown(train)})" if section else str(shown(train))
    return f"{name}: {count}{beside}"


def _read(data: Data, console: Console) -> None:
    """Read each manifest and show what is in it. Raises DataError."""
    data.source = data.manifests["train"]
    data.samples.clear()
    for kind, path in data.manifests.items():
        with console.status(f"reading {shown(path)}"):
            manifest = load_manifest(path)
        if not manifest.samples:
            listed = "\n  ".join(str(problem) for problem in manifest.problems[:SHOWN_PROBLEMS])
            raise DataError(f"{shown(path)}: no usable row", remedy=listed)
        data.samples[kind] = manifest.samples
        _show(console, kind, manifest)


def _show(console: Console, kind: str, manifest: Manifest) -> None:
    if kind == "train":
        table = Table(header_style="bold")
        table.add_column("clip", overflow="ellipsis", no_wrap=True, max_width=20)
        table.add_column("s", justify="right")
        table.add_column("text", overflow="fold")
        for sample in manifest.samples[:SHOWN_ROWS]:
            table.add_row(escape(sample.audio.name), f"{sample.duration_s:.1f}", escape(sample.text))
        console.print(table)
    total = duration(sum(sample.duration_s for sample in manifest.samples))
    unit = "h:mm:ss" if total.count(":") > 1 else "min:s"
    skipped = f": {counts(manifest.problems)}" if manifest.problems else ""
    clips = f"{kind}: {len(manifest.samples)} clips, {total} of speech ({unit})"
    console.print(f"{clips}, {len(manifest.problems)} rows skipped{skipped}")
    for problem in manifest.problems[:SHOWN_PROBLEMS]:
        console.print(f"  {escape(str(problem))}", style="yellow")
    if len(manifest.problems) > SHOWN_PROBLEMS:
        console.print(f"  and {len(manifest.problems) - SHOWN_PROBLEMS} more", style="yellow")


def _ask_split(questions: Questions, data: Data, console: Console) -> None:
    """Offer to split the training clips, but only if the test set is missing: without it no WER can be measured."""
    missing = [kind for kind in KINDS[1:] if kind not in data.manifests]
    if "test" not in missing:
        return
    message = f"There is no {' and no '.join(missing)} set. Split off a tenth of the clips for each?"
    if not questions.confirm("split", message, True):
        console.print("Without a test set no WER is measured.")
        return
    train = data.manifests["train"]
    try:
        parts, names = split(data.samples["train"], missing), new_names(train, ["train", *missing])
    except ValueError as error:
        console.print(f"Not split: {error}.", style="yellow")
        return
    for kind, samples in parts.items():
        data.manifests[kind], data.samples[kind] = names[kind], samples
        data.split[names[kind]] = samples
    console.print(
        ", ".join(f"{shown(names[kind])}: {len(part)} clips" for kind, part in parts.items()) + " (written at the end)"
    )
