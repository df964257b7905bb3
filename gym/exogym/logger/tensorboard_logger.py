"""Figures for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

from exogym.errors import SettingError

from .event import Event
from .logger import Logger
from .record import Record
from .run_folder import check_one_place, new_run_folder


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
