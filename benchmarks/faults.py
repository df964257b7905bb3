"""Do faults to hosts that fine-tune the bundled model, at random by a seed, and see whether each ends as it should.

    sudo python benchmarks/faults.py [--quick] [--runs 20] [--faults 100] [--seed 0] [--kinds kill,cut] [--out DIR]
    sudo python benchmarks/faults.py --only 7     do run number 7 again; RESULTS.md is left alone
    sudo python benchmarks/faults.py --goodput    samples a second with a fault each minute, against none

What is done is kept in DIR, with each run's events, so an interrupted benchmark goes on where it stopped; all runs are
judged anew each time, verdicts.py says by what. Needs Linux, root, and the system packages of `make test`.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from lab import Lab  # noqa: E402
from lab.mischief import KINDS, Fault  # noqa: E402

from benchmarks.base import listed, parser_of, publish, table  # noqa: E402
from benchmarks.fault_run import LONG_S, RECORD, SHORT_S, Course, Plan, plan  # noqa: E402
from benchmarks.verdicts import CRASH_S, LATE_S, SILENT, Story, differing, inexact  # noqa: E402

RATE = "100mbit"
SHARE = 0.5  # cores per host where speed is measured, so that a lost one leaves nobody more
HOSTS = ("h1", "h2", "h3")
EPOCHS = {"diloco": 6, "hidden": 8, "allreduce": 4}
GOODPUT_BATCH, GOODPUT_STEPS = 8, 10  # the defaults, where faults are not to come in every round
AMID = ("kill", "freeze", "sleep", "cut", "blackhole", "slow", "disk", "garbage")  # kinds that come while all train
FIRST_S, EVERY_S = 20.0, 60.0
LONGEST_MISS = 300  # characters; events and logs say more
GOODPUT_HEAD = (
    f"Three hosts of {SHARE} core, {RATE} links, DiLoCo with rounds of {GOODPUT_STEPS} steps of {GOODPUT_BATCH} clips "
    "(the defaults). "
    f"A fault each minute: {', '.join(AMID)} in some order, every other one {SHORT_S[0]:.0f} to {SHORT_S[1]:.0f} s "
    f"long, the rest {LONG_S[0]:.0f} to {LONG_S[1]:.0f} s. The master, where the launcher is, does not freeze, sleep "
    "or lose its link; its worker is killed as others are. Samples committed, by the time from the first generation to "
    "the last commit; away: the part of the hosts' time in which they were no members."
)
HEAD = (
    *("kind", "faults", "ended as defined", "next generation, s: median", "max", "rounds undone, max"),
    "trained in vain, rounds, max",
)


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, args.out.resolve()
        self.epochs = {"calm": 4, "troubled": 8} if args.quick else {"calm": 16, "troubled": 88}

    def run(self, plan: Plan, folder: Path, cpus: float | None = None) -> dict:
        """Do a run, unless it was done before; then judge it."""
        path = folder / RECORD
        record = json.loads(path.read_text()) if path.exists() else {}
        if record.get("plan") != plan.to_json():
            with Lab(hosts=len(plan.hosts), cpus=cpus, rate=RATE, shared_home=True) as lab:
                record = Course(lab, plan, folder).run()
        result = record | judge(record, plan, folder)
        print(summary(plan, result), flush=True)
        return result

    def write(self, name: str, lines: Sequence[str], results: Sequence[dict]) -> None:
        publish(name, lines, [result["commit"] for result in results], write=not self.args.quick)

    # Do runs survive?

    def plan(self, number: int) -> Plan:
        return plan(self.args.seed, number, self.args.kinds, -(-self.args.faults // self.args.runs), EPOCHS)

    def only(self) -> None:
        folder = self.out / "only"
        (folder / RECORD).unlink(missing_ok=True)
        result = self.run(self.plan(self.args.only), folder)
        for verdict in result["verdicts"]:
            print(json.dumps(verdict))
        print("\n".join([*result["missed"], *result["misses"]]), f"events and logs: {folder}", sep="\n")

    def survive(self) -> None:
        results: list[dict] = []
        while len(results) < self.args.runs or self._more(results):
            number = len(results)
            results.append(self.run(self.plan(number), self.out / f"seed-{self.args.seed}-run-{number:03d}"))
        self.write("faults: hosts in trouble, the bundled model", self._table(results), results)

    def _more(self, results: Sequence[dict]) -> bool:
        """Tell whether more runs are needed, since some faults found nothing to hit."""
        return sum(len(r["verdicts"]) for r in results) < self.args.faults and len(results) < 2 * self.args.runs

    def _table(self, results: Sequence[dict]) -> list[str]:
        verdicts = [verdict for result in results for verdict in result["verdicts"]]
        plans = [result["plan"] for result in results]
        three = sum(len(p["hosts"]) == 3 for p in plans)
        reduce, hidden = (sum(p["strategy"] == name for p in plans) for name in ("allreduce", "hidden"))
        fine = {
            "ended with status 0": [result["status"] == 0 for result in results],
            "ledger exact": [not result["inexact"] for result in results],
            "ranks bit-identical after every round": [not result["differing"] for result in results],
            "final/ loads in plain transformers and is what ranks agreed on": [not r["model"] for r in results],
            "nothing left on the hosts 25 s later": [not result["troubles"] for result in results],
            "nobody lost without a fault": [not result["of_nobody"] for result in results],
        }
        misses = [f"run {r['plan']['number']}: {miss}" for r in results for miss in r["misses"]]
        rows = [row(kind, [verdict for verdict in verdicts if verdict["kind"] == kind]) for kind in self.args.kinds]
        return [
            f"{len(verdicts)} faults in {len(results)} runs, seed {self.args.seed}: {three} runs of three hosts, "
            f"{len(results) - three} of four; {reduce} with AllReduce, "
            f"the others DiLoCo; in {hidden} of those the exchange travels beside the steps, with a checkpoint "
            f"after every third round, and a fault may undo the round that travels too; {RATE} links. "
            f"Allowed per fault: {CRASH_S:.0f} s from a crash to the next generation, "
            f"the silence that the launcher bears and {LATE_S:.0f} s from falling silent; one round undone, and one "
            "trained in vain.",
            "",
            *table(HEAD, rows),
            "",
            *(f"- {what}: {sum(each)} of {len(results)} runs" for what, each in fine.items()),
            f"- rounds whose digests were compared: {sum(r['compared'] for r in results)}; AllReduce tells none, "
            "there the launcher compares every vote",
            f"- longest until nothing was left: {max(result['left_s'] for result in results):.0f} s",
            "",
            f"`--seed {self.args.seed} --only RUN` repeats a run.",
            *listed(misses),
        ]

    # What do faults cost?

    def goodput(self) -> None:
        rows, ratios, results = [], [], []
        for number in range(self.args.repeats):
            calm = Plan(
                number=number,
                hosts=HOSTS,
                strategy="diloco",
                seed=self.args.seed + number,
                epochs=self.epochs["calm"],
                round_steps=GOODPUT_STEPS,
                batch=GOODPUT_BATCH,
            )
            troubled = replace(calm, epochs=self.epochs["troubled"], legs=(every_minute(calm.seed),))
            before, with_faults, after = (
                self.run(each, self.out / f"goodput-{each.seed}-{name}", SHARE)
                for name, each in (("before", calm), ("troubled", troubled), ("after", calm))
            )
            undisturbed = [before["speed"], after["speed"]]  # the machine itself gets faster and slower
            ratios.append(with_faults["speed"] / statistics.mean(undisturbed))
            results += [before, with_faults, after]
            cells = [number + 1, ", ".join(f"{speed:.2f}" for speed in undisturbed), f"{with_faults['speed']:.2f}"]
            cells += [len(with_faults["verdicts"]), f"{100 * with_faults['away']:.0f} %"]
            rows.append([*cells, f"{100 * ratios[-1]:.0f} %"])
        head = ("repeat", "samples/s without faults, before and after", "with", "faults", "away", "ratio")
        lines = [GOODPUT_HEAD, "", *table(head, rows), "", f"Median: {100 * statistics.median(ratios):.0f} %."]
        lines += listed(miss for result in results for miss in result["misses"])
        self.write("faults: goodput", lines, results)


def every_minute(seed: int) -> tuple[Fault, ...]:
    """Plan a fault of each kind, one a minute."""
    rng = random.Random(f"goodput {seed}")
    planned = []
    for number, kind in enumerate(rng.sample(AMID, len(AMID))):
        host = rng.choice(HOSTS[1:] if kind in SILENT else HOSTS)
        lasts = 0.0 if kind == "kill" else rng.uniform(*(SHORT_S, LONG_S)[number % 2])
        at = FIRST_S + EVERY_S * number
        planned.append(Fault(at=at, host=host, kind=kind, seconds=lasts, seed=rng.randrange(1 << 32)))
    return tuple(planned)


def judge(record: dict, plan: Plan, folder: Path) -> dict:
    """Find what became of the faults of a run, and what was wrong with it."""
    text = (folder / "events.jsonl").read_text() if (folder / "events.jsonl").exists() else ""
    for address, name in record["addresses"].items():
        text = text.replace(f'"{address}"', f'"{name}"')
    events = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    events = [event | {"time": event["time"] - record["ahead"]} for event in events]
    story = Story(events, record["faults"], plan.hosts, plan.strategy)
    ids: list[str] = []
    if (folder / "train.csv").exists():  # not of a run that did not begin
        with (folder / "train.csv").open(newline="") as file:
            ids = [row["id"] for row in csv.DictReader(file)]
    compared, unlike = differing(events)
    agreed = [event["digest"] for event in events if event["type"] == "round"]
    final = record["final"]
    unagreed = "" if final["wrong"] or not agreed or final["digest"] == agreed[-1] else "final/ is not the last round's"
    verdicts = story.judge()
    for verdict in verdicts:
        verdict["in_vain"] /= plan.round_samples
        over = {"rounds undone": verdict["undone_rounds"], "rounds trained in vain": verdict["in_vain"]}
        verdict["problems"] += [f"{count:.1f} {what}" for what, count in over.items() if count > plan.vain_rounds]
    times = [event["time"] for event in story.of("generation", "commit")]
    trained = sum(len(names) for commit in story.kept for by in commit["samples"].values() for names in by.values())
    result = {
        "verdicts": verdicts,
        "status": story.end["status"],
        "inexact": inexact(story.kept, ids, plan.epochs),
        "compared": compared,
        "differing": f"ranks differ after rounds {unlike}" if unlike else "",
        "model": f"final/: {final['wrong']}" if final["wrong"] else unagreed,
        "of_nobody": [f"{event['host']} was lost without a fault: {event['reason']}" for event in story.of_nobody()],
        "speed": trained / max(1.0, max(times) - min(times)) if times else 0.0,
        "away": story.away(),
    }
    wrong = [verdict for verdict in verdicts if verdict["problems"]]
    found = [f"{v['kind']} of {v['host']} ({v['words']}): {'; '.join(v['problems'])}" for v in wrong]
    if result["status"] != 0 and not verdicts:
        found.append(f"ended with status {result['status']}: {story.end['message']}")
    looked_at = ("differing", "inexact", "model") if result["status"] == 0 else ("differing",)
    found += [result[what] for what in looked_at if result[what]]
    found += result["of_nobody"] + record["troubles"]
    return result | {"misses": [shorten(miss, LONGEST_MISS) for miss in found]}


def row(kind: str, verdicts: Sequence[dict]) -> list:
    times = [verdict["recovery"] for verdict in verdicts if verdict["recovery"] is not None]
    middle, longest = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
    defined = sum(not verdict["problems"] for verdict in verdicts)
    undone = max((verdict["undone_rounds"] for verdict in verdicts), default=0)
    vain = max((verdict["in_vain"] for verdict in verdicts), default=0.0)
    return [kind, len(verdicts), defined, middle, longest, undone, f"{vain:.1f}"]


def summary(plan: Plan, result: dict) -> str:
    done = ", ".join(v["kind"] + (" (!)" if v["problems"] else "") for v in result["verdicts"]) or "no faults"
    lines = [
        f"run {plan.number}, {len(plan.hosts)} hosts, {plan.strategy}: status {result['status']}; {done}; "
        f"{result['compared']} rounds compared; {result['speed']:.1f} samples/s; left for {result['left_s']} s",
        *result["misses"],
    ]
    return "\n  ".join(lines)


def kinds(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"no kind {unknown[0]!r}: {', '.join(KINDS)}")
    return chosen


def main() -> None:
    parser = parser_of(__doc__, "faults", "2 runs, 8 faults, few epochs", more=False)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=100, help="at least; planned ones that find nothing do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--only", type=int, metavar="RUN", help="with the options of the benchmark that it is a run of")
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="of --goodput")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.faults, args.repeats = 2, 8, 1
    bench = Bench(args)
    if args.only is not None:
        bench.only()
    elif args.goodput:
        bench.goodput()
    else:
        bench.survive()


if __name__ == "__main__":
    main()
