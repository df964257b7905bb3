"""`multimac config show`: every setting, its value, where it came from, and what it means. Imports no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distributed.plan.automatic import open_settings
from distributed.plan.job import FROM_PROFILE, resolve
from multimac.view.narrow import USUAL_WIDTH, fitting
from whisper_tuner.config import KINDS, ConfigFile
from whisper_tuner.errors import ExitStatus


def config_show(path: Path, name: str) -> ExitStatus:
    config, console = ConfigFile(path), Console(markup=False)
    if not name:
        for kind in KINDS:
            console.print(f"{kind}: {', '.join(config.names(kind)) or 'none'}", highlight=False)
        return ExitStatus.OK
    job = resolve(config, name)
    table = Table(title=f"{name} ({path})", header_style="bold")
    for column in ("setting", "value", "from", "meaning"):
        table.add_column(column, overflow="fold")
    shown = dict.fromkeys(dataclasses.fields(job.profile), job.profile)
    if config.has("distributed", name):
        strategy = job.strategy_config(total_steps=1_000_000)
        shown |= dict.fromkeys(dataclasses.fields(job.distribution), job.distribution)
        shown |= {field: strategy for field in dataclasses.fields(strategy) if field.name not in FROM_PROFILE}
    chosen = open_settings(job) if config.has("distributed", name) else ()
    for field, part in shown.items():
        value, origin = _text(getattr(part, field.name)), job.origin.get(field.name, "default")
        if field.name in chosen:
            value, origin = "", "chosen at the start"
        table.add_row(field.name, value, origin, field.metadata["help"])
    console.print(fitting(console, table, below=USUAL_WIDTH))
    return ExitStatus.OK


def _text(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
