"""A run on local ranks, in a process of its own, and what the profiles of several benchmarks have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

PROJECT = Path(__file__).resolve().parent.parent
BUNDLED = f"""
base_model = {PROJECT}/bundled/model
train = {PROJECT}/bundled/data/train.csv
validation = {PROJECT}/bundled/data/validation.csv
num_threads = 1
device = cpu
"""
START = """
import sys
from pathlib import Path
sys.path[:0] = [".", "gym"]
from distributed.hosts.keep_awake import awake
from multimac.commands.train import train_here
with awake():
    sys.exit(train_here(Path(sys.argv[1]), sys.argv[2], ranks=int(sys.argv[3])))
"""


def finetuned(folder: Path, name: str, ranks: int = 1) -> int:
    """The exit status of a run by the config.ini in `folder`, where console.txt says what it printed."""
    with (folder / "console.txt").open("wb") as console:
        process = start_finetune(folder / "config.ini", name, ranks, console)
        try:
            return process.wait()
        except KeyboardInterrupt:  # it has come to the run as well, which stops at the end of a step
            process.wait()
            raise


def start_finetune(config: Path, name: str, ranks: int, output: IO[bytes]) -> subprocess.Popen:
    command = [sys.executable, "-c", START, str(config), name, str(ranks)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=output, stderr=subprocess.STDOUT)
