"""Paths as users write them and as they are shown to them."""

from __future__ import annotations

from pathlib import Path

# Of files that libsndfile, ffmpeg or a Mac's afconvert may read: what a folder of audio is searched for.
AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc", ".caf"),
    *(".wma", ".amr", ".au", ".sph", ".webm", ".mp4", ".m4v", ".mov", ".mkv", ".avi", ".3gp"),
)


def expanded(path: str | Path) -> Path:
    """With the home folder for `~`; before a name that no user has, or can have, it is an ordinary character."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def shown(path: Path) -> Path:
    """Relative to here where it lies below: it is what a user would type."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
