"""Do several hosts end at the WER that one reaches? And what do other settings bring? Local ranks, the defaults.

    python benchmarks/host_counts.py [MODEL DATA --language fr] [--methods full,lora] [--ranks 2,4,8] [--seeds 3]
                                     [--network] [--also "NAME KEY=VALUE ..."] [--quick] [--loss] [--more N] [--out DIR]
                                     [--device cuda]
    python benchmarks/host_counts.py MODEL DATA --ranks 1 --also "dropout dropout=0.1" --also "long epochs=16"

Without MODEL it is the bundled one, with the settings of config.ini's [profile:demo]. MODEL is a folder in transformers
layout, DATA one with train.csv, validation.csv and test.csv. The batch is that of all ranks together. WER is that of
plain transformers on validation and test clips pooled. --network: with what hosts choose over one, and not the plain
rounds of local ranks. --also tries other settings beside the defaults, on as many ranks as --ranks says. --loss: the
loss of the last validation alone, without WER. What is done is kept in DIR, so an interrupted benchmark goes on where
it stopped. --device: where ranks train, all on one card, and where clips are transcribed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from benchmarks.base import (  # noqa: E402
    BUNDLED_DATA,
    BUNDLED_MODEL,
    Done,
    a_way,
    finetuned,
    names,
    parser_of,
    profile_of,
    publish,
    table,
)
from benchmarks.plain_wer import against, transcribed, unseen, wer  # noqa: E402

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
NETWORK = {"full": {"overlap_steps": "3", "wire": "int4"}, "lora": {"overlap_steps": "2", "wire": "int8"}}
QUICK_STEPS, QUICK_CLIPS = 4, 4
DEFAULTS = "defaults"
HEAD = (
    *("method", "ranks", "settings", "WER of each seed", "mean", "against one rank"),
    *("validation loss of each seed", "mean", "s of training"),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run. more: the settings of its way, beside `settings` of the method; both as text."""

    method: str
    ranks: int
    way: str
    seed: int
    settings: str
    more: str
    max_steps: int
    with_wer: bool

    def __str__(self) -> str:
        return f"{self.method}, {self.ranks} ranks, {self.way}, seed {self.seed}"


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.model, self.data, self.args = args.model.resolve(), args.data.resolve(), args
        is_bundled = (self.model, self.data) == (BUNDLED_MODEL, BUNDLED_DATA)
        self.settings = BUNDLED_SETTINGS if is_bundled else SETTINGS
        self.ways = {method: self._ways(method) for method in args.methods}
        self.tasks = [
            Task(
                method=method,
                ranks=ranks,
                way=way,
                seed=seed,
                settings=json.dumps(self.settings[method]),
                more=json.dumps(more),
                max_steps=QUICK_STEPS if args.quick else 0,
                with_wer=not args.loss,
            )
            for seed in range(args.seeds)
            for method in args.methods
            for (ranks, way), more in self.ways[method].items()
        ]
        self.done = Done(args.out / f"{self.model.name}-{self.data.name}-{args.device}{'-quick' * args.quick}")

    def _ways(self, method: str) -> dict[tuple[int, str], dict[str, str]]:
        """Return the settings of each (ranks, name): one rank at the defaults first, with which all are compared."""
        of_network = NETWORK[method] if self.args.network else {}
        found = {(1, DEFAULTS): {}}
        for ranks in self.args.ranks:
            own = of_network if ranks > 1 else {}
            found.setdefault((ranks, DEFAULTS), own)
            found |= {(ranks, name): own | more for name, more in self.args.also}
        return found

    def train(self, task: Task) -> dict:
        folder = self.done.path.parent.resolve() / f"{task.method}-{task.ranks}-{task.way}-{task.seed}"
        profile = profile_of(
            self.model,
            self.data,
            language=self.args.language,
            method=task.method,
            device=self.args.device,
            num_threads=1,
            seed=task.seed,
            max_steps=task.max_steps,
            checkpoint_interval=10_000,
            **json.loads(task.settings),
        )
        distribution = {"base_profile": "base", **json.loads(task.more)}
        run = finetuned(folder, {"profile:base": profile, "distributed:mine": distribution}, "mine", task.ranks)
        base = self.model if task.method == "lora" else None
        most = QUICK_CLIPS if task.max_steps else None
        clips = []
        if task.with_wer:
            clips = transcribed(run / "final", unseen(self.data), base=base, most=most, device=self.args.device)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        loss = [event["loss"] for event in events if event["type"] == "validation"][-1]
        steps = [event for event in events if event["type"] == "step"]
        seconds = max(step["time"] for step in steps) - min(step["time"] - step["seconds"] for step in steps)
        shutil.rmtree(folder)
        told = f"WER {wer(clips):.1f}, loss {loss:.3f}" if clips else f"loss {loss:.3f}"
        return {"clips": clips, "loss": loss, "seconds": seconds, "told": told}

    def report(self) -> list[str]:
        rows, misses = [], []
        for method, ways in self.ways.items():
            one = self._results(method, 1, DEFAULTS)
            for ranks, way in ways:
                runs = self._results(method, ranks, way)
                if not runs:
                    continue
                clips = [run["clips"] for run in runs if run["clips"]]
                difference = ""
                if clips and (ranks, way) != (1, DEFAULTS) and (pairs := min(len(runs), len(one))):
                    difference, is_worse = against(clips[:pairs], [run["clips"] for run in one[:pairs]])
                    misses += [f"{method}, {ranks} ranks, {way}: {difference} points above one rank"] * is_worse
                rates, losses = [wer(each) for each in clips], [run["loss"] for run in runs]
                cells = [", ".join(f"{rate:.1f}" for rate in rates), f"{statistics.mean(rates):.1f}" if rates else ""]
                cells += [difference, ", ".join(f"{loss:.3f}" for loss in losses), f"{statistics.mean(losses):.3f}"]
                rows.append([method, ranks, way, *cells, ", ".join(f"{run['seconds']:.0f}" for run in runs)])
        told = {method: self.settings[method] for method in self.args.methods}
        where = "" if self.args.device == "cpu" else f", all ranks on one {self.args.device}"
        if self.args.device == "cuda":
            import torch

            where = f", all ranks on one {torch.cuda.get_device_name()}"
        more = {
            f"{method}, {ranks} ranks, {way}": ", ".join(f"{key} = {value}" for key, value in settings.items())
            for method, ways in self.ways.items()
            for (ranks, way), settings in ways.items()
            if settings
        }
        return [
            f"{self.model.name} on {self.data.name}{where}, {told}. "
            + "".join(f"{name}: {settings}. " for name, settings in more.items())
            + "WER by plain transformers, padded, validation and test pooled. Against one rank at the defaults: points "
            "of WER, with the interval of 95 % of a paired bootstrap over clips, all seeds together.",
            "",
            *table(HEAD, rows),
            *self.done.listed(self.tasks, misses),
        ]

    def _results(self, method: str, ranks: int, way: str) -> list[dict]:
        found = self.done.found(self.tasks)
        return [result for task, result in found if (task.method, task.ranks, task.way) == (method, ranks, way)]


def main() -> int:
    parser = parser_of(__doc__, "host-counts", f"{QUICK_STEPS} steps")
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED_DATA)
    parser.add_argument("--language", default="")
    parser.add_argument("--methods", type=names, default=["full", "lora"], metavar="NAMES")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--also", type=a_way, action="append", default=[], metavar="'NAME KEY=VALUE ...'")
    parser.add_argument("--network", action="store_true", help="with what several hosts choose at 100 Mbit/s")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loss", action="store_true", help="no WER; leaves RESULTS.md alone")
    args = parser.parse_args()
    bench = Bench(args)
    bench.done.run(bench.tasks, bench.train, args.more)
    name = f"host_counts: {bench.model.name} on {bench.data.name}"
    name += ", over a network" if args.network else ""
    name += "".join(f", {way}" for way, _ in args.also)
    name += "" if args.device == "cpu" else f", {args.device}"
    write = not (args.quick or args.loss or bench.done.left(bench.tasks))
    publish(name, bench.report(), bench.done.commits(bench.tasks), write=write)
    return int(bool(bench.done.failed))


if __name__ == "__main__":
    sys.exit(main())
