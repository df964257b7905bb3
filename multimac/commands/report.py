"""`multimac report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from distributed.run_dir.find import find_run
from multimac.report.page import contents, write_report
from multimac.view.models import folders_of
from whisper_tuner.errors import ExitStatus
from whisper_tuner.files import shown

from .options import CONFIG, Config, Run, RunsDir, command


@command("report")
def report(
    run: Run = "last",
    out: Annotated[Path | None, Option("--out", help="Where to write it. [default: RUN/report.html]")] = None,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Write a run as one HTML file: curves, WER, the worst clips to listen to, hosts and faults."""
    path = write_report(contents(find_run(run, folders_of(config, runs_dir))), out)
    print(f"report: {shown(path.absolute())}")
    return ExitStatus.OK
