"""A page is one file, filled in from a template, that others may read: with its style inside, and no folder's name."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from whisper_tuner.errors import RunError
from whisper_tuner.files import DISK
from whisper_tuner.text import duration, size

from .charts import number

HERE = Path(__file__).parent
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


def rendered(template: str, **values: object) -> str:
    """Fill in a template, which escapes all texts; half a character, which JSON may hold, is no UTF-8."""
    pages = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters |= {"number": number, "duration": duration, "size": size, "hours": hours, "percent": percent}
    style = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    written = moment(time.time()) + time.strftime(" %z")
    page = pages.get_template(template).render(**values, style=style, written=written)
    return page.encode("utf-8", "replace").decode("utf-8")


@contextlib.contextmanager
def told_as_run_error(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a RunError with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "Free some space, or name another place with --out."
        raise RunError(f"{path}: {error.strerror}", remedy=remedy if error.errno in DISK else "") from None


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
