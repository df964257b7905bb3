"""Where a host's folders really are: each host makes marks, empty files, and looks for those of the others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .files import PRIVATE
from .masters import other_master
from .session import children

MARK = ".multimac-mark-"


class Folders:
    def __init__(self):
        self._marks: list = []
        children.append(self)

    def mark(self, folders: list, master: list) -> dict:
        """Mark each folder, or the nearest one above that exists; the marks go when the agent ends.

        Answers with `marks` ([its name, names that lead from it to the folder]), whether `a` and `A` are the same name
        there (`caseless`), and another master of the first folder (`master`), which works in it now (`busy`).
        """
        marks, caseless = [], False
        for folder in map(resolved, folders):
            there = next(path for path in (folder, *folder.parents) if os.path.isdir(str(path)))  # noqa: PTH112 - Path.is_dir raises for what may not be looked into
            path = there / f"{MARK}{os.urandom(8).hex()}"
            self._marks.append(path)
            with contextlib.suppress(OSError):  # who cannot write there replaces and removes nothing
                path.touch(mode=0o600)
            caseless = caseless or os.path.lexists(str(there / path.name.upper()))
            marks.append([path.name, list(folder.parts[len(there.parts) :])])
        other, busy = other_master(resolved(folders[0]) / PRIVATE, master)
        return {"marks": marks, "caseless": caseless, "master": other, "busy": busy}

    def seen(self, folders: list, marks: list) -> dict:
        """Which marks are in a folder or above it, each with the names that lead from it to the folder."""
        found = []
        for folder in map(resolved, folders):
            for place in (folder, *folder.parents):
                names = list(folder.parts[len(place.parts) :])
                found += [[mark, names] for mark in marks if os.path.lexists(str(place / mark))]
        return {"seen": found}

    def kill(self) -> None:
        for path in self._marks:
            with contextlib.suppress(OSError):
                path.unlink()


def resolved(folder: str) -> Path:
    return Path(folder).expanduser().resolve()
