"""What does each option against overfitting bring? WER of a model fine-tuned with one of them at a time, and with none.

    python benchmarks/regularisation.py MODEL DATA [--quick] [--seeds 2] [--only smoothing,speed] [--more N] [--out DIR]

MODEL is a folder in transformers layout, DATA one with train.csv, validation.csv and test.csv; this machine fine-tunes
alone. WER is that of plain transformers (plain_wer.py) on validation and test clips together: the validation loss
chooses nothing here. Run after run, since each takes the whole machine. What is done is kept in DIR, so an interrupted
benchmark goes on where it stopped; runs that failed are done again, and leave their folder in DIR.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import finetuned  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from whisper_tuner.data.dataset import load_manifest, write_manifest  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-regularisation"
SETTINGS = {"epochs": 5, "batch_size": 8, "learning_rate": 1e-4}  # those of lab_finetune.py's full fine-tuning
QUICK = {"max_steps": 4}
QUICK_CLIPS = 8
NONE = "none"
OPTIONS: dict[str, dict[str, float]] = {
    NONE: {},
    "masks": {"mask_time_prob": 0.05, "mask_feature_prob": 0.05},
    "smoothing": {"label_smoothing": 0.1},
    "dropout": {"dropout": 0.1},
    "speed": {"speed_perturbation": 0.1},
    "timestamps": {"timestamps_share": 0.5},
    "previous": {"previous_text_share": 0.5},
}
OPTIONS["all"] = {key: value for settings in OPTIONS.values() for key, value in settings.items()}
HEAD = ("option", "settings", "WER of each seed", "mean", "against none", "loss, training and validation")


@dataclass(frozen=True, kw_only=True)
class Task:
    """settings: those of its option, as text, so that other ones are another task."""

    option: str
    settings: str
    seed: int

    def __str__(self) -> str:
        return f"{self.option}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of a run that ended: WER in per cent, losses at its end; None if it failed."""

    task: Task
    wer: float | None
    train_loss: float | None
    validation_loss: float | None
    seconds: float
    status: int
    commit: str


