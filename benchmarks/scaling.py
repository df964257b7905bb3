"""How much faster are more hosts? Clips a second, where the time goes, bytes, and time to a WER; 1 to 4 lab hosts.

    sudo flock /tmp/lab.lock python benchmarks/scaling.py [MODEL DATA] [--cases 'speed/lora/*'] [--more N] [--quick]

MODEL is a folder in transformers layout, DATA one with train.csv, validation.csv and test.csv; without them the bundled
ones. Each case is one `distributed-train` at its defaults, but for what the case sets, on hosts with a share of a core
and links of a given speed; or Seq2SeqTrainer under torchrun on the same hosts. --list names all cases. What is done is
kept in DIR (`--out`), so an interrupted benchmark goes on where it stopped. Figures of hosts that fill the machine are
those of a machine that does nothing else; what launcher, SSH and kernel take is then taken from the hosts, so that
--sets 4x0.4 loses less on two cores than 4x0.5. Needs Linux, root, and the system packages of `make test`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.regularisation import write_lists  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from benchmarks.scaling_cases import (  # noqa: E402
    BATCH,
    LEAST_ROUNDS,
    LINKS,
    NO_LINK,
    RECIPE,
    RECIPE_CLIPS,
    RECIPE_STEPS,
    SETS,
    SHARED,
    WARM,
    WAYS,
    WER_LINKS,
    Case,
    H,
    Result,
    cases,
    left,
)
from benchmarks.scaling_figures import Point, steady, steady_recipe  # noqa: E402
from benchmarks.scaling_report import (  # noqa: E402
    OTHERS,
    SPEED_HEAD,
    WER_HEAD,
    missed,
    missed_wers,
    speed_rows,
    wer_rows,
)
from benchmarks.scaling_run import Product, run_recipe  # noqa: E402
from lab import Lab, LabError  # noqa: E402
from whisper_tuner.data.dataset import load_manifest, write_manifest  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-scaling"
BUNDLED = PROJECT / "bundled"
ROUND, FEW_STEPS = 5, 25  # of a round by default; between checkpoints of a WER case, at least
NEVER = 1_000_000
SETTINGS = {"full": {"learning_rate": 1e-4, "epochs": 5}, "lora": {"learning_rate": 1e-3, "epochs": 5}}
BUNDLED_SETTINGS = {"full": {"learning_rate": 1.5e-3, "epochs": 8}, "lora": {"learning_rate": 2e-3, "epochs": 8}}
QUICK_CLIPS = 8  # of a WER
CONFIG = """
[profile:bench]
base_model = {model}
train = {train}
validation =
test =
language = {language}
runs_dir = {runs}
method = {method}
epochs = {epochs}
max_steps = {max_steps}
batch_size = {batch}
learning_rate = {learning_rate}
seed = {seed}
checkpoint_interval = {every}
num_threads = 1
device = cpu
[distributed:bench]
base_profile = bench
{way}
"""


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.model, self.data = args, args.model.resolve(), args.data.resolve()
        more = "-quick" * args.quick + (f"-{args.batch}" if args.batch != BATCH else "")
        self.out = (args.out / f"{self.model.name}-{self.data.name}{more}").resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.lists = write_lists(self.data, self.out / "data", None)
        samples = load_manifest(self.lists / "train.csv", check_audio=False).samples
        write_manifest(self.out / "data" / "recipe.csv", samples[: max(RECIPE_CLIPS, RECIPE_STEPS * args.batch)])
        if args.quick:
            unseen = load_manifest(self.lists / "unseen.csv", check_audio=False).samples
            write_manifest(self.lists / "unseen.csv", unseen[:QUICK_CLIPS])
        self.settings = BUNDLED_SETTINGS if self.model.is_relative_to(BUNDLED) else SETTINGS
        lists = (args.methods, args.sets, args.links, args.wer_links, args.ways)
        about = {"rounds": args.rounds, "repeats": args.repeats, "batch": args.batch, "quick": args.quick}
        self.clips = len(samples)
        self.cases = cases(*lists, args.seeds, self.clips, **about)
        self.kept = self.out / "done.jsonl"
        lines = self.kept.read_text(encoding="utf-8").splitlines() if self.kept.exists() else []
        done = [Result.read(json.loads(line)) for line in lines]
        self.results = {result.case: result for result in done if result.case in set(self.cases)}

    def left(self) -> list[Case]:
        return left(self.cases, self.results)

    def chosen(self) -> list[Case]:
        return [case for case in self.left() if any(fnmatch(str(case), pattern) for pattern in self.args.cases)]

    def run(self, most: int | None) -> None:
        for case in self.chosen()[:most]:
            folder = self.out / str(case).replace("/", "_")
            print(f"{case}: {folder} says how far it is", flush=True)
            self.results[case] = result = self.do(case, folder)
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            print(f"{case}: {told(result)}; {len(self.chosen())} left", flush=True)

    def do(self, case: Case, folder: Path) -> Result:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began, about = time.monotonic(), {"case": case, "commit": current_commit()}
        try:
            found = self.measure(case, folder)
        except (RuntimeError, ValueError, LabError) as error:
            print(error, file=sys.stderr)
            found = {"status": 1, "steady": None, "curve": ()}
        return Result(**about, **found, seconds=round(time.monotonic() - began, 1))

    def measure(self, case: Case, folder: Path) -> dict:
        rate = None if case.link == NO_LINK else case.link
        shown = (self.model, self.data, self.out)
        with Lab(hosts=len(case.cpus), rate=rate, shared_home=True, folder=self.out / "lab", shown=shown) as lab:
            if case.way == RECIPE:
                options = {"method": case.method, "max-steps": case.steps, "seed": case.seed}
                options |= {"batch-size": max(1, round(self.args.batch / len(case.cpus)))}
                options |= {"learning-rate": self.settings[case.method]["learning_rate"]}
                train = self.lists / "recipe.csv"
                told, samples = run_recipe(lab, case.cpus, options, self.model, train, folder)
                figures = steady_recipe(told, samples, case.first)
            else:
                about = {"until": 0 if case.is_wer else case.steps, "keeps": case.is_wer, "whole": case.all_cpus}
                product = Product(lab, case.cpus, self.config(case, folder), folder, **about)
                (events, samples), told = product.run(), None
                figures = steady(events, samples, measured(events, case))
        (folder / "samples.json").write_text(json.dumps({"told": told, "samples": [*map(asdict, samples)]}))
        curve: list[Point] = []
        if case.is_wer:
            curve = product.curve(self.lists / "unseen.csv", self.args.language)
        if case.way != RECIPE:
            product.clear()
        return {"status": 0, "steady": figures, "curve": tuple(curve)}

    def config(self, case: Case, folder: Path) -> str:
        # The default, but for hosts that are one machine, as in the lab.
        settings = {"shares": "auto"} | json.loads(case.settings)
        way = "\n".join(f"{key} = {value}" for key, value in settings.items())
        values = {"model": self.model, "train": self.lists / "train.csv", "language": self.args.language, "way": way}
        values |= {"runs": folder / "runs", "method": case.method, "seed": case.seed}
        values["max_steps"] = case.steps if case.is_wer else 0  # a speed case is stopped: it plans as a whole run does
        values |= self.settings[case.method] | {"batch": self.args.batch}
        values["every"] = self.between_checkpoints(case)
        return CONFIG.format(**values)

    def steps_of(self, case: Case) -> int:
        """That a whole run has."""
        return math.ceil(self.clips / self.args.batch) * self.settings[case.method]["epochs"]

    def between_checkpoints(self, case: Case) -> int:
        """Agreements. In a WER case about a twentieth of its run or FEW_STEPS, more often than by default where
        checkpoints are large. What others are compared with saves nothing.
        """
        if not case.is_wer:
            return NEVER if case.way in ("one", "apart") else 0
        settings = json.loads(case.settings)
        by_step = settings.get("strategy") == "allreduce"
        in_round = 1 if by_step else int(settings.get("communication_interval", ROUND))
        return max(math.ceil(FEW_STEPS / in_round), round((case.steps or self.steps_of(case)) / in_round / 20))

    def report(self) -> list[str]:
        done = {case: result for case, result in self.results.items() if not result.status}
        misses = [f"{case}: failed" for case, result in self.results.items() if result.status]
        misses += [
            f"{case}: {result.steady.others:.1f} cores were used by others meanwhile"
            for case, result in done.items()
            if result.steady.others > OTHERS
        ]
        speeds = [result for case, result in done.items() if case.kind == "speed"]
        misses += missed(speeds)
        clips = len(load_manifest(self.lists / "unseen.csv", check_audio=False).samples)
        ways = "; ".join(f"{name}: {written(WAYS[name])}" for name in self.args.ways if WAYS[name])
        last = max((case.last for case in self.cases if case.way != RECIPE), default=0)
        whole = max(map(self.steps_of, self.cases), default=0)
        limited = "; of 2x0.5of1 the thread that trains has half a core, and the host a whole one"
        lines = [
            f"{self.model.name} on {self.data.name}: `distributed-train` at its defaults"
            + (f" but for the way ({ways})" if ways else "")
            + f", batches of {self.args.batch} clips, of all hosts together. Hosts have one thread and the share of a "
            f"core that is given{limited if any(case.all_cpus for case in done) else ''}. References: one, the first "
            "of these hosts alone; apart, hosts that exchange nothing before their last step, the limit; "
            f"{RECIPE} under torchrun on the same hosts, padded to 30 s (of 3 hosts with batches of "
            f"{3 * round(self.args.batch / 3)}). "
            f"Clips a second of all hosts together, in whole rounds after the first {WARM + H} steps, "
            f"of unequal hosts {SHARED + H}, up to step {last or whole} at most, of {whole}. "
            "The first 16 rounds send more second moments than later ones. "
            "Shares are of the hosts' time. Who comes last to an exchange waits for nobody: the exchange is counted "
            "as long as it takes there, and the rest is waiting. MB sent by a host, on average, for 1,000 clips, by "
            "the interface (with SSH and heartbeats, and few headers, as it is handed many segments as one packet) and "
            "by our counter. Cores of a host: on average, with what is not training.",
        ]
        for method in self.args.methods:
            rows = speed_rows([result for result in speeds if result.case.method == method])
            of_wer = [r for case, r in done.items() if (case.kind, case.method) == ("wer", method)]
            wers, fixed = wer_rows(of_wer, self.args.wer)
            misses += missed_wers(of_wer, fixed)
            lines += ["", f"{method}: speed", "", *table(SPEED_HEAD, rows)] if rows else []
            if wers:
                about = f"{method}: WER of the {clips} validation and test clips, by `evaluate`"
                if fixed is not None:
                    about += f"; the WER to reach is {fixed:.1f}" + ("" if self.args.wer else ", one host's at its end")
                apart = f"about a twentieth of a run or {FEW_STEPS} steps"
                about += f". Between checkpoints, which are {apart} apart, it falls along a straight line"
                lines += ["", about, "", *table(WER_HEAD, wers)]
        left = f" so far; cases left to do: {len(self.left())}" if self.left() else ""
        return [*lines, *(listed(misses) or ["", f"No misses{left}."])]


def measured(events: Sequence[dict], case: Case) -> tuple[int, int]:
    """The steps after which and up to which: whole rounds, of as many steps as the run has chosen."""
    last = case.last or max(event["step"] for event in events if event["type"] == "step")
    of_round = max(event.get("steps_in_round") or 1 for event in events if event["type"] == "start")
    if of_round > last - case.first:
        return case.first, last
    first = -(-case.first // of_round) * of_round
    return first, first + (last - first) // of_round * of_round


def told(result: Result) -> str:
    if result.status:
        return f"failed after {result.seconds:.0f} s"
    wer = f", WER {result.curve[-1].wer:.1f}" if result.curve else ""
    return f"{result.steady.rate:.2f} clips/s{wer}, {result.seconds:.0f} s"


def written(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())


def a_way(text: str) -> tuple[str, dict[str, str]]:
    name, *settings = text.split()
    if not name or not all("=" in each for each in settings):
        raise argparse.ArgumentTypeError(f"{text!r}: a name, and KEY=VALUE for each setting")
    return name, dict(each.split("=", 1) for each in settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = {"type": lambda text: text.split(",")}
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED / "model")
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED / "data")
    parser.add_argument("--methods", default=["lora", "full"], **words)
    parser.add_argument("--sets", default=[*SETS], help=f"of hosts [{','.join(SETS)}]", **words)
    parser.add_argument("--links", default=[*LINKS], help=f"of speed cases [{','.join(LINKS)}]", **words)
    parser.add_argument("--wer-links", default=[*WER_LINKS], help=f"of WER cases [{','.join(WER_LINKS)}]", **words)
    parser.add_argument("--ways", default=["diloco", "plain", "allreduce", "fixed"], help="of those known", **words)
    parser.add_argument("--also", type=a_way, action="append", default=[], metavar="'NAME KEY=VALUE ...'", help="a way")
    parser.add_argument("--seeds", type=int, default=1, help="of WER cases; 0: speed alone [1]")
    parser.add_argument("--repeats", type=int, default=1, help="of speed cases [1]")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"clips of a step, of all hosts together [{BATCH}]")
    parser.add_argument("--rounds", type=int, default=0, help="of speed cases [2 and those of an epoch]")
    parser.add_argument("--wer", type=float, metavar="PERCENT", help="to reach [one host's at its end]")
    parser.add_argument("--language", default="", help="of multilingual models")
    parser.add_argument(
        "--cases", default=["*"], metavar="PATTERNS", help="do only those, e.g. 'speed/lora/*'", **words
    )
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N cases now")
    parser.add_argument("--list", action="store_true", help="name the cases that are left, and stop")
    parser.add_argument("--report", action="store_true", help="only write the table of what is done")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--name", default="", help="of a table of its own in RESULTS.md, beside that of other cases")
    parser.add_argument(
        "--quick", action="store_true", help="few steps, 1 and 2 hosts, one link; leaves RESULTS.md alone"
    )
    args = parser.parse_args()
    if args.batch < 1:
        parser.error("--batch: 1 clip at least")
    if 0 < args.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds: {LEAST_ROUNDS} at least, since the first and the last one do not count")
    WAYS.update(args.also)
    args.ways += [name for name, _ in args.also]
    if unknown := [way for way in args.ways if way not in WAYS]:
        parser.error(f"--ways: {', '.join(unknown)} is none of {', '.join(WAYS)}")
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
        bench.run(args.more)
    lines = bench.report()
    print("\n".join(lines))
    if not args.quick and bench.results and (args.report or not bench.left()):
        commits = [result.commit for result in bench.results.values()]
        name = f"scaling: {bench.model.name} on {bench.data.name}"
        name += f", batches of {args.batch}" if args.batch != BATCH else ""
        write_section(f"{name}, {args.name}" if args.name else name, lines, commits)
    return int(any(result.status for result in bench.results.values()))


if __name__ == "__main__":
    sys.exit(main())
