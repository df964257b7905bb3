"""Figures as a table in a file."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

from .logger import Logger
from .record import Record
from .run_folder import check_one_place, new_run_folder

COLUMNS = tuple(field.name for field in fields(Record))


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
