"""A folder for the files of a logger that was not told where to write."""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

from exogym.errors import SettingError

FOLDER, PROJECT = Path("logs"), "exogym"


def new_run_folder(project: str | None, experiment_name: str | None) -> Path:
    """logs/PROJECT/EXPERIMENT, or with the time for its name. One that is there already is left alone."""
    name = experiment_name or time.strftime("%Y-%m-%d-%H%M%S")
    for number in count(1):
        folder = FOLDER / (project or PROJECT) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        print(f"the figures of this run go to {folder}", file=sys.stderr)
        return folder


def check_one_place(given: str, path: object, project: str | None, experiment_name: str | None) -> None:
    if path is not None and (project or experiment_name):
        raise SettingError(f"give {given}, or project and experiment_name for a folder of their own, not both")
