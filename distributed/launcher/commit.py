"""Which commit of this program is here, as git's files say it: on a Mac without its developer tools there is no git."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
NO_COMMIT = (OSError, UnicodeDecodeError, IndexError)


def commit_of(project: Path) -> str:
    """Return "" if it is not a clone. The files may have been changed since."""
    with contextlib.suppress(*NO_COMMIT):
        folder = project / ".git"
        if folder.is_file():  # of a worktree or a submodule
            folder = project / folder.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        found = _named(folder, head.removeprefix("ref:").strip()) if head.startswith("ref:") else head
        return found if HASH.fullmatch(found) else ""
    return ""


def _named(folder: Path, reference: str) -> str:
    with contextlib.suppress(*NO_COMMIT):
        common = folder / (folder / "commondir").read_text(encoding="utf-8").strip()
        return _read(common, reference)
    return _read(folder, reference)


def _read(folder: Path, reference: str) -> str:
    """Read a reference from a file of its own, or from the list of all."""
    with contextlib.suppress(OSError):
        return (folder / reference).read_text(encoding="utf-8").strip()
    lines = (folder / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {reference}")), "")
