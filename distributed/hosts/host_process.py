"""A module of this project that runs on a machine, here or over SSH: started with a request, heard event by event."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from distributed.control.messages import split_line
from distributed.ssh.machine import Machine


def environment(project: str | Path) -> dict[str, str]:
    """Return the variables of each process of a run, whose code is in the folder `project`."""
    return {
        "PYTHONPATH": f"{project}/gym:{project}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of every address without a name
        # Linux alone: tensors of 2 MB and more in large pages, which take a fourth of the time to get.
        "THP_MEM_ALLOC_ENABLE": "1",
        # Of what Metal recommends, about 70 % of a Mac's memory. Past the high one torch raises an error; its own, 1.7,
        # is more than the Mac has, and it swaps instead. Past the low one it gives back what it only caches; torch
        # refuses one above the high one ("invalid low watermark ratio"), as its own would be: 1.4 (MPSAllocator.mm).
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.0",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.9",
        # Macs alone: the GPU's driver waits longer for a command. Some Macs restart under a long load (mlx 3267).
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


class HostProcess:
    """`python -m module` in a machine's project folder. The first line that is written to it is its request.

    Events are lines after a mark, see control/messages.py; `last_words` is the last other line that it printed.
    Starting it and writing to it raise HostError. Any thread may write; one thread hears.
    """

    def __init__(self, machine: Machine, module: str, *arguments: str):
        self.last_words = ""
        command = [machine.python, "-m", module, *arguments]
        self.process = machine.start(command, env=environment(machine.project), cwd=machine.project)
        self._writing, self._events = threading.Lock(), self._listen()

    def write(self, line: str) -> None:
        """Send one more line."""
        with self._writing:
            self.process.write(line.encode() + b"\n")

    def events(self) -> Iterator[dict]:
        """Yield what it tells, from where this was left the last time, until it has ended."""
        return self._events

    def _listen(self) -> Iterator[dict]:
        for line in self.process.lines():
            text, event = split_line(line)
            self.last_words = text.strip() or self.last_words
            if event:
                yield event
