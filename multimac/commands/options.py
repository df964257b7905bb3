"""What the heads of commands are made of: the mark `@command`, and the options that several of them have.

A head goes from `@command` to the end of the docstring. It may use what is here, `typer` and `ExitStatus`. It is first
read without the imports of its file: see `cli_typer.collect`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Argument, Option

Function = TypeVar("Function", bound=Callable)

# readable=False: a file that may not be read is told of by those who read it, with a remedy, not by the parser.
Config = Annotated[Path, Option("--config", help="Configuration file.", readable=False)]
HostsFile = Annotated[Path, Option("--hosts", help="Hosts file.", readable=False)]
RunsDir = Annotated[Path | None, Option("--runs-dir", help="Folder of the runs. [default: as config.ini says]")]
Run = Annotated[str, Argument(help="A run's id or the beginning of one, its folder, or `last`.")]
Resume = Annotated[
    str,
    Option("--resume", metavar="RUN", help="Resume a run that was stopped or broke off, on the machines it ran on."),
]
Language = Annotated[str, Option(help="Language of the speech, for multilingual models.")]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A setting for this run, as in config.ini; several times."),
]
Watching = Annotated[bool, Option("--watch", help="Open the run's live page in the browser.")]
Detach = Annotated[bool, Option("--detach", help="Return once the run has begun: see `runs attach`.")]
MODEL = "A run's id, the beginning of one, its folder, or `last`; a model's folder; or a hub id."
CONFIG, HOSTS = Path("config.ini"), Path("distributed_hosts.json")


def command(words: str) -> Callable[[Function], Function]:
    """Mark a function as the command `multimac WORDS`, such as "runs show"; `cli_typer.collect` finds the mark."""
    return lambda function: function
