"""What a long phase is at: a moving bar on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from distributed.launcher.follow import LINE_EVERY_S
from whisper_tuner.text import Pace, duration, size

SHORT_S = 1.0  # what took less needs no last line
Figure = Callable[[Task], str]


def count(task: Task) -> str:
    return f"{task.completed:.0f}/{task.total or 0:.0f}"


def share(task: Task) -> str:
    return f"{task.percentage:.0f} %"


def transfer(task: Task) -> str:
    if not task.total:  # nobody knows how much there is
        return ""
    speed = f", {size(task.speed)}/s" if task.speed else ""
    return f"{size(task.completed)} of {size(task.total)}{speed}"


def can_move(console: Console) -> bool:
    """Tell whether lines can be written over: not in a file or a pipe, nor where TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal


def progress(console: Console, figure: Figure = count) -> Progress:
    """Return what is used as rich's own. figure: tells how far a task is."""
    if not can_move(console):
        return PlainProgress(console, figure)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Column(figure), _Column(Timing()))
    return Progress(*columns, console=console, transient=True)


@contextlib.contextmanager
def counting(console: Console, text: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar for one task; gives a function to call with how much of it is done (and how much there is)."""
    with progress(console) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


class PlainProgress(Progress):
    """Print a line about each task every ten seconds, and when it is done.

    Of a task without a total it tells only how long it takes.
    """

    def __init__(self, console: Console, figure: Figure, get_time: Callable[[], float] = time.monotonic):
        super().__init__(console=console, disable=True, get_time=get_time)
        self._figure = figure
        self._timing = Timing()
        self._told: dict[TaskID, float] = {}

    def update(self, task_id: TaskID, **values) -> None:
        task = self._tasks[task_id]
        was_finished, now = task.finished, self.get_time()
        super().update(task_id, **values)
        timing, elapsed = self._timing(task), task.elapsed or 0.0
        since = self._told.setdefault(task_id, now - elapsed)
        ends = task.finished and not was_finished and elapsed >= SHORT_S
        if ends or (not task.finished and now - since >= LINE_EVERY_S):
            self._told[task_id] = now
            when = f"took {duration(elapsed)}" if task.finished else timing
            line = ", ".join(filter(None, [self._figure(task), when]))
            self.console.print(f"{task.description}: {line}", markup=False, soft_wrap=True)


class Timing:
    """How much longer each task takes, by its rate so far; how long it has taken, where it has no total."""

    def __init__(self) -> None:
        self._paces: dict[TaskID, Pace] = {}

    def __call__(self, task: Task) -> str:
        elapsed = task.elapsed or 0.0
        if task.total is None:
            return f"{duration(elapsed)} so far"
        left = self._paces.setdefault(task.id, Pace()).left(elapsed, task.completed, task.total)
        return f"{duration(left)} left" if left else ""


class _Column(ProgressColumn):
    def __init__(self, figure: Figure):
        super().__init__(Column(no_wrap=True))  # on a narrow terminal the bar is shorter instead
        self._figure = figure

    def render(self, task: Task) -> Text:
        return Text(self._figure(task))


def _in_a_row(text: str) -> Text:
    """Return text that is cut at the terminal's width: of two rows a key that is pressed would leave one behind."""
    return Text(text, no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def working(console: Console, text: str = "", *, every_s: float = LINE_EVERY_S) -> Iterator[Callable[[str], None]]:
    """Say that something goes on of which nobody knows how far it is; gives a function that changes what is said."""
    if can_move(console):
        with console.status(_in_a_row(text)) as status:
            yield lambda changed: status.update(_in_a_row(changed))
        return
    said, over, began = [text], threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(every_s):
            console.print(f"{said[0]}: {duration(time.monotonic() - began)} so far", markup=False, soft_wrap=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield lambda changed: said.__setitem__(0, changed)
    finally:
        over.set()
        thread.join()
