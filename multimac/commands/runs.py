"""`multimac runs list | show | compare`. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

from typer import Argument, Option

from distributed.run_dir.find import find_run, run_dirs, speed_ups
from distributed.run_dir.summary import BROKEN, FAILED, INTERRUPTED, RECOVERED, RunSummary, read_run
from multimac.view import run_tables
from multimac.view.models import folders_of
from multimac.view.terminal import Console, fitting
from whisper_tuner.errors import ConfigError, ExitStatus

from .options import CONFIG, Config, Run, RunsDir, command

NEWEST = 20
SHOWN_PROBLEMS = 10


@command("runs list")
def runs_list(
    everything: Annotated[bool, Option("--all", help="All runs, not only the newest 20.")] = False,
    as_json: Annotated[bool, Option("--json", help="As JSON, with all figures.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """List runs, newest first: state, hosts, WER before and after, training time, speed-up.

    Speed-up is the run's clips per second divided by those of the fastest finished run on one host alone, in the same
    folder, with the same model, method, batch size, precision and training clips. Empty if there is no such run.
    """
    console, folders = Console(), folders_of(config, runs_dir)
    found = run_dirs(folders)
    runs = [read_run(path) for path in (found if everything else found[:NEWEST])]
    rows = list(zip(runs, speed_ups(runs), strict=True))
    if as_json:
        print(json.dumps([to_json(*row) for row in rows], indent=2))
        return ExitStatus.OK
    if not rows:
        where = ", ".join(str(folder.absolute()) for folder in folders)
        console.print(f"no run in {where}", soft_wrap=True)
        console.print("Runs are kept where `runs_dir` says, usually in the folder where training was started.")
        return ExitStatus.OK
    console.print(fitting(console, run_tables.list_table(rows, console.width)))
    for run in runs:
        if run.state == BROKEN:
            console.print(f"{run.id}: {run.message}", style="red", soft_wrap=True)
        elif run.left_out:
            console.print(f"{run.id}: {run.left_out}", style="yellow", soft_wrap=True)
    if len(found) > len(runs):
        console.print(f"{len(found) - len(runs)} older ones: --all")
    return ExitStatus.OK


@command("runs show")
def runs_show(
    run: Run = "last",
    as_json: Annotated[bool, Option("--json", help="As JSON, with curves and settings.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Show a run: figures, hosts, problems, curves of loss and learning rate, and what to do next."""
    found = read_run(find_run(run, folders_of(config, runs_dir)))
    [speed_up] = speed_ups([found])
    if as_json:
        print(json.dumps(to_json(found, speed_up, whole=True), indent=2))
    else:
        _show(Console(), found, speed_up)
    return ExitStatus.OK


def _show(console: Console, run: RunSummary, speed_up: float | None) -> None:
    console.print(run.id, style="bold", soft_wrap=True)
    console.print(run_tables.facts_table(run, speed_up))
    if any(host.steps for host in run.per_host):
        console.print()
        console.print(fitting(console, run_tables.host_table(run)))
    problems = [*([run.left_out] if run.left_out else []), *run.problems]
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"and {len(problems) - SHOWN_PROBLEMS} more, in {run.path / 'events.jsonl'}"]
    _print_block(console, problems)
    if run.state in (FAILED, BROKEN, INTERRUPTED, RECOVERED):
        _print_block(console, run.message.splitlines(), style="red" if run.state in (FAILED, BROKEN) else "")
    _print_block(console, run_tables.curve_lines(run, console.width - 1))
    commands = [f"  {command}" for command in run_tables.next_commands(run)]
    _print_block(console, ["next:", *commands] if commands else [])


def _print_block(console: Console, lines: Sequence[str], *, style: str = "") -> None:
    if lines:
        console.print()
    for line in lines:
        console.print(line, style=style, soft_wrap=True)


@command("runs compare")
def runs_compare(
    runs: Annotated[list[str], Argument(help="Two or more runs.")],
    as_json: Annotated[bool, Option("--json", help="As JSON, with curves and settings.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Put runs side by side: figures, settings that differ, losses."""
    console, folders = Console(), folders_of(config, runs_dir)
    found = [read_run(path) for path in dict.fromkeys(find_run(name, folders) for name in runs)]
    if len(found) < 2:
        raise ConfigError("a comparison needs two runs", remedy="Name two or more: multimac runs compare RUN RUN")
    faster = speed_ups(found)
    if as_json:
        whole = [to_json(*pair, whole=True) for pair in zip(found, faster, strict=True)]
        print(json.dumps({"runs": whole, "settings that differ": run_tables.differing(found)}, indent=2, default=str))
        return ExitStatus.OK
    for number, run in enumerate(found):
        console.print(f"{run_tables.mark(number)} {run.id}", style="bold", soft_wrap=True)
    console.print()
    console.print(fitting(console, run_tables.comparison(found, faster), folds=True))
    _print_block(console, run_tables.compared_losses(found, console.width - 1))
    return ExitStatus.OK


def to_json(run: RunSummary, speed_up: float | None, *, whole: bool = False) -> dict:
    """Return all that is known of a run; without curves and settings, unless `whole`."""
    values = dataclasses.asdict(run) | {"speed_up": speed_up}
    if not whole:
        del values["curves"], values["settings"]
    return json.loads(json.dumps(values, default=str))
