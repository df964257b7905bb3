"""Shows files on their way to the hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from distributed.hosts.sync import SyncReport
from whisper_tuner.hub import HUB_ID, model_file, model_folder
from whisper_tuner.paths import expanded
from whisper_tuner.text import size


def fetch_model(name: str) -> None:
    """Download a model from the hub, with a bar, if it is not here yet. Folders and adapters are left alone."""
    if not expanded(name).exists() and re.fullmatch(HUB_ID, name) and model_file(name, "config.json"):
        model_folder(name, show=True)


def show_sync(console: Console, reports: Iterable[SyncReport]) -> None:
    for report in reports:
        said = f"{report.files} files, {size(report.bytes)} sent" if report.files else "up to date"
        console.print(f"{report.host}: {said} in {report.seconds:.1f} s")


class Transfers:
    """A bar for each host; it is the progress callback of sync and setup."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Transfers:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def __call__(self, host: str, done: int, total: int, file: str) -> None:
        if host not in self._tasks:
            self._tasks[host] = self._bars.add_task(host, total=total)
        self._bars.update(self._tasks[host], completed=done, total=total)
