"""Does more training ever make the model worse? Final WER on the bundled test set after 8, 16 and 32 epochs.

    python benchmarks/epochs.py [--quick] [--seeds 3] [--more N] [--out DIR]

Local ranks fine-tune with the settings of config.ini's [profile:demo]; those of the strategy are left at their
defaults. Run after run, since each takes the whole machine. What is done is kept in DIR, so an interrupted benchmark
goes on where it stopped; runs that failed are done again, and leave their folder in DIR.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import finetuned  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from whisper_tuner.config import ConfigFile  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-epochs"
RANKS, EPOCHS = (2, 4), (8, 16, 32)
QUICK_RANKS, QUICK_EPOCHS, QUICK_SEEDS = (2,), (1, 2), 2
ERRORS = 2.0  # standard errors by which a mean may exceed another and still count as noise
HEAD = ("ranks", "epochs", "WER of each seed", "mean", "s for each run", "above half the epochs by", "noise")


@dataclass(frozen=True, kw_only=True)
class Task:
    ranks: int
    epochs: int
    seed: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.epochs} epochs, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of a run that ended: WERs in per cent, None if it failed; seconds with start and both evaluations."""

    task: Task
    before: float | None
    wer: float | None
    seconds: float
    status: int
    commit: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A mean WER against that of half as many epochs; `noise` is what the difference may be."""

    ranks: int
    epochs: int
    difference: float
    noise: float

    @property
    def missed(self) -> bool:
        return not self.difference <= self.noise


def judge(results: Iterable[Result]) -> list[Verdict]:
    """Every (ranks, epochs) that has a half.

    Noise is ERRORS standard errors of the difference of two means over seeds. The standard deviation of one run is
    pooled over all runs of fewer epochs: a collapse of some seeds must not pass for noise.
    """
    wers: dict[tuple[int, int], list[float]] = {}
    for result in results:
        if result.wer is not None:
            wers.setdefault((result.task.ranks, result.task.epochs), []).append(result.wer)
    verdicts = []
    for (ranks, epochs), rates in sorted(wers.items()):
        if half := wers.get((ranks, epochs / 2)):
            deviation = pooled_deviation([each for (_, fewer), each in wers.items() if fewer < epochs])
            noise = ERRORS * deviation * math.sqrt(1 / len(rates) + 1 / len(half))
            difference = statistics.mean(rates) - statistics.mean(half)
            verdicts.append(Verdict(ranks=ranks, epochs=epochs, difference=difference, noise=noise))
    return verdicts


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Of values about the mean of their group; not a number where no group has two."""
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.mean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / freedom) if freedom else math.nan


