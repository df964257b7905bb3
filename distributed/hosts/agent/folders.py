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

    def mark(self, folders: list, name: str, master: list) -> dict:
        """Mark each folder, or the nearest one above that exists; the marks go when the agent ends.

        Answers with the names that lead from each mark to its folder (`below`), whether `a` and `A` are the same name
        there (`caseless`), and another master of the first folder (`master`), which works in it now (`busy`).
        """
        below, caseless = [], False
        for number, folder in enumerate(map(resolved, folders)):
            there = next(place for place in (folder, *folder.parents) if place.is_dir())
            path = there / f"{MARK}{name}-{number}"
            path.touch(mode=0o600)
            self._marks.append(path)
            caseless = caseless or os.path.lexists(str(there / path.name.upper()))
            below.append(list(folder.parts[len(there.parts) :]))
        other, busy = other_master(resolved(folders[0]) / PRIVATE, master)
        return {"below": below, "caseless": caseless, "master": other, "busy": busy}

    def seen(self, folders: list, marks: list) -> dict:
        """Which of the marks [name, number] are in a folder or above it.

        Answers with [the mark's position, names that lead from the mark to the folder].
        """
        found = []
        for folder in map(resolved, folders):
            for place in (folder, *folder.parents):
                names = list(folder.parts[len(place.parts) :])
                paths = [str(place / f"{MARK}{name}-{which}") for name, which in marks]
                found += [[at, names] for at, path in enumerate(paths) if os.path.lexists(path)]
        return {"seen": found}

    def kill(self) -> None:
        for path in self._marks:
            with contextlib.suppress(OSError):
                path.unlink()


def resolved(folder: str) -> Path:
    return Path(folder).expanduser().resolve()
