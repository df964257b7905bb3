"""Figures for people at a terminal."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TextIO

from .event import Event
from .logger import Logger
from .record import Record

if TYPE_CHECKING:
    from rich.progress import Progress


UNITS = ("B", "kB", "MB", "GB", "TB")


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
            self._show_bar()
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

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console(file=self._stream)
        self._bar = Progress("step", MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=console)
        self._bar.add_task("", total=self._total)
        self._bar.start()

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