class Bench:
    def __init__(self, ranks: Sequence[int], epochs: Sequence[int], seeds: int, out: Path):
        self.tasks = [
            Task(seed=seed, ranks=of_ranks, epochs=of_epochs)
            for seed, of_ranks, of_epochs in itertools.product(range(seeds), ranks, epochs)
        ]
        self.out = out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.kept = self.out / "done.jsonl"
        self.results = {result.task: result for result in read(self.kept) if result.task in set(self.tasks)}

    def left(self) -> list[Task]:
        return [task for task in self.tasks if task not in self.results or self.results[task].status]

    def run(self, most: int) -> None:
        """No more than so many runs."""
        for task in self.left()[:most]:
            result = train(task, self.out / f"{task.ranks}-ranks-{task.epochs}-epochs-seed-{task.seed}")
            self.results[task] = result
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            wer = f"WER {result.before} -> {result.wer}" if result.wer is not None else f"status {result.status}"
            done = sum(kept.status == 0 for kept in self.results.values())
            left = sum(task.epochs for task in self.left()) * self.epoch_s() / 60
            print(
                f"{task}: {wer}, {result.seconds:.0f} s; {done} of {len(self.tasks)}, {left:.0f} min left", flush=True
            )

    def epoch_s(self) -> float:
        return sum(r.seconds for r in self.results.values()) / sum(task.epochs for task in self.results)

    def report(self) -> list[str]:
        verdicts = {(verdict.ranks, verdict.epochs): verdict for verdict in judge(self.results.values())}
        rows = [self._row(*cell, verdicts.get(cell)) for cell in dict.fromkeys((t.ranks, t.epochs) for t in self.tasks)]
        misses = [f"{task}: the run failed, status {r.status}" for task, r in self.results.items() if r.status]
        misses += [
            f"{v.ranks} ranks: {v.epochs} epochs end {v.difference:.1f} above {v.epochs // 2}, and {v.noise:.1f} "
            "would be noise"
            for v in verdicts.values()
            if v.missed
        ]
        left = f" so far; runs left to do: {len(self.left())}" if self.left() else ""
        before = sorted({result.before for result in self.results.values() if result.before is not None})
        return [
            "WER on the bundled test set after fine-tuning with `[profile:demo]` on local ranks, the strategy's "
            f"settings left at their defaults; {', '.join(map(str, before))} untrained. The mean is not to be above "
            f"that of half as many epochs by more than noise: {ERRORS:g} standard errors of the difference of the "
            "means, with the standard deviation of a run pooled over all runs of fewer epochs.",
            "",
            *table(HEAD, rows),
            *(listed(misses) or ["", f"No misses{left}."]),
        ]

    def _row(self, ranks: int, epochs: int, verdict: Verdict | None) -> list:
        runs = [r for task, r in self.results.items() if (task.ranks, task.epochs) == (ranks, epochs)]
        rates = [run.wer for run in runs if run.wer is not None]
        mean = f"{statistics.mean(rates):.1f}" if rates else ""
        cells = [ranks, epochs, ", ".join(map(str, rates)), mean, ", ".join(f"{run.seconds:.0f}" for run in runs)]
        return cells + ([f"{verdict.difference:+.1f}", f"{verdict.noise:.1f}"] if verdict else ["", ""])


def read(path: Path) -> list[Result]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**record | {"task": Task(**record["task"])}) for record in map(json.loads, lines)]


def train(task: Task, folder: Path) -> Result:
    """`folder` is left where the run failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.ini").write_text(config(task), encoding="utf-8")
    commit, began = current_commit(), time.monotonic()
    print(f"{task}: {folder / 'console.txt'} says how far it is", flush=True)
    status = finetuned(folder, "epochs", task.ranks)
    seconds = round(time.monotonic() - began, 1)
    figures = next((json.loads(path.read_text()) for path in folder.glob("runs/*/wer.json")), None)
    status = status or int(figures is None)
    before, wer = (None, None) if status else (figures[when]["wer"] for when in ("before", "after"))
    if not status:
        shutil.rmtree(folder)
    return Result(task=task, before=before, wer=wer, seconds=seconds, status=status, commit=commit)


def config(task: Task) -> str:
    """config.ini's demo with absolute paths, and a [distributed:epochs] that leaves the strategy's settings alone."""
    found = ConfigFile(PROJECT / "config.ini")
    profile = found.profile("demo")
    values = {key: getattr(profile, key) for key in found.profile_values("demo").values}
    values |= {"epochs": task.epochs, "seed": task.seed}
    lines = ["[profile:demo]", *(f"{key} = {value}" for key, value in values.items())]
    return "\n".join([*lines, "[distributed:epochs]", "base_profile = demo", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, two at least")
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="2 ranks, 1 and 2 epochs; leaves RESULTS.md alone")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: from one run of each kind nobody can tell what is noise")
    if args.quick:
        bench = Bench(QUICK_RANKS, QUICK_EPOCHS, QUICK_SEEDS, args.out / "quick")
    else:
        bench = Bench(RANKS, EPOCHS, args.seeds, args.out)
    bench.run(len(bench.tasks) if args.more is None else args.more)
    lines = bench.report()
    print("\n".join(lines))
    if len(bench.results) == len(bench.tasks) and not args.quick:
        commits = [result.commit for result in bench.results.values()]
        write_section("epochs: WER after 8, 16 and 32 epochs", lines, commits)
    return int(any(result.status for result in bench.results.values()))


if __name__ == "__main__":
    sys.exit(main())
