"""From the command to the first step on warm lab hosts: the time of each part.

    sudo flock /tmp/lab.lock python benchmarks/start_up.py [MODEL DATA --language fr] [--hosts 2] [--runs 3] [--quick]

MODEL is a folder in transformers layout, DATA one with train.csv and validation.csv; without them the bundled ones.
A first run, which is not counted, leaves on the hosts what the next ones find there. Importing torch and what a worker
needs besides, and loading the model, is measured on all hosts at the same time, in a process that does nothing else:
what a start takes beside that is ours. Figures are those of a machine that does nothing else. Needs Linux, root, and
what `make test` needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from lab import Lab  # noqa: E402

from benchmarks.base import (  # noqa: E402
    BUNDLED_DATA,
    BUNDLED_MODEL,
    PROJECT,
    Done,
    names,
    parser_of,
    profile_of,
    publish,
    table,
)
from benchmarks.scaling_cases import BATCH  # noqa: E402
from benchmarks.scaling_run import ENV, called, new_case, write_hosts  # noqa: E402
from distributed.run_dir.log import read_events  # noqa: E402

STEPS = 2
MOST_S, MOST_BESIDE_S = 15.0, 5.0
LOADING = """
import sys

import distributed.worker.train
from transformers import WhisperForConditionalGeneration

WhisperForConditionalGeneration.from_pretrained(sys.argv[1])
"""
HEAD = ("hosts", "method", "until the hosts are checked", "Python and torch", "model and data", "first step", "whole")


@dataclass(frozen=True, kw_only=True)
class Case:
    """hosts: how many. cpu: cores of each. runs: that are counted."""

    hosts: int
    method: str
    cpu: float
    runs: int

    def __str__(self) -> str:
        return f"{self.method}/{self.hosts}x{self.cpu:g}"


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.model, self.data = args, args.model.resolve(), args.data.resolve()
        self.out = (args.out / f"{self.model.name}-{self.data.name}{'-quick' * args.quick}").resolve()
        self.done = Done(self.out)
        runs = 1 if args.quick else args.runs
        self.cases = [
            Case(hosts=hosts, method=method, cpu=args.cpu, runs=runs) for hosts in args.hosts for method in args.methods
        ]

    def measure(self, case: Case) -> dict:
        profile = profile_of(
            self.model,
            self.data,
            language=self.args.language,
            method=case.method,
            max_steps=STEPS,
            batch_size=BATCH,
            num_threads=1,
            device="cpu",
        )
        folder = new_case(self.out, case, profile)
        shown = (self.model, self.data, self.out)
        with Lab(hosts=case.hosts, cpus=case.cpu, shared_home=True, folder=self.out / "lab", shown=shown) as lab:
            command = ["distributed-train", "bench", "--hosts", str(write_hosts(lab, folder))]
            parts, loading = [], []
            for number in range(case.runs + 1):
                entered = time.time()
                called(lab, folder, command)
                [path] = folder.glob("runs/*")
                if number:
                    parts.append(parts_of(path, entered))
                    loading.append(self._loading(lab))
                shutil.move(path, folder / f"run-{number}")
        whole = statistics.median(map(sum, parts))
        beside = whole - statistics.median(loading)
        return {"parts": parts, "loading": loading, "told": f"{whole:.1f} s, {beside:.1f} s of it beside loading"}

    def _loading(self, lab: Lab) -> float:
        """Return the seconds for which all hosts import and load at the same time."""
        command = [sys.executable, "-c", LOADING, str(self.model)]
        began = time.monotonic()
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes = [lab.popen(name, command, cwd=str(PROJECT), env=ENV, **quiet) for name in lab.hosts]
        if any(process.wait() for process in processes):
            raise RuntimeError(f"a host cannot load {self.model}")
        return time.monotonic() - began

    def report(self) -> list[str]:
        rows, misses = [], []
        for case, result in self.done.found(self.cases):
            parts = [statistics.median(each) for each in zip(*result["parts"], strict=True)]
            whole, loading = statistics.median(map(sum, result["parts"])), statistics.median(result["loading"])
            cells = [f"{seconds:.1f}" for seconds in (*parts, whole, loading, whole - loading)]
            rows.append([case.hosts, case.method, *cells])
            misses += [f"{case}: {whole:.1f} s to the first step"] * (whole > MOST_S)
            misses += [f"{case}: {whole - loading:.1f} s beside loading"] * (whole - loading > MOST_BESIDE_S)
        return [
            f"{self.model.name}, hosts of {self.args.cpu:g} cores and one thread, warm; seconds, medians of "
            f"{self.args.runs} runs. Loading alone: a process that imports the same and loads the model.",
            "",
            *table((*HEAD, "loading alone", "beside loading"), rows),
            *self.done.listed(self.cases, misses),
        ]


def parts_of(run: Path, entered: float) -> list[float]:
    """Return the seconds until hosts are checked, until all workers run, until they have what they train, and until all
    have made a step.
    """
    events, _ = read_events(run / "events.jsonl")
    created = json.loads((run / "run.json").read_text(encoding="utf-8"))["created"]
    hello, start, step = (
        max(event["time"] for event in events if event["type"] == kind and event.get("step", 1) == 1)
        for kind in ("hello", "start", "step")
    )
    times = [entered, created, hello, start, step]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> int:
    parser = parser_of(__doc__, "start-up", "one run", more=False)
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED_DATA)
    parser.add_argument("--language", default="")
    parser.add_argument("--methods", type=names, default=["lora"], metavar="NAMES")
    parser.add_argument("--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[2])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cpu", type=float, default=0.5, help="cores of each host [0.5]")
    args = parser.parse_args()
    bench = Bench(args)
    bench.done.run(bench.cases, bench.measure)
    name = f"start-up: {bench.model.name}"
    publish(name, bench.report(), bench.done.commits(bench.cases), write=not (args.quick or bench.done.failed))
    return int(bool(bench.done.failed))


if __name__ == "__main__":
    sys.exit(main())
