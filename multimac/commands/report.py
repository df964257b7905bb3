"""`multimac report`: a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed.run_dir.find import find_run
from multimac.report.page import contents, write_report
from whisper_tuner.errors import ExitStatus
from whisper_tuner.paths import shown
from whisper_tuner.text import harmless


def report(folders: Sequence[Path], name: str, out: Path | None) -> ExitStatus:
    """Also of a run that goes on, or was interrupted. Raises TunerError."""
    path = write_report(contents(find_run(name, folders)), out)
    print(harmless(f"report: {shown(path.absolute())}"))
    return ExitStatus.OK
