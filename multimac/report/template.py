"""A page is one file, filled in from a template, that others may read: style and sound inside, and no folder's name.

Recordings in it are small; a reader can hear what the model heard.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from whisper_tuner.data.audio import CLIP_S, REFUSED, SAMPLE_RATE, load_audio, read_channels
from whisper_tuner.errors import RunError, TunerError
from whisper_tuner.files import DISK
from whisper_tuner.text import duration, size

HERE = Path(__file__).parent
BARS = 240  # of a waveform
MOST_BYTES = 10_000_000  # of all recordings of a page, as they stand in it
# Safari plays OGG only since 2025. MP3 needs about 6 kB for a second of speech, FLAC three times as much.
FORMATS = {"MP3": "audio/mpeg", "FLAC": "audio/flac"}
GONE, DAMAGED = "The recording is not here any more.", "The recording cannot be read."
FULL = "The recording is left out: the page would become too large."
# Of a folder below another, as in /data/clips/a.wav. Its names may hold spaces: rather a word too many is left out.
# What stands before is no part of a word (I/O, 1/2) nor of an address (https://...).
_FOLDERS = re.compile(r"(?<![\w./~])(?:~[\w.-]*)?/(?:[^\s/'\"<>|:][^/\n'\"<>|:,;()]*/)+")
_TOP = re.compile(r"(?<![\w./~<])(?:~[\w.-]*)?/(?=\w[\w.-]*)")  # as in /clips


class Private:
    """Takes the names of folders out of texts. folders: where the run lies, and what else is known."""

    def __init__(self, folders: Iterable[Path] = ()):
        known = {str(folder) for folder in folders if folder.is_absolute() and len(folder.parts) > 1}
        self._known = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text with names of files in place of their paths."""
        for folder in self._known:
            text = text.replace(f"{folder}/", "/")
        return _TOP.sub("", _FOLDERS.sub("", text))


@functools.cache
def pages() -> Environment:
    """Return all templates: those of reports, and the live page's."""
    folders = [HERE, HERE.parent / "watch"]
    made = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": number, "duration": duration, "size": size, "hours": hours, "percent": percent}
    made.globals["live"] = False
    made.globals["style"] = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    return made


def rendered(template: str, *, block: str = "", **values: object) -> str:
    """Fill in a template or a block of it. Texts are escaped; half a character, which JSON may hold, is no UTF-8."""
    values["written"] = moment(time.time()) + time.strftime(" %z")
    page = pages().get_template(template)
    text = "".join(page.blocks[block](page.new_context(values))) if block else page.render(**values)
    return text.encode("utf-8", "replace").decode("utf-8")


@contextlib.contextmanager
def told_as_run_error(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a RunError with a remedy."""
    try:
        yield
    except OSError as error:
        space = "Free some space, or name" if error.errno in DISK else "Name"
        raise RunError(f"{path}: {error.strerror}", remedy=f"{space} another place with --out.") from None


def moment(when: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (ValueError, OverflowError, OSError):  # a damaged line
        return ""


def hours(value: float | None) -> str:
    """Write a length as `12 min`, or `3.4 h`."""
    if value is None:
        return ""
    return f"{value:,.1f} h" if value >= 1 else f"{value * 60:.1f} min"


def percent(value: float, of: float) -> str:
    """Return the place of a value on a scale, for CSS."""
    return f"{100 * min(1.0, max(0.0, value / of)):.2f}%"


def number(value: float) -> str:
    """Short, and without an exponent where a person would write none."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:.6g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Player:
    """An address for <audio>, or why there is none."""

    address: str = ""
    missing: str = ""


class Players:
    def __init__(self, folders: Sequence[Path] = (), most_bytes: int = MOST_BYTES):
        """folders: where a relative path may begin."""
        self._folders, self.left = folders, most_bytes

    def of(self, path: Path) -> Player:
        """Never raises: a report without sound is still a report."""
        try:
            found = next((place for folder in self._folders if (place := folder / path).is_file()), None)
            if found is None:
                return Player(missing=GONE)
            kind, data = encoded(found)
        except (TunerError, OSError, *REFUSED):
            return Player(missing=DAMAGED)
        address = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if len(address) > self.left:
            return Player(missing=FULL)
        self.left -= len(address)
        return Player(address=address)


def encoded(path: Path) -> tuple[str, bytes]:
    """Return media type and content, 16 kHz mono as models hear it. Raises TunerError, OSError or one of REFUSED."""
    name = next(name for name in FORMATS if name in soundfile.available_formats())
    content = io.BytesIO()
    soundfile.write(content, load_audio(path, longest_s=CLIP_S), SAMPLE_RATE, format=name)
    return FORMATS[name], content.getvalue()


def wave(audio: Path) -> str:
    """Draw the highest and lowest sample of each of BARS stretches, as an SVG path in a box of BARS by 2."""
    try:
        samples, _ = read_channels(audio)
    except (TunerError, OSError):
        return ""
    mono = samples.mean(axis=1)
    ends = np.linspace(0, len(mono), BARS + 1).astype(int)
    spans = [(begin, max(end, begin + 1)) for begin, end in itertools.pairwise(ends) if begin < len(mono)]
    lines = ((mono[begin:end].min(), mono[begin:end].max()) for begin, end in spans)
    return "".join(f"M{at} {-high:.3f}V{-low + 0.004:.3f}" for at, (low, high) in enumerate(lines))
