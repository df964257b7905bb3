"""Paths as users write them and as they are shown to them."""

from __future__ import annotations

import re
from pathlib import Path

# Of files that libsndfile, ffmpeg or a Mac's afconvert may read: what a folder of audio is searched for.
AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc", ".caf"),
    *(".wma", ".amr", ".au", ".sph", ".webm", ".mp4", ".m4v", ".mov", ".mkv", ".avi", ".3gp"),
)


def expanded(path: str | Path) -> Path:
    """Put the home folder for `~`; before a name that no user has, or can have, it is an ordinary character."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no disk takes
        return False


def shown(path: Path) -> Path:
    """Relative to here where it lies below: it is what a user would type."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def is_below(name: str) -> bool:
    """Tell if a relative name stays below the folder that it is joined to."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def below(folder: Path, name: str) -> Path:
    """The path `folder`/`name`, for a name that a host has said, or that stands in a file that somebody else wrote.

    Raises ValueError for a name that leads elsewhere, or that is none: with a control character, a backslash, or a `~`
    at its beginning.
    """
    if not is_below(name) or re.search(r"[\x00-\x1f\x7f-\x9f\\]|^~", name):
        raise ValueError(f"{name!r} is not a name below {folder}")
    return folder / name
