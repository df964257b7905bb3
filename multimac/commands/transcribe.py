"""`multimac transcribe`: what is said in audio files and folders of them, as text or subtitles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from multimac.view.transfers import fetch_model
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, TunerError
from whisper_tuner.eval.subtitles import SUFFIXES, rendered
from whisper_tuner.files import write_shared
from whisper_tuner.settings import nearest

if TYPE_CHECKING:
    from whisper_tuner.eval.transcription import Recording

AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc", ".caf"),
    *(".wma", ".amr", ".webm", ".mp4", ".mov"),
)


@dataclass(frozen=True)
class Item:
    """A recording, and the file for its text; None for the terminal."""

    audio: Path
    written: Path | None


def transcribe(
    paths: Sequence[Path],
    model_path: str,
    *,
    form: str = "text",
    out: Path | None = None,
    language: str = "",
    force: bool = False,
) -> ExitStatus:
    if form not in SUFFIXES:
        raise ConfigError(
            f"--format {form}: no such format{nearest(form, SUFFIXES)}", remedy=f"Known: {', '.join(SUFFIXES)}."
        )
    items = list(_items(paths, form, out))
    if not items:
        raise DataError(f"no audio below {', '.join(map(str, paths))}", remedy="Name a file, or another folder.")

    from multimac.view.comparison import origin_of
    from whisper_tuner.languages import language_code

    origin = origin_of(model_path)
    language = language or (origin.language if origin else "")
    language = language_code(language) if language else ""
    asked = {"language": language or None, "task": origin.task if origin else None}
    _make_folder(out)
    fetch_model(model_path)
    console = Console(stderr=True, highlight=False, markup=False)
    heard = _listener(console, model_path, asked)
    failed = 0
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        for number, item in enumerate(items, start=1):
            task = bar.add_task(f"{number}/{len(items)} {item.audio.name[-40:]}", total=None)
            try:
                if item.written and item.written.exists() and not force:
                    raise DataError(f"{item.written} exists already", remedy="Remove it, or overwrite it with --force.")
                recording = heard(item.audio, partial(bar.update, task))
                _write(item, recording, form, bar.console, named=len(items) > 1)
            except TunerError as error:
                failed += 1
                console.print(f"not transcribed: {error}", soft_wrap=True)
            bar.remove_task(task)
    if failed and len(items) > 1:
        console.print(f"{len(items) - failed} of {len(items)} recordings transcribed")
    return ExitStatus.DATA if failed else ExitStatus.OK


def _listener(console: Console, model_path: str, asked: dict[str, str | None]) -> Callable[..., Recording]:
    """A function of a file and of `update(total=, completed=)` of its progress bar; the model is loaded here."""
    from exogym import device as devices
    from whisper_tuner.data.audio import duration
    from whisper_tuner.eval.transcription import transcribe_recording
    from whisper_tuner.export.final import load_model

    with console.status("loading the model"):
        model, processor = load_model(model_path)
        model = model.to(devices.choose())

    def heard(audio: Path, update: Callable[..., None]) -> Recording:
        update(total=duration(audio))
        return transcribe_recording(model, processor, audio, progress=lambda s: update(completed=s), **asked)

    return heard


def _write(item: Item, recording: Recording, form: str, console: Console, *, named: bool) -> None:
    """To its file, or to the terminal; `named` puts the recording's name before its text there."""
    if item.written is None:
        console.file.flush()
        print(f"{item.audio}: {recording.text}" if named else recording.text, flush=True)
        return
    try:
        item.written.parent.mkdir(parents=True, exist_ok=True)
        write_shared(item.written, rendered(recording, form, item.audio))
    except OSError as error:
        raise DataError(f"{item.written}: {error.strerror}", remedy="Choose another folder with --out.") from None
    console.print(f"{item.audio} -> {item.written}", soft_wrap=True)


def _items(paths: Sequence[Path], form: str, out: Path | None) -> Iterator[Item]:
    """Every recording once, each with a file of its own. Without --out, plain text goes to the terminal."""
    taken: set[Path] = set()
    seen: set[Path] = set()
    suffix = SUFFIXES[form]
    for audio, name in _recordings(paths):
        if audio in seen:
            continue
        seen.add(audio)
        if form == "text" and out is None:
            yield Item(audio, None)
            continue
        whole = (out / name) if out else audio
        written = whole.with_suffix(suffix)
        if written in taken:  # a.wav beside a.mp3
            written = whole.with_name(whole.name + suffix)
        if written in taken:
            raise DataError(f"two recordings would be written to {written}", remedy="Transcribe them one by one.")
        taken.add(written)
        yield Item(audio, written)


def _recordings(paths: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """(recording, its name relative to the folder that was named)."""
    for path in paths:
        if not path.is_dir():
            yield path, Path(path.name)
            continue
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)  # ._x.wav on a Mac's USB stick
            if file.suffix.lower() in AUDIO_SUFFIXES and not hidden and file.is_file():
                yield file, file.relative_to(path)


def _make_folder(out: Path | None) -> None:
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}", remedy="Choose another folder.") from None
