"""`multimac transcribe`: what is said in audio files and folders of them, as text or subtitles."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from distributed.hosts.keep_awake import awake
from distributed.run_dir.summary import RunSummary
from exogym.config import nearest
from multimac.report.asked import listed_clips
from multimac.view.models import english_only, fetch_model, model_named, origin_of, unfinished
from multimac.view.progress import progress, share, working
from multimac.view.terminal import Console
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, TunerError
from whisper_tuner.eval.subtitles import SUFFIXES, rendered
from whisper_tuner.files import AUDIO_SUFFIXES, check_writable, like, write_shared
from whisper_tuner.interrupts import as_ctrl_c
from whisper_tuner.languages import language_code
from whisper_tuner.text import counted, harmless

from .options import CONFIG, MODEL, Config, Language, command

if TYPE_CHECKING:
    from whisper_tuner.eval.transcription import Recording

STDIN = Path("-")
SHORT_S, WINDOW_S = 15, 30  # clips of half of what Whisper hears at once


@command("transcribe")
@awake()
def transcribe(
    audio: Annotated[list[Path], Argument(help="Recordings of any length, folders of them, or - for stdin.")],
    model: Annotated[str, Option("--model", help=MODEL)],
    form: Annotated[str, Option("--format", help="text, srt, vtt or json.")] = "text",
    words: Annotated[
        bool, Option("--words", help="Tell when each word is said: in JSON, and for the times of subtitles.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder for the files. [default: beside each recording]")] = None,
    language: Language = "",
    force: Annotated[bool, Option("--force", help="Overwrite existing files.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Transcribe recordings: text on the terminal, or files with times. What came from stdin goes to stdout."""
    if form not in SUFFIXES:
        what = f"--format {form}: no such format{nearest(form, SUFFIXES)}"
        raise ConfigError(what, remedy=f"Known: {', '.join(SUFFIXES)}.")
    if words and form == "text":
        raise ConfigError("--words: plain text has no times", remedy="Add --format json, srt or vtt.")
    code = language_code(language) if language else None
    written = _files(audio, form, out)
    model = model_named(model, config)
    _check_files(audio, written, force=force)
    fetch_model(model)
    console = Console(stderr=True)
    if said := unfinished(model):
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    with _from_stdin() if STDIN in written else contextlib.nullcontext(STDIN) as spooled:
        heard = _listener(console, model, code, words=words)
        return _transcribe_all(console, written, spooled, heard, form=form, force=force)


def _check_files(audio: Sequence[Path], written: dict[Path, Path | None], *, force: bool) -> None:
    """Refuse what cannot be read or written, before the model is loaded. written: as `_files` returns them."""
    if missing := [path for path in audio if path != STDIN and not path.exists()]:
        near = like(missing[0]) if len(missing) == 1 else ""
        raise DataError(f"no such audio file: {', '.join(map(str, missing))}{near}", remedy="Check its path.")
    if not written:
        raise DataError(f"no audio below {', '.join(map(str, audio))}", remedy="Name a file, or another folder.")
    files = [file for file in written.values() if file]
    if files and len(files) == len(written) and not force and all(file.exists() for file in files):
        what = f"{files[0]} exists already{', and so do all others' if len(files) > 1 else ''}"
        raise DataError(what, remedy="Name another folder with --out, or overwrite it with --force.")
    for folder in dict.fromkeys(file.parent for file in files):
        check_writable(folder)


def _transcribe_all(
    console: Console,
    written: dict[Path, Path | None],
    spooled: Path,
    heard: Callable[..., Recording],
    *,
    form: str,
    force: bool,
) -> ExitStatus:
    """Transcribe each recording. written: as `_files` returns them. spooled: the file that has what came from stdin."""
    failed = 0
    with progress(console, share) as bar:
        for number, (audio, file) in enumerate(written.items(), start=1):
            name = "stdin" if audio == STDIN else str(audio)
            task = bar.add_task(f"{number}/{len(written)} {Path(name).name[-40:]}", total=None)
            try:
                if file and file.exists() and not force:
                    raise DataError(
                        f"{file} exists already", remedy="Name another folder with --out, or overwrite it with --force."
                    )
                recording = heard(spooled if audio == STDIN else audio, partial(bar.update, task))
                if file:
                    _write(file, rendered(recording, form, audio))
                    console.print(f"{name} -> {file}", soft_wrap=True)
                elif form != "text":
                    print(harmless(rendered(recording, form, audio)), end="", flush=True)
                else:
                    print(harmless(f"{name}: {recording.text}" if len(written) > 1 else recording.text), flush=True)
            except TunerError as error:
                failed += 1
                told = str(error).replace(str(spooled), name) if audio == STDIN else error
                console.print(f"not transcribed: {told}", soft_wrap=True)
            bar.remove_task(task)
    if failed and len(written) > 1:
        console.print(f"{len(written) - failed} of {counted(len(written), 'recording')} transcribed")
    return ExitStatus.DATA if failed else ExitStatus.OK