class Bench:
    def __init__(self, model: Path, data: Path, options: Sequence[str], seeds: int, out: Path, *, quick: bool):
        self.model, self.quick = model.resolve(), quick
        self.tasks = [
            Task(option=option, settings=json.dumps(OPTIONS[option]), seed=seed)
            for seed, option in itertools.product(range(seeds), options)
        ]
        self.out = out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.data = write_lists(data.resolve(), self.out / "data", QUICK_CLIPS if quick else None)
        self.kept = self.out / "done.jsonl"
        self.results = {result.task: result for result in read(self.kept) if result.task in set(self.tasks)}

    def left(self) -> list[Task]:
        return [task for task in self.tasks if task not in self.results or self.results[task].status]

    def run(self, most: int) -> None:
        """No more than so many runs."""
        for task in self.left()[:most]:
            result = self.train(task, self.out / f"{task.option}-seed-{task.seed}")
            self.results[task] = result
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            wer = f"WER {result.wer}" if result.wer is not None else f"status {result.status}"
            mean_s = statistics.mean(kept.seconds for kept in self.results.values())
            left = f"{len(self.left())} left, {len(self.left()) * mean_s / 60:.0f} min"
            print(f"{task}: {wer}, {result.seconds:.0f} s; {left}", flush=True)

    def train(self, task: Task, folder: Path) -> Result:
        """`folder` is left where the run failed."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config.ini").write_text(self.config(task), encoding="utf-8")
        commit, began = current_commit(), time.monotonic()
        print(f"{task}: {folder / 'console.txt'} says how far it is", flush=True)
        status = finetuned(folder, "mine")
        about = {"task": task, "seconds": round(time.monotonic() - began, 1), "commit": commit}
        run = next(folder.glob("runs/*/final"), folder).parent
        wer = None if status else plain_wer(run / "final", self.data / "unseen.csv")
        if wer is None:
            return Result(**about, wer=None, train_loss=None, validation_loss=None, status=status or 1)
        train_loss, validation_loss = losses(run / "events.jsonl")
        shutil.rmtree(folder)
        return Result(**about, wer=wer, train_loss=train_loss, validation_loss=validation_loss, status=0)

    def config(self, task: Task) -> str:
        values = {
            "base_model": self.model,
            "train": self.data / "train.csv",
            "validation": self.data / "validation.csv",
            "language": "fr",
            "device": "cpu",
            "seed": task.seed,
            **SETTINGS,
            **json.loads(task.settings),
            **(QUICK if self.quick else {}),
        }
        return "\n".join(["[profile:mine]", *(f"{key} = {value}" for key, value in values.items()), ""])

    def of(self, option: str) -> list[Result]:
        found = [result for task, result in self.results.items() if task.option == option and not result.status]
        return sorted(found, key=lambda result: result.task.seed)

    def report(self) -> list[str]:
        misses = [f"{task}: the run failed, status {r.status}" for task, r in self.results.items() if r.status]
        left = f" so far; runs left to do: {len(self.left())}" if self.left() else ""
        seeds = len({task.seed for task in self.tasks})
        clips = len(load_manifest(self.data / "unseen.csv", check_audio=False).samples)
        told = ", ".join(f"{key} = {value}" for key, value in SETTINGS.items())
        return [
            f"{self.model.name}, full fine-tuning on this machine ({told}), {seeds} seeds. WER by plain transformers "
            f"on the {clips} validation and test clips. A difference within what seeds of one option differ by says "
            "nothing. The training loss is that of the last epoch; with label smoothing it is not comparable.",
            "",
            *table(HEAD, [self._row(option) for option in OPTIONS if self.of(option)]),
            *(listed(misses) or ["", f"No misses{left}."]),
        ]

    def _row(self, option: str) -> list:
        runs, plain = self.of(option), self.of(NONE)
        mean = statistics.mean(run.wer for run in runs)
        against = f"{mean - statistics.mean(run.wer for run in plain):+.1f}" if plain and option != NONE else ""
        settings = ", ".join(f"{key} = {value}" for key, value in OPTIONS[option].items()) if option != "all" else ""
        figures = [", ".join(_figure(run.train_loss) + " " + _figure(run.validation_loss) for run in runs)]
        return [
            option,
            settings,
            ", ".join(str(run.wer) for run in runs),
            f"{mean:.1f}",
            against,
            *figures,
        ]


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def write_lists(data: Path, folder: Path, most: int | None) -> Path:
    """DATA's manifests with absolute paths, and `unseen.csv`, its validation and test clips together."""
    folder.mkdir(exist_ok=True)
    samples = {kind: load_manifest(data / f"{kind}.csv").samples[:most] for kind in ("train", "validation", "test")}
    for kind in ("train", "validation"):
        write_manifest(folder / f"{kind}.csv", samples[kind])
    write_manifest(folder / "unseen.csv", [*samples["validation"], *samples["test"]])
    return folder


def plain_wer(model: Path, manifest: Path) -> float | None:
    command = [sys.executable, str(PROJECT / "benchmarks" / "plain_wer.py"), str(model), str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    found = re.search(r"WER ([\d.]+)", done.stdout)
    if not found:
        print(done.stderr[-1000:], file=sys.stderr)
    return float(found[1]) if found else None


def losses(events: Path) -> tuple[float | None, float | None]:
    """The mean loss of the steps of the last epoch, and the last validation loss."""
    found = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    steps = [event for event in found if event.get("type") == "step" and event.get("loss") is not None]
    last = [event["loss"] for event in steps if event["epoch"] == steps[-1]["epoch"]]
    validated = [event["loss"] for event in found if event.get("type") == "validation"]
    return statistics.mean(last) if last else None, validated[-1] if validated else None


def read(path: Path) -> list[Result]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**record | {"task": Task(**record["task"])}) for record in map(json.loads, lines)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(OPTIONS), metavar="NAMES")
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK} on {QUICK_CLIPS} clips, one seed; leaves RESULTS.md alone"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.only if name not in OPTIONS]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(OPTIONS)}")
    seeds, out = (1, args.out / "quick") if args.quick else (args.seeds, args.out)
    bench = Bench(args.model, args.data, args.only, seeds, out, quick=args.quick)
    bench.run(len(bench.tasks) if args.more is None else args.more)
    lines = bench.report()
    print("\n".join(lines))
    if not bench.left() and not args.quick and args.only == list(OPTIONS):
        name = f"regularisation: {bench.model.name} on {args.data.resolve().name}"
        write_section(name, lines, [result.commit for result in bench.results.values()])
    return int(any(result.status for result in bench.results.values()))


if __name__ == "__main__":
    sys.exit(main())
