"""`multimac transcribe`: what is said in audio files and folders of them, as text or subtitles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from distributed.hosts.keep_awake import awake
from multimac.commands.runs import folders_of
from multimac.view.models import model_named
from multimac.view.transfers import fetch_model
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, TunerError
from whisper_tuner.eval.subtitles import SUFFIXES, rendered
from whisper_tuner.files import write_shared
from whisper_tuner.languages import language_code
from whisper_tuner.settings import nearest

if TYPE_CHECKING:
    from whisper_tuner.eval.transcription import Recording

AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc", ".caf"),
    *(".wma", ".amr", ".webm", ".mp4", ".mov"),
)


@awake()
def transcribe(
    config: Path, paths: Sequence[Path], model: str, *, form: str, out: Path | None, language: str, force: bool
) -> ExitStatus:
    if form not in SUFFIXES:
        what = f"--format {form}: no such format{nearest(form, SUFFIXES)}"
        raise ConfigError(what, remedy=f"Known: {', '.join(SUFFIXES)}.")
    written = _files(paths, form, out)
    if not written:
        raise DataError(f"no audio below {', '.join(map(str, paths))}", remedy="Name a file, or another folder.")
    model_path = model_named(model, lambda: folders_of(config, None))
    _make_folder(out)
    console = Console(stderr=True, highlight=False, markup=False)
    heard = _listener(console, model_path, language)
    failed = 0
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        for number, (audio, file) in enumerate(written.items(), start=1):
            task = bar.add_task(f"{number}/{len(written)} {audio.name[-40:]}", total=None)
            try:
                if file and file.exists() and not force:
                    raise DataError(f"{file} exists already", remedy="Remove it, or overwrite it with --force.")
                recording = heard(audio, partial(bar.update, task))
                if file:
                    _write(file, rendered(recording, form, audio))
                    console.print(f"{audio} -> {file}", soft_wrap=True)
                else:
                    print(f"{audio}: {recording.text}" if len(written) > 1 else recording.text, flush=True)
            except TunerError as error:
                failed += 1
                console.print(f"not transcribed: {error}", soft_wrap=True)
            bar.remove_task(task)
    if failed and len(written) > 1:
        console.print(f"{len(written) - failed} of {len(written)} recordings transcribed")
    return ExitStatus.DATA if failed else ExitStatus.OK


def _listener(console: Console, model_path: str, language: str) -> Callable[..., Recording]:
    """A function of a file and of `update(total=, completed=)` of its progress bar; the model is loaded here.

    Without `language` the model does what the run that made it trained it for.
    """
    from exogym import device as devices
    from multimac.view.comparison import origin_of
    from whisper_tuner.data.audio import duration
    from whisper_tuner.eval.transcription import transcribe_recording
    from whisper_tuner.export.final import load_model

    origin = origin_of(model_path)
    language = language or (origin.language if origin else "")
    asked = {"language": language_code(language) if language else None, "task": origin.task if origin else None}
    fetch_model(model_path)
    with console.status("loading the model"):
        model, processor = load_model(model_path)
        model = model.to(devices.choose())

    def heard(audio: Path, update: Callable[..., None]) -> Recording:
        update(total=duration(audio))
        return transcribe_recording(model, processor, audio, progress=lambda s: update(completed=s), **asked)

    return heard


def _make_folder(folder: Path | None) -> None:
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}", remedy="Choose another folder.") from None


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_shared(file, text)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", remedy="Choose another folder with --out.") from None


def _files(paths: Sequence[Path], form: str, out: Path | None) -> dict[Path, Path | None]:
    """Every recording, and a file of its own for its text; plain text goes to the terminal without --out."""
    found: dict[Path, Path | None] = {}
    taken: set[Path] = set()
    for audio, name in _recordings(paths):
        if audio in found:
            continue
        if form == "text" and out is None:
            found[audio] = None
            continue
        whole = (out / name) if out else audio
        written = whole.with_suffix(SUFFIXES[form])
        if written in taken:  # a.wav beside a.mp3
            written = whole.with_name(whole.name + SUFFIXES[form])
        if written in taken:
            raise DataError(f"two recordings would be written to {written}", remedy="Transcribe them one by one.")
        taken.add(written)
        found[audio] = written
    return found


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
