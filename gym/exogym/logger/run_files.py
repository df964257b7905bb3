"""What upstream exogym's arguments of `fit` write: W&B, or files in logs/RUN_NAME with its names of columns."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Mapping
from typing import Any

from exogym.config import one_of, refuse
from exogym.logger.event import Event
from exogym.logger.logger import FOLDER, Logger, Record
from exogym.logger.wandb_logger import WandbLogger


def logger_of(settings: dict[str, Any], logger: Any) -> Any:
    """Return the logger that upstream's arguments of `fit` ask for, else `logger`; take them out of `settings`."""
    names = ("wandb_project", "run_name", "log_x_axis", "kwargs")
    project, run_name, axis, about = (settings.pop(name, None) for name in names)
    if logger is not None:
        refuse("logger is given", wandb_project=project, run_name=run_name, log_x_axis=axis, kwargs=about)
        return logger
    if one_of("log_x_axis", axis or "step", ("step", "examples")) == "examples":
        warnings.warn('log_x_axis="examples" has no effect: figures go by step', stacklevel=3)
    if project is not None:
        return WandbLogger(project, run_name, config=about, log_interval=1)
    return None if run_name is None else RunFiles(run_name, about or {})


FILES = {  # columns of upstream's files -> our names
    "train": {"step": "step", "train_loss": "loss", "train_perplexity": "perplexity", "lr": "lr"},
    "validation": {
        **{"step": "step", "local_loss": "local_val_loss", "local_perplexity": "local_val_perplexity"},
        **{"global_loss": "val_loss", "global_perplexity": "val_perplexity", "accuracy": "val_accuracy"},
    },
}


class RunFiles(Logger):
    """Writes every step into logs/RUN_NAME, as upstream does: train.csv, validation.csv and config.json."""

    def __init__(self, run_name: str, about: Mapping[str, Any]):
        super().__init__(log_interval=1)
        self._folder, self._about, self._batch = FOLDER / run_name, dict(about), 0
        self._folder.mkdir(parents=True, exist_ok=True)

    def started(self, event: Event) -> None:
        self._batch = (event["settings"].get("batch_size") or 0) * event["num_nodes"]
        (self._folder / "config.json").write_text(json.dumps(event | self._about, indent=2), encoding="utf-8")

    def write(self, record: Record) -> None:
        row = {column: getattr(record, name) for column, name in FILES.get(record.kind, {}).items()}
        if row:
            row["examples_trained"] = record.step * self._batch
            with (self._folder / f"{record.kind}.csv").open("a", newline="", encoding="utf-8") as file:
                rows = csv.DictWriter(file, row)
                if file.tell() == 0:
                    rows.writeheader()
                rows.writerow(row)
