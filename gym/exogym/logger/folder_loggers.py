"""Loggers that write into a folder: figures as a table in a file, and for TensorBoard."""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import fields
from itertools import count
from pathlib import Path

from exogym.errors import SettingError

from .event import Event
from .logger import Logger
from .record import Record

COLUMNS = tuple(field.name for field in fields(Record))

FOLDER, PROJECT = Path("logs"), "exogym"


class CSVLogger(Logger):
    """One row a record, written at once. What a record does not have stays empty.

    path: the file, or with `append` the one to go on with, as of a run that is resumed. Without a path the file is
    metrics.csv in a new folder below logs/, see `path`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        project: str | None = None,
        experiment_name: str | None = None,
        append: bool = False,
        log_interval: int | None = None,
    ):
        super().__init__(log_interval=log_interval)
        check_one_place("path", path, project, experiment_name)
        self.path = Path(path) if path is not None else new_run_folder(project, experiment_name) / "metrics.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a" if append else "w", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, COLUMNS)
        if self._file.tell() == 0:
            self._rows.writeheader()
            self._file.flush()

    def write(self, record: Record) -> None:
        self._rows.writerow(vars(record))
        self._file.flush()

    def ended(self) -> None:
        self._file.close()


class TensorBoardLogger(Logger):
    """A scalar for each figure of a record, by its name; those of the end are below end/. Settings are a text.

    Look at them with `tensorboard --logdir DIRECTORY`. Without a directory it is a new folder below logs/, see
    `directory`.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str | None = None,
        experiment_name: str | None = None,
        log_interval: int | None = None,
    ):
        super().__init__(log_interval=log_interval)
        check_one_place("directory", directory, project, experiment_name)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError("TensorBoardLogger needs a package: pip install 'tensorboard>=2.18,<3'") from error
        self.directory = Path(directory) if directory is not None else new_run_folder(project, experiment_name)
        self._writer = SummaryWriter(str(self.directory))

    def started(self, event: Event) -> None:
        self._writer.add_text("settings", f"```\n{json.dumps(event, indent=2)}\n```")

    def write(self, record: Record) -> None:
        prefix = "end/" if record.kind == "end" else ""
        for name, value in record.figures().items():
            self._writer.add_scalar(prefix + name, value, record.step)
        self._writer.flush()

    def ended(self) -> None:
        self._writer.close()


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
