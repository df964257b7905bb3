"""One machine: our training against transformers' Seq2SeqTrainer, with the same model, clips, epochs and batches.

    python benchmarks/single_machine.py MODEL DATA [--quick] [--methods full] [--seeds 3] [--epochs 3] [--turns 5]

MODEL is a Whisper checkpoint in transformers layout; DATA a folder with train.csv, validation.csv and test.csv. Ours
runs at its defaults, the other as the usual recipe does (seq2seq_recipe.py). Each takes the whole machine, so they take
turns. A machine is not equally fast for an hour, so speeds are those of short turns: an epoch of ours, and some steps
of the other, whose steps are all alike. Memory and WER are those of whole runs. Both models are transcribed by plain
transformers, padded to 30 s (plain_wer.py), on validation and test pooled: nothing was chosen by either. What is done
is kept in DIR (`--out`), so an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tests")]

from benchmarks.base import (  # noqa: E402
    Done,
    Peak,
    RunFailed,
    ended,
    names,
    parser_of,
    profile_of,
    publish,
    start_finetune,
    table,
    watching,
)
from benchmarks.plain_wer import against, transcribed, unseen, wer  # noqa: E402
from distributed.run_dir.log import scan  # noqa: E402

LEARNING_RATES = {"full": 1e-4, "lora": 1e-3}
BATCH_SIZE = 8
FASTER, OF_MEMORY = 10.0, 0.5  # what is claimed of short clips: times the clips per second; part of the peak memory
WAYS = ("ours", "recipe")
RECIPE_STEPS = 12  # of a short turn; each is as long as the others
QUICK_STEPS, QUICK_CLIPS = 3, 4
HEAD = (
    *("method", "way", "clips/s of each turn", "audio s/s", "times as fast", "peak GB", "foreseen GB"),
    *("slowest step / median", "WER of each seed", "WER against the recipe"),
)
SLOWEST, OFF_BY = 2.0, 0.15  # steps: how many times the median; memory: how far from what was foreseen


@dataclass(frozen=True, kw_only=True)
class Task:
    """way: ours, or recipe. max_steps: 0 for all. short: for its speed alone."""

    method: str
    seed: int
    way: str
    epochs: int
    max_steps: int
    short: bool = False

    def __str__(self) -> str:
        return f"{self.way}, {self.method}, {'turn' if self.short else 'seed'} {self.seed}"


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.model, self.data, self.args = args.model.resolve(), args.data.resolve(), args
        self.seconds = clip_seconds(self.data)
        self.methods, self.turns, self.seeds = args.methods, args.turns, args.seeds
        most = QUICK_STEPS if args.quick else 0
        steps = {"ours": most, "recipe": most or RECIPE_STEPS}
        self.tasks = [
            Task(method=method, seed=turn, way=way, epochs=1, max_steps=steps[way], short=True)
            for method in self.methods
            for turn in range(self.turns)
            for way in WAYS
        ] + [
            Task(method=method, seed=seed, way=way, epochs=args.epochs, max_steps=most)
            for method in self.methods
            for seed in range(self.seeds)
            for way in WAYS
        ]
        self.out = (args.out / f"{self.model.name}-{self.data.name}{'-quick' if args.quick else ''}").resolve()
        self.done = Done(self.out)

    def work(self, task: Task) -> dict:
        """Return what a run came to. samples, seconds: of all steps. memory: bytes, the most that one process held;
        foreseen: what ours said before. slowest: a step's time over the median. clips: those that were transcribed.
        """
        folder = self.out / f"{task.method}-{task.seed}-{task.way}{'-short' if task.short else ''}"
        trained, result = (self.train if task.way == "ours" else self.train_recipe)(task, folder)
        base = self.model if task.method == "lora" else None
        few = QUICK_CLIPS if task.max_steps else None
        clips = [] if task.short else transcribed(trained, unseen(self.data), base=base, most=few)
        shutil.rmtree(folder)
        rate = result["samples"] / result["seconds"]
        told = f"{rate:.2f} clips/s, {result['memory'] / 1e9:.1f} GB{f', WER {wer(clips):.1f}' if clips else ''}"
        return {**result, "rate": rate, "clips": clips, "told": told}

    def train(self, task: Task, folder: Path) -> tuple[Path, dict]:
        """Return the model that ours has trained, and its figures. Raises RunFailed, and leaves `folder`."""
        profile = profile_of(
            self.model,
            self.data,
            validation="",
            method=task.method,
            epochs=task.epochs,
            max_steps=task.max_steps,
            batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATES[task.method],
            seed=task.seed,
        )
        process = start_finetune(folder, {"profile:bench": profile}, "bench")
        peak = Peak(process.pid)
        with watching(peak.look, 0.1):
            run = ended(folder, process.wait())
        [attempt] = scan(run / "events.jsonl").attempts
        taken = [step.seconds for step in attempt.steps]
        [foreseen] = (event.written["needed"] for event in attempt.of_type("memory"))
        return run / "final", {
            "samples": sum(step.samples for step in attempt.steps),
            "seconds": attempt.seconds,
            "memory": peak.bytes,
            "foreseen": foreseen,
            "slowest": max(taken) / statistics.median(taken),
        }

    def train_recipe(self, task: Task, folder: Path) -> tuple[Path, dict]:
        """Do the same by the usual recipe, which foresees nothing."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        script = str(PROJECT / "benchmarks" / "seq2seq_recipe.py")
        command = [sys.executable, script, str(self.model), str(self.data / "train.csv"), str(folder / "model")]
        command += [f"--method={task.method}", f"--epochs={task.epochs}", f"--max-steps={task.max_steps or -1}"]
        command += [f"--seed={task.seed}", f"--batch-size={BATCH_SIZE}"]
        command += [f"--learning-rate={LEARNING_RATES[task.method]}"]
        with (folder / "console.txt").open("w") as console:
            process = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
        peak = Peak(process.pid)
        with watching(peak.look, 0.1):
            status = process.wait()
        said = (folder / "console.txt").read_text()
        if status:
            raise RunFailed(f"{said[-2000:]}\nstatus {status}")
        told = json.loads(said.strip().splitlines()[-1])
        return folder / "model", {**told, "memory": peak.bytes, "foreseen": 0}

    def _of(self, method: str, way: str, *, short: bool) -> list[dict]:
        about = (method, way, short)
        return [r for task, r in self.done.found(self.tasks) if (task.method, task.way, task.short) == about]

    def report(self) -> list[str]:
        rows, misses = [], []
        for method in self.methods:
            ours, recipe = (self._of(method, way, short=False) for way in WAYS)
            turns = [self._of(method, way, short=True) for way in WAYS]
            if not all(turns) or min(len(ours), len(recipe)) < self.seeds:
                continue
            ratios = [a["rate"] / b["rate"] for a, b in zip(*turns, strict=False)]
            faster = statistics.median(ratios)
            worse, is_worse = "", False
            if ours:
                worse, is_worse = against([run["clips"] for run in ours], [run["clips"] for run in recipe])
            times = f"{faster:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
            rows.append([method, "ours", *self._cells(ours, turns[0], times), worse])
            rows.append([method, "recipe", *self._cells(recipe, turns[1], ""), ""])
            memory = [a["memory"] / b["memory"] for a, b in zip(ours, recipe, strict=True)]  # a turn is too short
            slowest = max(run["slowest"] for run in ours or turns[0])
            off_by = max(abs(run["memory"] / run["foreseen"] - 1) for run in ours or turns[0])
            if faster < self.args.wanted:
                misses.append(f"{method}: {faster:.1f} times the clips per second, not {self.args.wanted:g}")
            if memory and statistics.median(memory) > OF_MEMORY:
                misses.append(f"{method}: {statistics.median(memory):.2f} of the peak memory, not {OF_MEMORY:g}")
            if slowest > SLOWEST:
                misses.append(f"{method}: a step of ours took {slowest:.1f} times the median, not {SLOWEST:g}")
            if off_by > OFF_BY:
                misses.append(f"{method}: our memory was {off_by:.0%} off what was foreseen, not {OFF_BY:.0%}")
            if is_worse:
                misses.append(f"{method}: a WER that is worse by {worse}")
        epochs = f"{self.args.epochs} epochs"
        whole = epochs if self.seeds else "no whole runs: memory, steps and what was foreseen of turns"
        return [
            f"{self.model.name} on {self.data.name} (clips of {statistics.median(self.seconds):.1f} s in the median, "
            f"{statistics.mean(self.seconds):.1f} s on average), {whole}, batches of {BATCH_SIZE}, learning "
            f"rates {LEARNING_RATES}. WER by plain transformers, padded, validation and test pooled. Clips a second "
            f"of {self.turns} turns; times as fast: the median of their ratios, the least and the most. Against the "
            "recipe: points of WER, with the interval of 95 % of a paired bootstrap over clips, all seeds together. "
            "Memory: the largest process.",
            "",
            *table(HEAD, rows),
            *self.done.listed(self.tasks, misses),
        ]

    def _cells(self, whole: Sequence[dict], turns: Sequence[dict], faster: str) -> list[str]:
        runs, rate = whole or turns, statistics.median(run["rate"] for run in turns)
        foreseen = statistics.median(run["foreseen"] for run in runs) / 1e9
        return [
            ", ".join(f"{run['rate']:.2f}" for run in turns),
            f"{rate * statistics.mean(self.seconds):.1f}",
            faster,
            f"{statistics.median(run['memory'] for run in runs) / 1e9:.2f}",
            f"{foreseen:.2f}" if foreseen else "",
            f"{max(run['slowest'] for run in runs):.1f}",
            ", ".join(f"{wer(run['clips']):.1f}" for run in whole),
        ]


def clip_seconds(data: Path) -> list[float]:
    """Return the seconds of each clip of train.csv."""
    rows = csv.DictReader((data / "train.csv").read_text(encoding="utf-8").splitlines())
    return [soundfile.info(data / row["audio_path"]).duration for row in rows]


def main() -> int:
    parser = parser_of(__doc__, "single-machine", f"{QUICK_STEPS} steps, one seed")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--methods", default=["full", "lora"], type=names)
    parser.add_argument("--seeds", type=int, default=3, help="whole runs of each; 0: speed alone [3]")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--wanted", type=float, default=FASTER, metavar="TIMES", help="less is a miss [10]")
    args = parser.parse_args()
    if args.quick:
        args.seeds = args.turns = 1
    bench = Bench(args)
    bench.done.run(bench.tasks, bench.work, args.more)
    name = f"single machine: {bench.model.name} on {bench.data.name}"
    write = not (args.quick or bench.done.left(bench.tasks))
    publish(name, bench.report(), bench.done.commits(bench.tasks), write=write)
    return int(bool(bench.done.failed))


if __name__ == "__main__":
    sys.exit(main())
