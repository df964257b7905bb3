"""Do several hosts end at the WER that one reaches? Local ranks, as many epochs, the defaults.

    python benchmarks/host_counts.py [MODEL DATA --language fr] [--methods full,lora] [--ranks 2,4,8] [--seeds 3]
                                     [--network] [--set "key = value; ..."] [--quick] [--loss] [--more N] [--out DIR]
                                     [--device cuda] [--at-once RANKS]

Without MODEL it is the bundled one, with the settings of config.ini's [profile:demo]. MODEL is a folder in transformers
layout, DATA one with train.csv, validation.csv and test.csv. The batch is that of all ranks together. WER is that of
plain transformers on validation and test clips pooled. --network: with what hosts choose over one, and not the plain
rounds of local ranks. --set tries other settings than the defaults, on several ranks only. --loss: the loss of the last
validation alone, without WER. What is done is kept in DIR, so an interrupted benchmark goes on where it stopped.
--device: where ranks train, all on one card, and where clips are transcribed. --at-once: runs go on side by side, of so
many ranks together; the seconds of each then mean little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import finetuned  # noqa: E402
from benchmarks.pooled_wer import Clips, difference, transcribed, wer  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-host-counts"
BUNDLED = (PROJECT / "bundled" / "model", PROJECT / "bundled" / "data")
BUNDLED_SETTINGS = {  # the demo's; with a LoRA rate of 5e-3 one rank got lost
    "full": {"epochs": 8, "batch_size": 4, "learning_rate": 1.5e-3},
    "lora": {"epochs": 8, "batch_size": 4, "learning_rate": 2e-3, "lora_r": 32, "lora_alpha": 64},
}
SETTINGS = {  # those of single_machine.py
    "full": {"epochs": 3, "batch_size": 8, "learning_rate": 1e-4},
    "lora": {"epochs": 3, "batch_size": 8, "learning_rate": 1e-3},
}
# What hosts choose at 100 Mbit/s with models of tiny.en's size, where a step takes 2 s in full fine-tuning or half a
# second and more with LoRA, see distributed/plan/automatic.py.
NETWORK = {"full": "overlap_steps = 3; wire = int4", "lora": "overlap_steps = 2; wire = int8"}
QUICK_STEPS = 4
HEAD = ("method", "ranks", "WER of each seed", "mean", "against one rank", "s for each run")
LOSS_HEAD = ("method", "ranks", "validation loss of each seed", "mean", "against one rank", "s for each run")
CONFIG = """
[profile:base]
base_model = {model}
train = {data}/train.csv
validation = {data}/validation.csv
test =
language = {language}
method = {method}
device = {device}
num_threads = 1
seed = {seed}
max_steps = {max_steps}
checkpoint_interval = 10000
{settings}
[distributed:mine]
base_profile = base
{more}
"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """more: settings beside the defaults, as text, so that others are another task."""

    method: str
    ranks: int
    seed: int
    epochs: int
    max_steps: int
    more: str

    def __str__(self) -> str:
        return f"{self.method}, {self.ranks} ranks, seed {self.seed}{f', {self.more}' if self.more else ''}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """clips: none where the loss is enough. loss: of the last validation. seconds: of the run with its start."""

    task: Task
    clips: Clips
    loss: float
    seconds: float
    commit: str


class RunFailed(Exception):
    """Of a run, or of some of them."""


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.model, self.data = args.model.resolve(), args.data.resolve()
        self.language, self.device, self.at_once = args.language, args.device, args.at_once
        self.is_loss_enough = args.loss
        self.transcribing: set[Task] = set()
        self.settings = BUNDLED_SETTINGS if (self.model, self.data) == BUNDLED else SETTINGS
        where = "" if args.device == "cpu" else f"-{args.device}"
        where += "-quick" * args.quick + "-loss" * args.loss
        self.out = args.out.resolve() / f"{self.model.name}-{self.data.name}{where}"
        self.out.mkdir(parents=True, exist_ok=True)
        self.tasks = [
            Task(
                method=method,
                ranks=ranks,
                seed=seed,
                epochs=args.epochs or self.settings[method]["epochs"],
                max_steps=QUICK_STEPS if args.quick else 0,
                more=args.more_settings.get(method, "") if ranks > 1 else "",
            )
            for seed, method, ranks in itertools.product(range(args.seeds), args.methods, (1, *args.ranks))
        ]
        self.kept = self.out / "done.jsonl"
        self.results = {result.task: result for result in read(self.kept) if result.task in set(self.tasks)}

    def left(self) -> list[Task]:
        return [task for task in self.tasks if task not in self.results]

    def run(self, most: int | None) -> None:
        """Several at once, as many as there is room for. Raises RunFailed when all others have ended."""
        waiting, failed = self.left()[:most], []
        running: dict[Future[Result], Task] = {}
        with ThreadPoolExecutor(max(1, len(waiting))) as pool:
            while waiting or running:
                while waiting and (not running or self._fits(waiting[0], running.values())):
                    task = waiting.pop(0)
                    running[pool.submit(self.train, task)] = task
                for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                    task = running.pop(future)
                    try:
                        self.keep(task, future.result())
                    except (RunFailed, RuntimeError, OSError) as error:
                        print(f"{task}: {error}", flush=True)
                        failed.append(str(task))
        if failed:
            raise RunFailed(f"failed: {'; '.join(failed)}")

    def _fits(self, task: Task, running: Iterable[Task]) -> bool:
        trained = [1 if each in self.transcribing else each.ranks for each in running]
        return task.ranks + sum(trained) <= self.at_once

    def keep(self, task: Task, result: Result) -> None:
        self.results[task] = result
        with self.kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        rate = f"WER {wer(result.clips):.1f}, " if result.clips else ""
        told = f"{rate}loss {result.loss:.3f}, {result.seconds:.0f} s"
        print(f"{task}: {told}; {len(self.left())} left", flush=True)

    def train(self, task: Task) -> Result:
        folder = self.out / f"{task.method}-{task.ranks}-{task.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        settings = self.settings[task.method] | {"epochs": task.epochs}
        text = CONFIG.format(
            model=self.model, data=self.data, language=self.language, method=task.method, seed=task.seed,
            device=self.device, max_steps=task.max_steps,
            settings="\n".join(f"{key} = {value}" for key, value in settings.items()),
            more="\n".join(part.strip() for part in task.more.split(";")),
        )  # fmt: skip
        (folder / "config.ini").write_text(text, encoding="utf-8")
        commit, began = current_commit(), time.monotonic()
        status = finetuned(folder, "mine", task.ranks)
        if status:
            raise RunFailed(f"the run failed, {folder / 'console.txt'} says why")
        seconds, run = time.monotonic() - began, next(folder.glob("runs/*/final")).parent
        base = self.model if task.method == "lora" else None
        clips: Clips = []
        if not self.is_loss_enough:
            self.transcribing.add(task)
            clips = transcribed(run / "final", base, self.data, folder, 4 if task.max_steps else None, self.device)
        events = map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
        loss = [event["loss"] for event in events if event.get("type") == "validation"][-1]
        shutil.rmtree(folder)
        return Result(task=task, clips=clips, loss=loss, seconds=round(seconds, 1), commit=commit)

    def of(self, method: str, ranks: int) -> list[Result]:
        found = [self.results[task] for task in self.tasks if task in self.results]
        return [result for result in found if (result.task.method, result.task.ranks) == (method, ranks)]

    def losses(self) -> list[str]:
        """Whether several ranks learn what one does, before anybody measures WER."""
        rows = []
        for method, ranks in dict.fromkeys((task.method, task.ranks) for task in self.tasks):
            runs, one = ({run.task.seed: run for run in self.of(method, count)} for count in (ranks, 1))
            if not runs:
                continue
            more = [run.loss - one[seed].loss for seed, run in runs.items() if ranks > 1 and seed in one]
            cells = [", ".join(f"{run.loss:.3f}" for run in runs.values())]
            cells += [f"{statistics.mean(run.loss for run in runs.values()):.3f}"]
            cells += [f"{statistics.mean(more):+.3f}" if more else ""]
            rows.append([method, ranks, *cells, ", ".join(f"{run.seconds:.0f}" for run in runs.values())])
        return table(LOSS_HEAD, rows)

    def report(self) -> list[str]:
        rows, misses = [], []
        for method, ranks in dict.fromkeys((task.method, task.ranks) for task in self.tasks):
            runs, one = self.of(method, ranks), self.of(method, 1)
            if not runs:
                continue
            rates = [wer(run.clips) for run in runs]
            against = ""
            if ranks > 1 and (pairs := min(len(runs), len(one))):
                worse, low, high = difference(*([run.clips for run in each[:pairs]] for each in (runs, one)))
                against = f"{worse:+.1f} ({low:+.1f} to {high:+.1f})"
                if low > 0:
                    misses.append(f"{method}, {ranks} ranks: {against} points above one rank")
            cells = [", ".join(f"{rate:.1f}" for rate in rates), f"{statistics.mean(rates):.1f}", against]
            rows.append([method, ranks, *cells, ", ".join(f"{run.seconds:.0f}" for run in runs)])
        more = "; ".join(dict.fromkeys(f"{task.method}: {task.more}" for task in self.tasks if task.more))
        left = f" so far; runs left to do: {len(self.left())}" if self.left() else ""
        return [
            f"{self.model.name} on {self.data.name}{self._trained_on()}, {self._all_settings()}. "
            + (f"On several ranks with {more}. " if more else "")
            + "WER by plain transformers, padded, validation and test pooled. Against one rank: points of WER, with "
            "the interval of 95 % of a paired bootstrap over clips, all seeds together.",
            "",
            *table(HEAD, rows),
            *(listed(misses) or ["", f"No misses{left}."]),
        ]

    def _all_settings(self) -> dict[str, dict]:
        """Those of the tasks, which may have other epochs."""
        epochs = {task.method: task.epochs for task in self.tasks}
        return {method: self.settings[method] | {"epochs": epochs[method]} for method in epochs}

    def _trained_on(self) -> str:
        if self.device == "cpu":
            return ""
        import torch

        return f", all ranks on one {torch.cuda.get_device_name() if self.device == 'cuda' else self.device}"


def read(path: Path) -> list[Result]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**record | {"task": Task(**record["task"])}) for record in map(json.loads, lines)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED[0])
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED[1])
    parser.add_argument("--language", default="")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["full", "lora"], metavar="NAMES")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="other than those that go with the model")
    parser.add_argument(
        "--set", type=lambda text: dict.fromkeys(SETTINGS, text), default={}, dest="more_settings", metavar="SETTINGS"
    )
    parser.add_argument("--network", action="store_const", const=NETWORK, dest="more_settings")
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=1, metavar="RANKS")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps; leaves RESULTS.md alone")
    parser.add_argument("--loss", action="store_true", help="no WER; leaves RESULTS.md alone")
    args = parser.parse_args()
    bench = Bench(args)
    try:
        bench.run(args.more)
    except RunFailed as error:
        raise SystemExit(str(error)) from None
    if args.loss:
        print("\n".join(bench.losses()))
        return 0
    lines = bench.report()
    print("\n".join(lines))
    if not (bench.left() or args.quick or args.more_settings not in ({}, NETWORK)):
        commits = [result.commit for result in bench.results.values()]
        over = ", over a network" if args.more_settings else ""
        over += "" if args.device == "cpu" else f", {args.device}"
        write_section(f"host_counts: {bench.model.name} on {bench.data.name}{over}", lines, commits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
