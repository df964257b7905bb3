"""Starts a launcher that outlives the command which started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distributed.hosts.paths import PROJECT
from distributed.plan.launch import environment


def start_launcher(run_dir: Path, *, resume: bool = False) -> subprocess.Popen:
    """In a session of its own, so that neither Ctrl-C nor a closed terminal reaches it directly."""
    with (run_dir / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.launcher.main", str(run_dir), *(["--resume"] if resume else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=PROJECT,
            env={**os.environ, **environment(PROJECT)},
            start_new_session=True,
        )