def _listener(console: Console, model_path: str, code: str | None, *, words: bool) -> Callable[..., Recording]:
    """Load the model, and return a function of a file and of `update(total=, completed=)` of its progress bar.

    code: the language's. Without it the model does what the run that made it trained it for.
    """
    from exogym import device as devices
    from whisper_tuner.data.audio import duration
    from whisper_tuner.data.labels import is_multilingual
    from whisper_tuner.eval.transcription import require_alignment, transcribe_recording
    from whisper_tuner.export.final import load_model
    from whisper_tuner.model.base_model import whisper_of

    origin, asked = origin_of(model_path), code
    if code is None and origin and origin.language:
        code = language_code(origin.language)
    with working(console, "loading the model"):
        model, processor = load_model(model_path)
        model = model.to(devices.choose())  # type: ignore[arg-type]  # transformers' own type of it is wrong
    if asked and not is_multilingual(whisper_of(model)):
        console.print(english_only(model_path), style="yellow", soft_wrap=True)
    if words:
        require_alignment(whisper_of(model), processor)

    warning = _on_short_clips(origin) if origin else ""

    def heard(audio: Path, update: Callable[..., None]) -> Recording:
        nonlocal warning
        update(total=(seconds := duration(audio)))
        if warning and seconds > WINDOW_S:
            console.print(warning, style="yellow", markup=False, soft_wrap=True)
            warning = ""  # once
        return transcribe_recording(
            model,
            processor,
            audio,
            language=code,
            task=origin.task if origin else None,
            words=words,
            progress=lambda seconds: update(completed=seconds),
        )

    return heard


def _on_short_clips(run: RunSummary) -> str:
    """Say that a run's model has only learnt from short clips, without times; "" where it has not."""
    clips, hours, _ = listed_clips(run.path / "train.csv") or (0, 0.0, "")
    mean_s = 3600 * hours / max(1, clips)
    if not 0 < mean_s < SHORT_S or run.settings.get("timestamps_share"):
        return ""
    what = f"{run.id} was trained on clips of {mean_s:.0f} s on average, without times"
    return f"{what}: in recordings of over {WINDOW_S} s its model may make many more mistakes than in its test"


@contextlib.contextmanager
def _from_stdin() -> Iterator[Path]:
    """Copy stdin to a file, which is removed in the end, also where the terminal is closed."""
    if sys.stdin is None or sys.stdin.isatty():
        what = "- means audio from stdin, but nothing is piped into it"
        raise ConfigError(what, remedy="For example: cat interview.m4a | multimac transcribe - --model last")
    with as_ctrl_c(signal.SIGHUP), tempfile.TemporaryDirectory(prefix="multimac-stdin-") as folder:
        spooled = Path(folder) / "stdin"
        try:
            with spooled.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            remedy = "Give it room: TMPDIR names another folder."
            raise DataError(f"stdin cannot be copied to {folder}: {error.strerror}", remedy=remedy) from None
        if not spooled.stat().st_size:
            raise DataError("no audio came from stdin", remedy="See what the program before the pipe says.")
        yield spooled


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_shared(file, text)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", remedy="Choose another folder with --out.") from None


def _files(paths: Sequence[Path], form: str, out: Path | None) -> dict[Path, Path | None]:
    """Return each recording with a file of its own for its text.

    The file is None for what goes to stdout: without --out, all plain text, and what came from stdin.
    """
    found: dict[Path, Path | None] = {}
    taken: set[Path] = set()
    for audio, name in _recordings(paths):
        if audio in found:
            continue
        if out is None and (form == "text" or audio == STDIN):
            found[audio] = None
            continue
        whole = out / name if out else audio
        written = whole.with_suffix(SUFFIXES[form])
        if written in taken:  # a.wav beside a.mp3
            written = whole.with_name(whole.name + SUFFIXES[form])
        if written in taken:
            raise DataError(f"two recordings would be written to {written}", remedy="Transcribe them one by one.")
        taken.add(written)
        found[audio] = written
    return found


def _recordings(paths: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Give each recording with its name relative to the folder that was named."""
    for path in paths:
        if path == STDIN:
            yield path, Path("stdin")
        elif not path.is_dir():
            yield path, Path(path.name)
        else:
            for file in sorted(path.rglob("*")):
                name = file.relative_to(path)
                hidden = any(part.startswith(".") for part in name.parts)  # ._x.wav on a Mac's USB stick
                if file.suffix.lower() in AUDIO_SUFFIXES and not hidden and file.is_file():
                    yield file, name
