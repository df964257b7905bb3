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
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import soundfile

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import start_finetune  # noqa: E402
from benchmarks.pooled_wer import difference, transcribed, wer  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from distributed.run_dir.figures import scan  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-single-machine"
LEARNING_RATES = {"full": 1e-4, "lora": 1e-3}
BATCH_SIZE = 8
FASTER, OF_MEMORY = 10.0, 0.5  # what is claimed of short clips: times the clips per second; part of the peak memory
WAYS = ("ours", "recipe")
RECIPE_STEPS = 12  # of a short turn; each is as long as the others
HEAD = (
    "method",
    "way",
    "clips/s of each turn",
    "audio s/s",
    "times as fast",
    "peak GB",
    "foreseen GB",
    "slowest step / median",
    "WER of each seed",
    "WER against the recipe",
)
SLOWEST, OFF_BY = 2.0, 0.15  # steps: how many times the median; memory: how far from what was foreseen
CONFIG = """
[profile:bench]
base_model = {model}
train = {data}/train.csv
validation =
test =
runs_dir = {out}
method = {method}
epochs = {epochs}
max_steps = {steps}
batch_size = {batch}
learning_rate = {lr}
seed = {seed}
"""


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


@dataclass(frozen=True, kw_only=True)
class Result:
    """seconds: of all steps. memory: bytes, the most that one process held; foreseen: that ours said before. slowest: a
    step's time over the median. clips: [errors, words] of each that was transcribed.
    """

    task: Task
    samples: int
    audio_s: float
    seconds: float
    memory: int
    foreseen: int
    slowest: float
    clips: list[list[int]]
    commit: str

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    @property
    def wer(self) -> float:
        return wer(self.clips)


