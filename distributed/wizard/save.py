"""Writing what was answered: new sections of config.ini, split manifests, a hosts file. Nothing before the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from whisper_tuner.dataset import write_manifest
from whisper_tuner.errors import ConfigError
from whisper_tuner.paths import shown
from whisper_tuner.runs import write_shared

from .draft import Draft, Section

HEADER = re.compile(r"\[([^\]]+)\]")


def with_sections(text: str, sections: Sequence[Section]) -> str:
    """`text` with these sections at its end; one that is there already is replaced where it stands. All else stays."""
    newline = "\r\n" if "\r\n" in text else "\n"
    for header, keys in sections:
        body = newline.join([f"[{header}]", *(f"{key} = {value}" for key, value in keys.items())]) + newline
        span = _span(text, header)
        if span:
            text = text[: span[0]] + body + text[span[1] :]
        else:
            gap = "" if not text else newline if text.endswith(("\n", "\r")) else newline * 2
            text = f"{text}{gap}{body}"
    return text


def existing(text: str, sections: Sequence[Section]) -> list[str]:
    """The headers among these that the text has already."""
    return [header for header, _ in sections if _span(text, header)]


def read_text(path: Path) -> str:
    """A config.ini as it is, its line ends included; '' if there is none. Raises ConfigError."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def save(draft: Draft) -> list[str]:
    """Write all of it, config.ini last; returns what was written, in words. Raises ConfigError, nothing half done."""
    if read_text(draft.config_path) != draft.config_text:
        raise ConfigError(
            f"{draft.config_path.name} was changed while you answered", remedy="Nothing was written: start again."
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
            raise ConfigError(f"{place}: {error.strerror}", remedy="Is there space, and is the folder yours?") from None
        raise
    said = [str(shown(path)) for path in draft.data.split]
    said += [str(shown(draft.group.path))] if draft.group and draft.group.text is not None else []
    return [*said, *(f"[{header}] in {draft.config_path.name}" for header, _ in sections)]


def _span(text: str, header: str) -> tuple[int, int] | None:
    """Where a section stands, without the comments and blank lines before the next one: those are the next one's."""
    start, end, position = None, 0, 0
    for line in text.splitlines(keepends=True):
        if match := HEADER.match(line):
            if start is not None:
                break
            if match[1] == header:
                start, end = position, position + len(line)
        position += len(line)
        if start is not None and line.strip() and not line.lstrip().startswith(("#", ";")):
            end = position
    return None if start is None else (start, end)
