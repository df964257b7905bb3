"""`multimac config show`: every setting, its value, where it came from, and what it means. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

from rich.padding import Padding
from rich.text import Text
from typer import Argument, Option

from distributed.plan.automatic import open_settings
from distributed.plan.job import FROM_PROFILE, resolve
from multimac.view.run_tables import as_text
from multimac.view.terminal import Console
from whisper_tuner.config import KINDS, ConfigFile
from whisper_tuner.errors import ExitStatus

from .options import CONFIG, Config, command

COLUMNS = ("setting", "value", "from", "meaning")


@command("config show")
def config_show(
    name: Annotated[str, Argument(help="A [profile:NAME] or [distributed:NAME]; without it, all are listed.")] = "",
    as_json: Annotated[bool, Option("--json", help="As JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Print every setting of a profile: its value, where it comes from, what it means."""
    file, console = ConfigFile(config), Console(highlight=True)
    if as_json:
        told = _settings(file, name) if name else {kind: file.names(kind) for kind in KINDS}
        print(json.dumps(told, indent=2, default=str))
    elif name:
        rows = _settings(file, name)
        console.print(f"{name} ({config})", style="bold")
        for row in rows:
            setting, value, origin, meaning = map(as_text, row.values())
            console.print(Text.assemble((f"{setting} = {value}" if value else setting, "bold"), f"  ({origin})"))
            console.print(Padding(meaning, (0, 0, 0, 2)), highlight=False)
    else:
        for kind in KINDS:
            console.print(f"{kind}: {', '.join(file.names(kind)) or 'none'}", highlight=False)
    return ExitStatus.OK


def _settings(config: ConfigFile, name: str) -> list[dict[str, Any]]:
    """Return a row for each setting, in the order of COLUMNS."""
    job, rows = resolve(config, name), []
    shown: dict[dataclasses.Field, Any] = dict.fromkeys(dataclasses.fields(job.profile), job.profile)
    if config.has("distributed", name):
        strategy = job.strategy_config(total_steps=1_000_000)
        shown |= dict.fromkeys(dataclasses.fields(job.distribution), job.distribution)
        shown |= {field: strategy for field in dataclasses.fields(strategy) if field.name not in FROM_PROFILE}
    chosen = open_settings(job) if config.has("distributed", name) else ()
    for field, part in shown.items():
        value, origin = getattr(part, field.name), job.origin.get(field.name, "default")
        if field.name in chosen:
            value, origin = None, "chosen at the start"
        rows.append(dict(zip(COLUMNS, (field.name, value, origin, field.metadata["help"]), strict=True)))
    return rows