class Peak:
    """The most that any one process of a tree holds while this is open, in bytes, looked at ten times a second."""

    def __init__(self, pid: int):
        self.bytes, self._root, self._over = 0, psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            try:
                tree = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in tree:
                try:
                    self.bytes = max(self.bytes, process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


def train(task: Task, model: Path, data: Path, folder: Path) -> tuple[Path, dict]:
    """The trained model, and the figures of Result. Raises RuntimeError, and leaves `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (folder / "console.txt").open("w+b") as console:
        process = start_ours(task, model, data, folder, console) if task.way == "ours" else None
        process = process or start_recipe(task, model, data, folder, console)
        with Peak(process.pid) as peak:
            status = process.wait()
        console.seek(0)
        said = console.read().decode()
    if status:
        raise RuntimeError(f"{task} failed with status {status}: {said[-2000:]}")
    if task.way == "recipe":
        told = json.loads(said.strip().splitlines()[-1])
        about = {"samples": told["clips"], "seconds": told["seconds"], "foreseen": 0, "slowest": told["slowest"]}
        return folder / "model", about | {"memory": peak.bytes}
    [run] = (path.parent for path in folder.glob("*/events.jsonl"))
    [attempt] = scan(run / "events.jsonl").attempts
    steps = [step["seconds"] for step in attempt.steps]
    [foreseen] = (event["needed"] for event in attempt.of_type("memory"))
    about = {"samples": sum(step["samples"] for step in attempt.steps), "seconds": attempt.seconds}
    about |= {"foreseen": foreseen, "slowest": max(steps) / statistics.median(steps)}
    return run / "final", about | {"memory": peak.bytes}


def start_ours(task: Task, model: Path, data: Path, folder: Path, console) -> subprocess.Popen:
    values = {"model": model, "data": data, "out": folder, "method": task.method, "epochs": task.epochs}
    values |= {"steps": task.max_steps, "batch": BATCH_SIZE, "lr": LEARNING_RATES[task.method], "seed": task.seed}
    (folder / "config.ini").write_text(CONFIG.format(**values), encoding="utf-8")
    return start_finetune(folder / "config.ini", "bench", 1, console)


def start_recipe(task: Task, model: Path, data: Path, folder: Path, console) -> subprocess.Popen:
    options = {"method": task.method, "epochs": task.epochs, "max-steps": task.max_steps or -1, "seed": task.seed}
    options |= {"batch-size": BATCH_SIZE, "learning-rate": LEARNING_RATES[task.method]}
    words = [f"--{name}={value}" for name, value in options.items()]
    script = str(PROJECT / "benchmarks" / "seq2seq_recipe.py")
    command = [sys.executable, script, str(model), str(data / "train.csv"), str(folder / "model"), *words]
    return subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.model, self.data = args.model.resolve(), args.data.resolve()
        self.out = (args.out / f"{self.model.name}-{self.data.name}{'-quick' if args.quick else ''}").resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        settings = {"epochs": args.epochs, "max_steps": 3 if args.quick else 0}
        self.methods, self.wanted, self.turns, self.seeds = args.methods.split(","), args.wanted, args.turns, args.seeds
        steps = {"ours": settings["max_steps"], "recipe": settings["max_steps"] or RECIPE_STEPS}
        short = [
            Task(method=method, seed=turn, way=way, epochs=1, max_steps=steps[way], short=True)
            for method in self.methods
            for turn in range(args.turns)
            for way in WAYS
        ]
        self.tasks = short + [
            Task(method=method, seed=seed, way=way, **settings)
            for method in self.methods
            for seed in range(args.seeds)
            for way in WAYS
        ]
        self.kept = self.out / "done.jsonl"
        lines = self.kept.read_text(encoding="utf-8").splitlines() if self.kept.exists() else []
        done = [Result(**record | {"task": Task(**record["task"])}) for record in map(json.loads, lines)]
        self.results = {result.task: result for result in done if result.task in set(self.tasks)}

    def run(self, most: int | None) -> None:
        for task in [task for task in self.tasks if task not in self.results][:most]:
            folder = self.out / f"{task.method}-{task.seed}-{task.way}{'-short' if task.short else ''}"
            print(f"{task}: {folder / 'console.txt'} says how far it is", flush=True)
            trained, figures = train(task, self.model, self.data, folder)
            base = self.model if task.method == "lora" else None
            few = 4 if task.max_steps else None
            clips = [] if task.short else transcribed(trained, base, self.data, folder, few)
            mean_s = statistics.mean(seconds_of(self.data))
            figures |= {"clips": clips, "audio_s": figures["samples"] * mean_s, "commit": current_commit()}
            self.results[task] = result = Result(task=task, **figures)
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            shutil.rmtree(folder)
            told = f"{result.rate:.2f} clips/s, {result.memory / 1e9:.1f} GB"
            told += "" if task.short else f", WER {result.wer:.1f}"
            print(f"{task}: {told}; {len(self.results)} of {len(self.tasks)}", flush=True)

    def _of(self, method: str, *, short: bool) -> list[list[Result]]:
        """By way, as many of one as of the other."""
        found = [
            sorted(
                (r for t, r in self.results.items() if (t.method, t.way, t.short) == (method, way, short)),
                key=lambda result: result.task.seed,
            )
            for way in WAYS
        ]
        return [runs[: min(map(len, found))] for runs in found]

    def report(self) -> list[str]:
        rows, misses = [], []
        for method in self.methods:
            (ours, recipe), turns = self._of(method, short=False), self._of(method, short=True)
            if not turns[0] or len(ours) < self.seeds:
                continue
            ratios = [a.rate / b.rate for a, b in zip(*turns, strict=True)]
            faster = statistics.median(ratios)
            heard = [[run.clips for run in runs] for runs in (ours, recipe)]
            worse, low, high = difference(*heard) if ours else (0.0, 0.0, 0.0)
            interval = f"{worse:+.1f} ({low:+.1f} to {high:+.1f})" if ours else ""
            times = f"{faster:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
            rows.append([method, "ours", *self._cells(ours, turns[0], times), interval])
            rows.append([method, "recipe", *self._cells(recipe, turns[1], ""), ""])
            runs = ours or turns[0]
            memory = [a.memory / b.memory for a, b in zip(ours, recipe, strict=True)]  # a turn is too short for a peak
            if faster < self.wanted:
                misses.append(f"{method}: {faster:.1f} times the clips per second, not {self.wanted:g}")
            if memory and statistics.median(memory) > OF_MEMORY:
                misses.append(f"{method}: {statistics.median(memory):.2f} of the peak memory, not {OF_MEMORY:g}")
            slowest = max(run.slowest for run in runs)
            off_by = max(abs(run.memory / run.foreseen - 1) for run in runs)
            if slowest > SLOWEST:
                misses.append(f"{method}: a step of ours took {slowest:.1f} times the median, not {SLOWEST:g}")
            if off_by > OFF_BY:
                misses.append(
                    f"{method}: our memory was {100 * off_by:.0f} % off what was foreseen, not {100 * OFF_BY:g}"
                )
            if low > 0:
                misses.append(f"{method}: a WER that is worse by {interval}")
        whole, seconds = self.tasks[-1], seconds_of(self.data)
        about = (
            f"{whole.epochs} epochs" if self.seeds else "no whole runs: memory, steps and what was foreseen of turns"
        )
        return [
            f"{self.model.name} on {self.data.name} (clips of {statistics.median(seconds):.1f} s in the median, "
            f"{statistics.mean(seconds):.1f} s on average), {about}, batches of {BATCH_SIZE}, learning "
            f"rates {LEARNING_RATES}. WER by plain transformers, padded, validation and test pooled. Clips a second "
            f"of {self.turns} turns; times as fast: the median of their ratios, the least and the most. Against the "
            "recipe: points of WER, with the interval of 95 % of a paired bootstrap over clips, all seeds together. "
            "Memory: the largest process.",
            "",
            *table(HEAD, rows),
            *(listed(misses) or ["", "No misses." if rows else "Nothing to compare yet."]),
        ]

    def _cells(self, whole: Sequence[Result], turns: Sequence[Result], faster: str) -> list[str]:
        rates, rest = ", ".join(f"{run.rate:.2f}" for run in turns), ", ".join(f"{run.wer:.1f}" for run in whole)
        runs = whole or turns
        audio = f"{statistics.median(run.audio_s / run.seconds for run in turns):.1f}"
        memory = [f"{statistics.median(getattr(run, of) for run in runs) / 1e9:.2f}" for of in ("memory", "foreseen")]
        memory[1] = memory[1] if runs[0].foreseen else ""
        return [rates, audio, faster, *memory, f"{max(run.slowest for run in runs):.1f}", rest]


def seconds_of(data: Path) -> list[float]:
    """Of each clip of train.csv."""
    rows = csv.DictReader((data / "train.csv").read_text(encoding="utf-8").splitlines())
    return [soundfile.info(data / row["audio_path"]).duration for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--methods", default="full,lora")
    parser.add_argument("--seeds", type=int, default=3, help="whole runs of each; 0: speed alone [3]")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--wanted", type=float, default=FASTER, metavar="TIMES", help="less is a miss [10]")
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="3 steps, one seed; leaves RESULTS.md alone")
    args = parser.parse_args()
    if args.quick:
        args.seeds = args.turns = 1
    bench = Bench(args)
    bench.run(args.more)
    lines = bench.report()
    print("\n".join(lines))
    if len(bench.results) == len(bench.tasks) and not args.quick:
        commits = [result.commit for result in bench.results.values()]
        write_section(f"single machine: {bench.model.name} on {bench.data.name}", lines, commits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
