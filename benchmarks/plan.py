"""Does `multimac plan` tell the truth? Predicted and measured time and speed-up, 1 to 4 lab hosts.

    sudo flock /tmp/lab.lock python benchmarks/plan.py [MODEL DATA --language fr] [--hosts 1,2,4] [--quick] [--more N]

MODEL is a folder in transformers layout, DATA one with train.csv, validation.csv and test.csv; without them the bundled
ones. In each case `plan` measures the hosts of a lab, and tells what it expects of the way that is then run twice by
`distributed-train` or `finetune`: once as told, and with another seed as the first run has corrected it. What this
project knows of files and runs is forgotten before. What is done is kept in DIR (`--out`), so an interrupted benchmark
goes on where it stopped. Figures are those of a machine that does nothing else. Needs Linux, root, and what `make test`
needs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from lab import Lab  # noqa: E402

from benchmarks.base import (  # noqa: E402
    BUNDLED_DATA,
    BUNDLED_MODEL,
    Done,
    names,
    parser_of,
    profile_of,
    publish,
    table,
)
from benchmarks.scaling import BUNDLED_SETTINGS, SETTINGS  # noqa: E402
from benchmarks.scaling_cases import BATCH, LINKS  # noqa: E402
from benchmarks.scaling_run import called, new_case, write_hosts  # noqa: E402
from distributed.plan.forecast import FACTS  # noqa: E402
from distributed.run_dir.summary import PARTS, read_run  # noqa: E402

QUICK_STEPS = 20
NEAR, NEAR_SPEED_UP = 0.15, 0.10  # of what was measured, that a prediction may be away from it
HEAD = (
    *("method", "hosts", "link", "predicted", "measured", "away", "start", "training", "evaluation"),
    *("once corrected", "measured", "away", "speed-up predicted", "measured"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """hosts: how many. cpu: cores of each. max_steps: 0 for whole epochs."""

    method: str
    hosts: int
    link: str
    cpu: float
    max_steps: int
    settings: str

    def __str__(self) -> str:
        return f"{self.method}/{self.hosts}x{self.cpu:g}/{self.link}"


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.model, self.data = args, args.model.resolve(), args.data.resolve()
        self.out = (args.out / f"{self.model.name}-{self.data.name}{'-quick' * args.quick}").resolve()
        self.done = Done(self.out)
        own = BUNDLED_SETTINGS if self.model == BUNDLED_MODEL else SETTINGS
        self.cases = [
            Case(
                method=method,
                hosts=hosts,
                link=link,
                cpu=args.cpu,
                max_steps=QUICK_STEPS if args.quick else 0,
                settings=json.dumps(own[method]),
            )
            for method in args.methods
            for hosts in args.hosts
            for link in (args.links if hosts > 1 else args.links[:1])
        ]

    def measure(self, case: Case) -> dict:
        FACTS.file.unlink(missing_ok=True)  # of hosts with the same addresses, and other links
        profile = profile_of(
            self.model,
            self.data,
            test=self.data / "test.csv",
            language=self.args.language,
            method=case.method,
            max_steps=case.max_steps,
            batch_size=BATCH,
            num_threads=1,
            device="cpu",
            **json.loads(case.settings),
        )
        folder = new_case(self.out, case, profile)
        shown = (self.model, self.data, self.out)
        with Lab(
            hosts=case.hosts, rate=case.link, cpus=case.cpu, shared_home=True, folder=self.out / "lab", shown=shown
        ) as lab:
            command = ["plan", "bench", "--again", "--json"]
            if case.hosts > 1:
                command += ["--hosts", str(write_hosts(lab, folder))]
            told = json.loads(called(lab, folder, command))["ways"]
            found = next(way for way in told if len(way["forecast"]["hosts"]) == case.hosts)
            typed = found["command"].split()[1:]
            runs = [self._run(lab, folder, [*typed, "--set", f"seed={seed}"]) for seed in (1, 2)]
        return {"told": f"{found['seconds']:.0f} s predicted", "way": found, "runs": runs}

    def _run(self, lab: Lab, folder: Path, typed: Sequence[str]) -> dict:
        """Return what the parts of a run were expected to take, and took."""
        called(lab, folder, typed)
        [path] = folder.glob("runs/*")
        run = read_run(path)
        shutil.move(path, folder / f"run-{len([*folder.glob('run-*')])}")
        return {"expected": run.expected, "took": run.took}

    def report(self) -> list[str]:
        found = self.done.found(self.cases)
        alone = {case.method: sum(result["runs"][0]["took"]) for case, result in found if case.hosts == 1}
        rows, misses = [], []
        for case, result in found:
            cells: list[str] = []
            for number, run in enumerate(result["runs"]):
                predicted, took = sum(run["expected"]), sum(run["took"])
                away = predicted / took - 1
                cells += [f"{predicted:.0f} s", f"{took:.0f} s", f"{away:+.0%}"]
                misses += [f"{case}: predicted {away:+.0%}"] * (not number and abs(away) > NEAR)
                if not number:
                    parts = zip(PARTS, run["expected"], run["took"], strict=True)
                    cells += [f"{expected:.0f} of {seconds:.0f}" for _, expected, seconds in parts]
            if case.hosts > 1 and case.method in alone:
                times, really = result["way"]["speed_up"], alone[case.method] / sum(result["runs"][0]["took"])
                cells += [f"{times:.2f}", f"{really:.2f}"]
                misses += [f"{case}: speed-up {times:.2f}, not {really:.2f}"] * (
                    abs(times / really - 1) > NEAR_SPEED_UP
                )
            rows.append([case.method, case.hosts, case.link, *cells, *[""] * (len(HEAD) - 3 - len(cells))])
        return [
            f"{self.model.name} on {self.data.name}, hosts of {self.args.cpu:g} cores and one thread, batches of "
            f"{BATCH} clips of all hosts together. Seconds from the command to the report; of parts predicted and "
            "measured. "
            "Once corrected: the second run, as the first has corrected the prediction.",
            "",
            *table(HEAD, rows),
            *self.done.listed(self.cases, misses),
        ]


def main() -> int:
    parser = parser_of(__doc__, "plan", f"{QUICK_STEPS} steps, full fine-tuning, 1 and 2 hosts, 100 Mbit/s")
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED_DATA)
    parser.add_argument("--language", default="")
    parser.add_argument("--methods", type=names, default=["lora", "full"], metavar="NAMES")
    parser.add_argument("--hosts", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--links", type=names, default=[*LINKS], metavar="RATES")
    parser.add_argument("--cpu", type=float, default=0.5, help="cores of each host [0.5]")
    args = parser.parse_args()
    if args.quick:
        args.methods, args.hosts, args.links = ["full"], [1, 2], ["100mbit"]
    bench = Bench(args)
    bench.done.run(bench.cases, bench.measure, args.more)
    write = not (args.quick or bench.done.left(bench.cases))
    publish(
        f"plan: {bench.model.name} on {bench.data.name}", bench.report(), bench.done.commits(bench.cases), write=write
    )
    return int(bool(bench.done.failed))


if __name__ == "__main__":
    sys.exit(main())
