"""Loggers take the events of a run's ranks: to a terminal, to a CSV file, to TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from exogym.errors import ExogymError, SettingError

from .event import Event
from .summary import DEFAULT_INTERVAL, Record, Summary

if TYPE_CHECKING:
    from rich.progress import Progress

UNITS = ("B", "kB", "MB", "GB", "TB")
COLUMNS = tuple(field.name for field in fields(Record))
FOLDER, PROJECT = Path("logs"), "exogym"


class Logger(ABC):
    """Takes the events of a run's ranks, in the process that called `fit`, and writes records of their figures.

    A subclass has to `write` a record. `fit` takes any callable that takes an event; of one that has them, it calls
    `close()` at the end, and sets `log_interval` (optimizer steps that a record sums up) if `fit` was given one.
    A logger is for one run.
    """

    def __init__(self, *, log_interval: int | None = None):
        self._summary = Summary(DEFAULT_INTERVAL if log_interval is None else log_interval)
        self._has_started = self._is_closed = False

    @property
    def log_interval(self) -> int:
        return self._summary.log_interval

    @log_interval.setter
    def log_interval(self, steps: int) -> None:
        self._summary.log_interval = steps

    def __call__(self, event: Event) -> None:
        if self._is_closed:
            raise ExogymError(f"this {type(self).__name__} is closed: make a new one for each run")
        if event["type"] == "start" and not self._has_started:
            self._has_started = True
            self.started(event)
        for record in self._summary.take(event):
            self.write(record)
        self.saw(event)

    def close(self) -> None:
        """Write what is left. Safe when called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for record in self._summary.finish():
                self.write(record)
        finally:
            self.ended()

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write a record that is complete."""

    def started(self, event: Event) -> None:  # noqa: B027
        """Act on the start of the first rank: `event` has the run's settings."""

    def saw(self, event: Event) -> None:  # noqa: B027
        """Take any event, after the records that it completes."""

    def ended(self) -> None:  # noqa: B027
        """End: nothing more will come."""


class ConsoleLogger(Logger):
    """A line for each record, and for what else is worth knowing; a progress bar below if this is a terminal."""

    def __init__(self, *, log_interval: int | None = None, stream: TextIO | None = None):
        super().__init__(log_interval=log_interval)
        self._stream = stream or sys.stdout
        self._total: int | None = None
        self._step = 0
        self._said: dict[str, str] = {}  # type of event -> the last line, which each rank has to say
        self._bar: Progress | None = None

    def started(self, event: Event) -> None:
        self._total = event.get("total_steps")
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            console = Console(file=self._stream)
            self._bar = Progress("step", MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=console)
            self._bar.add_task("", total=self._total)
            self._bar.start()
        self._say(_start_line(event))

    def write(self, record: Record) -> None:
        self._say(line(record, self._total))

    def saw(self, event: Event) -> None:
        kind = event["type"]
        self._total = event.get("total_steps") or self._total
        told = TOLD.get(kind)
        if told and self._said.get(kind) != (text := told(event)):
            self._said[kind] = text
            self._say(text)
        if self._bar:
            self._step = event.get("step") or self._step
            self._bar.update(self._bar.task_ids[0], completed=self._step, total=self._total)

    def ended(self) -> None:
        if self._bar:
            self._bar.stop()

    def _say(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def _who(event: Event) -> str:
    who = event.get("host", event.get("rank"))
    return f"rank {who}" if isinstance(who, int) else str(who or "the run")


# What ranks tell besides figures. All ranks say the same, but for warnings.
TOLD = {
    "warning": lambda event: f"{_who(event)}: {event['what']}",
    "resume": lambda event: f"goes on from step {event['step']}",
    "stop": lambda event: "stops as it was asked to",
    "shares": lambda event: f"step {event['step']}: {event['what']}",
    "drift": lambda event: f"step {event['step']}: ranks had come to differ by rounding, and are equal again",
}


def line(record: Record, total_steps: int | None = None) -> str:
    """Show what is known of a record, as `step 20/400  epoch 1  loss 2.3 (perplexity 9.97) ...`."""
    of = f"/{total_steps}" if total_steps else ""
    head = "end at step" if record.kind == "end" else "step"
    parts = [f"{head} {record.step}{of}", f"epoch {record.epoch}"]
    parts += [_loss("loss", record.loss, record.perplexity)]
    parts += [_loss("validation loss", record.val_loss, record.val_perplexity)]
    if record.local_val_loss != record.val_loss:
        parts += [_loss("local validation loss", record.local_val_loss, record.local_val_perplexity)]
    parts += [_figure("accuracy", record.val_accuracy, "{:.1%}")]
    parts += [_figure("correlation of ranks", record.correlation, "{:.6f}")]
    parts += [_figure("lr", record.lr), _figure("gradient norm", record.grad_norm)]
    parts += [_figure("", record.samples_per_s, "{:.3g} samples/s")]
    if record.tokens_per_s != record.samples_per_s:
        parts += [_figure("", record.tokens_per_s, "{:.3g} tokens/s")]
    parts += [_size(record.bytes_per_step, "a step"), _size(record.bytes_total, "sent")]
    parts += [_size(record.bandwidth, "a second in exchanges"), _size(record.memory, "of memory")]
    return "  ".join(filter(None, parts))


def _start_line(event: Event) -> str:
    strategy = {**(event.get("strategy") or {})}
    name = strategy.pop("name", "training")
    given = ", ".join(f"{key}={value}" for key, value in strategy.items() if value is not None)
    batch_size = (event.get("settings") or {}).get("batch_size")
    ranks = f"{event.get('num_nodes', 1)} ranks on {event.get('device', 'cpu')}"
    parts = [f"{name}({given})" if given else name, ranks]
    parts += [f"{event['trainable']:,} parameters trained"] if event.get("trainable") else []
    parts += [f"batch size {batch_size}"] if batch_size else []
    parts += [f"{event['total_steps']} steps"] if event.get("total_steps") else []
    return ", ".join(parts)


def _loss(name: str, loss: float | None, perplexity: float | None) -> str:
    return "" if loss is None else f"{name} {loss:.4f} (perplexity {perplexity:.4g})"


def _figure(name: str, value: Any, form: str = "{:.3g}") -> str:
    return "" if value is None else f"{name} {form.format(value)}".strip()


def _size(value: float | None, what: str) -> str:
    if value is None:
        return ""
    power = min(int(math.log10(max(value, 1)) // 3), len(UNITS) - 1)
    return f"{value / 1000**power:.3g} {UNITS[power]} {what}"


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
        break
    print(f"the figures of this run go to {folder}", file=sys.stderr)
    return folder


def check_one_place(given: str, path: object, project: str | None, experiment_name: str | None) -> None:
    if path is not None and (project or experiment_name):
        raise SettingError(f"give {given}, or project and experiment_name for a folder of their own, not both")
