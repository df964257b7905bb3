"""Removes what the self-test's run has left on a host."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

RUN = re.compile(r"\d{8}-\d{6}-selftest(-\d+)?")


def forget(request: dict) -> dict:
    """The folder of a run of the self-test below runs/, and no other one."""
    if not RUN.fullmatch(request["run"]):
        raise ValueError(f"{request['run']!r} is no run of the self-test")
    folder = Path("runs") / request["run"]
    shutil.rmtree(folder, ignore_errors=True)
    return {"left": folder.exists()}
