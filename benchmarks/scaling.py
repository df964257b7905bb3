"""How much faster are more hosts? Clips a second, where the time goes, bytes, and time to a WER; 1 to 4 lab hosts.

    sudo flock /tmp/lab.lock python benchmarks/scaling.py [MODEL DATA] [--cases 'speed/lora/*'] [--more N] [--quick]

MODEL is a folder in transformers layout, DATA one with train.csv, validation.csv and test.csv; without them the bundled
ones. Each case is one `distributed-train` at its defaults, but for what the case sets, on hosts with a share of a core
and links of a given speed. --list names all cases. What is done is kept in DIR (`--out`), so an interrupted benchmark
goes on where it stopped. Figures of hosts that fill the machine are those of a machine that does nothing else; what
launcher, SSH and kernel take is then taken from the hosts, so that --sets 4x0.4 loses less on two cores than 4x0.5.
Needs Linux, root, and the system packages of `make test`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from lab import Lab  # noqa: E402

from benchmarks.base import (  # noqa: E402
    BUNDLED_DATA,
    BUNDLED_MODEL,
    Done,
    a_way,
    names,
    parser_of,
    profile_of,
    publish,
)
from benchmarks.plain_wer import unseen  # noqa: E402
from benchmarks.scaling_cases import (  # noqa: E402
    BATCH,
    FEW_STEPS,
    LEAST_ROUNDS,
    LINKS,
    NO_LINK,
    SETS,
    SHARED,
    WARM,
    WER_LINKS,
    Case,
    H,
    Result,
    cases,
    tables,
)
from benchmarks.scaling_run import Point, Product, Steady, steady  # noqa: E402
from whisper_tuner.data.dataset import load_manifest, write_manifest  # noqa: E402

ROUND = 5  # steps, by default
NEVER = 1_000_000
SETTINGS = {"full": {"learning_rate": 1e-4, "epochs": 5}, "lora": {"learning_rate": 1e-3, "epochs": 5}}
BUNDLED_SETTINGS = {"full": {"learning_rate": 1.5e-3, "epochs": 8}, "lora": {"learning_rate": 2e-3, "epochs": 8}}
QUICK_CLIPS = 8  # of a WER


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.model, self.data = args, args.model.resolve(), args.data.resolve()
        more = "-quick" * args.quick + (f"-{args.batch}" if args.batch != BATCH else "")
        self.out = (args.out / f"{self.model.name}-{self.data.name}{more}").resolve()
        self.done = Done(self.out)
        self.unseen = self.out / "unseen.csv"
        samples = [sample for manifest in unseen(self.data) for sample in load_manifest(manifest).samples]
        self.unseen_clips = min(len(samples), QUICK_CLIPS) if args.quick else len(samples)
        write_manifest(self.unseen, samples[: self.unseen_clips])
        self.clips = len(load_manifest(self.data / "train.csv", check_audio=False).samples)
        self.settings = BUNDLED_SETTINGS if self.model == BUNDLED_MODEL else SETTINGS
        self.ways = {"diloco": {}, **dict(args.also)}
        self.cases = cases(args, self.ways, self.clips)

    def chosen(self) -> list[Case]:
        """Return the cases that are left to do, of those that --cases names."""
        left = self.done.left(self.cases)
        return [case for case in left if any(fnmatch(str(case), pattern) for pattern in self.args.cases)]

    def results(self) -> list[Result]:
        return [
            Result(case=case, steady=Steady(**kept["steady"]), curve=tuple(Point(**point) for point in kept["curve"]))
            for case, kept in self.done.found(self.cases)
        ]

    def measure(self, case: Case) -> dict:
        folder = self.out / str(case).replace("/", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rate = None if case.link == NO_LINK else case.link
        shown = (self.model, self.data, self.out)
        with Lab(hosts=len(case.cpus), rate=rate, shared_home=True, folder=self.out / "lab", shown=shown) as lab:
            until = 0 if case.is_wer else case.steps
            sections = self.sections(case, folder)
            product = Product(lab, case.cpus, sections, folder, until=until, keeps=case.is_wer, whole=case.all_cpus)
            events, samples = product.run()
        (folder / "samples.json").write_text(json.dumps([*map(asdict, samples)]))
        figures = steady(events, samples, measured(events, case))
        curve = product.curve(self.unseen, self.args.language) if case.is_wer else []
        product.clear()
        told = f"{figures.rate:.2f} clips/s{f', WER {curve[-1].wer:.1f}' if curve else ''}"
        return {"steady": asdict(figures), "curve": [*map(asdict, curve)], "told": told}

    def sections(self, case: Case, folder: Path) -> dict[str, dict[str, object]]:
        profile = profile_of(
            self.model,
            self.data,
            validation="",
            language=self.args.language,
            runs_dir=folder / "runs",
            method=case.method,
            max_steps=case.steps if case.is_wer else 0,  # a speed case is stopped: it plans as a whole run does
            batch_size=self.args.batch,
            seed=case.seed,
            checkpoint_interval=self.between_checkpoints(case),
            num_threads=1,
            device="cpu",
            **self.settings[case.method],
        )
        # The default of shares, but for hosts that are one machine, as in the lab.
        way = {"base_profile": "bench", "shares": "auto", **json.loads(case.settings)}
        return {"profile:bench": profile, "distributed:bench": way}

    def steps_of(self, case: Case) -> int:
        """Return the steps that a whole run has."""
        return math.ceil(self.clips / self.args.batch) * self.settings[case.method]["epochs"]

    def between_checkpoints(self, case: Case) -> int:
        """Return how many agreements lie between two checkpoints; 0 for the default.

        In a WER case about a twentieth of its run or FEW_STEPS, more often than by default where checkpoints are
        large. What others are compared with saves nothing.
        """
        if not case.is_wer:
            return NEVER if case.way in ("one", "apart") else 0
        settings = json.loads(case.settings)
        by_step = settings.get("strategy") == "allreduce"
        in_round = 1 if by_step else int(settings.get("communication_interval", ROUND))
        return max(math.ceil(FEW_STEPS / in_round), round((case.steps or self.steps_of(case)) / in_round / 20))

    def report(self) -> list[str]:
        results = self.results()
        others = [
            f"{name}: {', '.join(f'{k} = {v}' for k, v in own.items())}" for name, own in self.ways.items() if own
        ]
        last, whole = max((case.last for case in self.cases), default=0), max(map(self.steps_of, self.cases), default=0)
        limited = "; of 2x0.5of1 the thread that trains has half a core, and the host a whole one"
        lines = [
            f"{self.model.name} on {self.data.name}: `distributed-train` at its defaults"
            + (f" but for the way ({'; '.join(others)})" if others else "")
            + f", batches of {self.args.batch} clips, of all hosts together. Hosts have one thread and the share of a "
            f"core that is given{limited if any(result.case.all_cpus for result in results) else ''}. References: one, "
            "the first of these hosts alone; apart, hosts that exchange nothing before their last step, the limit. "
            f"Clips a second of all hosts together, in whole rounds after the first {WARM + H} steps, "
            f"of unequal hosts {SHARED + H}, up to step {last or whole} at most, of {whole}. "
            "The first 16 rounds send more second moments than later ones. "
            "Shares are of the hosts' time. Who comes last to an exchange waits for nobody: the exchange is counted "
            "as long as it takes there, and the rest is waiting. MB sent by a host, on average, for 1,000 clips, by "
            "the interface (with SSH and heartbeats, and few headers, as it is handed many segments as one packet) and "
            "by our counter. Cores of a host: on average, with what is not training.",
        ]
        found, misses = tables(results, self.args.methods, self.args.wer, self.unseen_clips)
        return [*lines, *found, *self.done.listed(self.cases, misses)]


def measured(events: Sequence[dict], case: Case) -> tuple[int, int]:
    """Return the steps after which and up to which: whole rounds, of as many steps as the run has chosen."""
    last = case.last or max(event["step"] for event in events if event["type"] == "step")
    of_round = max(event.get("steps_in_round") or 1 for event in events if event["type"] == "start")
    if of_round > last - case.first:
        return case.first, last
    first = -(-case.first // of_round) * of_round
    return first, first + (last - first) // of_round * of_round


def main() -> int:
    parser = parser_of(__doc__, "scaling", "few steps, 1 and 2 hosts, one link")
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED_DATA)
    parser.add_argument("--methods", default=["lora", "full"], type=names)
    parser.add_argument("--sets", default=[*SETS], type=names, help=f"of hosts [{','.join(SETS)}]")
    parser.add_argument("--links", default=[*LINKS], type=names, help=f"of speed cases [{','.join(LINKS)}]")
    parser.add_argument("--wer-links", default=[*WER_LINKS], type=names, help=f"of WER cases [{','.join(WER_LINKS)}]")
    parser.add_argument("--also", type=a_way, action="append", default=[], metavar="'NAME KEY=VALUE ...'", help="a way")
    parser.add_argument("--seeds", type=int, default=1, help="of WER cases; 0: speed alone [1]")
    parser.add_argument("--repeats", type=int, default=1, help="of speed cases [1]")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"clips of a step, of all hosts together [{BATCH}]")
    parser.add_argument("--rounds", type=int, default=0, help="of speed cases [2 and those of an epoch]")
    parser.add_argument("--wer", type=float, metavar="PERCENT", help="to reach [one host's at its end]")
    parser.add_argument("--language", default="", help="of multilingual models")
    parser.add_argument("--cases", default=["*"], type=names, metavar="PATTERNS", help="only those: 'speed/lora/*'")
    parser.add_argument("--list", action="store_true", help="name the cases that are left, and stop")
    parser.add_argument("--report", action="store_true", help="only write the table of what is done")
    parser.add_argument("--name", default="", help="of a table of its own in RESULTS.md, beside that of other cases")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch: 1 clip at least")
    if 0 < args.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds: {LEAST_ROUNDS} at least, since the first and the last one do not count")
    if args.quick:
        args.sets, args.links, args.seeds = ["1x0.5", "2x0.5"], args.links[1:2] or args.links, min(args.seeds, 1)
    bench = Bench(args)
    if short := [case for case in bench.cases if case.kind == "speed" and case.steps > bench.steps_of(case)]:
        found = bench.steps_of(short[0])
        parser.error(f"{short[0]} needs {short[0].steps} steps, and a run has {found}: lower --batch or --rounds")
    if args.list:
        print("\n".join(map(str, bench.chosen())))
        return 0
    if not args.report:
        bench.done.run(bench.chosen(), bench.measure, args.more)
    name = f"scaling: {bench.model.name} on {bench.data.name}"
    name += f", batches of {args.batch}" if args.batch != BATCH else ""
    name += f", {args.name}" if args.name else ""
    write = not args.quick and bool(bench.results()) and (args.report or not bench.done.left(bench.cases))
    publish(name, bench.report(), bench.done.commits(bench.cases), write=write)
    return int(bool(bench.done.failed))


if __name__ == "__main__":
    sys.exit(main())
