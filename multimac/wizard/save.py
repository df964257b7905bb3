"""Writes what was answered, at the end: split manifests, a hosts file, and new sections of config.ini."""

from __future__ import annotations

from pathlib import Path

from whisper_tuner.data.dataset import write_manifest
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import write_shared
from whisper_tuner.paths import shown

from .draft import Draft
from .ini_text import read_text, with_sections


def save(draft: Draft) -> list[str]:
    """Write all of it, config.ini last, or nothing; returns what was written, in words. Raises ConfigError."""
    if read_text(draft.config_path) != draft.config_text:
        raise ConfigError(
            f"{draft.config_path.name} was changed while you answered", remedy="Nothing was written; start again."
        )
    before: dict[Path, bytes | None] = {}
    sections = draft.sections()
    try:
        for path, samples in draft.data.split.items():
            before[path] = None
            write_manifest(path, samples)
        if draft.group and draft.group.text is not None:
            path = draft.group.path
            before[path] = path.read_bytes() if path.exists() else None
            write_shared(path, draft.group.text)
        write_shared(draft.config_path, with_sections(draft.config_text, sections))
    except BaseException as error:
        for path, content in before.items():
            path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        if isinstance(error, OSError):
            place = error.filename or draft.config_path
            remedy = "Check the free space and the folder's permissions."
            raise ConfigError(f"{place}: {error.strerror}", remedy=remedy) from None
        raise
    said = [str(shown(path)) for path in draft.data.split]
    said += [str(shown(draft.group.path))] if draft.group and draft.group.text is not None else []
    return [*said, *(f"[{header}] in {draft.config_path.name}" for header, _ in sections)]
