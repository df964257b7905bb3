"""Shows a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from distributed.launcher import follow as follower
from distributed.launcher.follow import PlainScreen, Starter
from distributed.run_dir.run_view import RunView
from whisper_tuner.errors import ExitStatus
from whisper_tuner.text import duration, size

from .progress import can_move


class _Live:
    def __init__(self, live: Live):
        self._live = live

    def print(self, line: str) -> None:
        self._live.console.print(line, soft_wrap=True)

    def update(self, view: RunView) -> None:
        self._live.update(table(view))


def follow(run_dir: Path, launch: Starter, console: Console, *, position: int = 0) -> ExitStatus:
    """See launcher.follow."""
    if not can_move(console):
        return follower.follow(run_dir, launch, PlainScreen(), position=position)
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        return follower.follow(run_dir, launch, _Live(live), position=position)


def table(view: RunView) -> Table:
    rows = Table(expand=False, header_style="bold", box=None, padding=(0, 1, 0, 0))
    has_rounds = any(host.round for host in view.hosts.values())
    for name in ("host", "epoch", "step", "loss", "clips/s", *(["round"] if has_rounds else []), "sent", "left", ""):
        rows.add_column(name, justify="left" if name in ("host", "") else "right")
    for host in view.hosts.values():
        rows.add_row(
            host.name.removesuffix(".local"),
            str(host.epoch or ""),
            f"{host.step}/{host.total_steps}" if host.total_steps else "",
            f"{host.loss:.3f}" if host.loss is not None else "",
            f"{host.speed:.1f}" if host.speed else "",
            *([str(host.round or "")] if has_rounds else []),
            size(host.sent) if host.sent else "",
            duration(host.remaining),
            host.device if host.state == "training" else host.state,
        )
    if view.progress:
        rows.caption = view.progress
    return rows
