"""Texts without the folders of the machine that wrote them: others may read a report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

# Of a folder below another, as in /data/clips/a.wav. Its names may hold spaces: rather a word too many is left out.
# What stands before is no part of a word (I/O, 1/2) nor of an address (https://...).
_FOLDERS = re.compile(r"(?<![\w./~])(?:~[\w.-]*)?/(?:[^\s/'\"<>|:][^/\n'\"<>|:,;()]*/)+")
_TOP = re.compile(r"(?<![\w./~<])(?:~[\w.-]*)?/(?=\w[\w.-]*)")  # as in /clips


class Private:
    """folders: where the run lies, and what else is known."""

    def __init__(self, folders: Iterable[Path] = ()):
        known = {str(folder) for folder in folders if folder.is_absolute() and len(folder.parts) > 1}
        self._known = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        """With names of files in place of their paths."""
        for folder in self._known:
            text = text.replace(f"{folder}/", "/")
        return _TOP.sub("", _FOLDERS.sub("", text))


def file_name(path: str | Path | None) -> str:
    """Of a path; a hub id, as openai/whisper-small, stays."""
    text = str(path or "")
    return Path(text).name if text.startswith(("/", "~", ".")) else text
