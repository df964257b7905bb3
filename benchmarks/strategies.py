"""The same task with every strategy on four nodes: loss, accuracy, bytes sent and time.

    python benchmarks/strategies.py [--quick] [--seeds 3] [--only diloco,demo] [--more N] [--out DIR]
    python benchmarks/strategies.py --sweep       which learning rate suits which strategy; one short run each
    sudo python benchmarks/strategies.py --wire   our counter against the interfaces of four lab hosts

Handwritten digits and a small model on local processes (digits.py); what is compared stands in strategy_settings.py.
Writes a table, says which claims hold, and draws docs/strategies.svg. Run after run, since each takes the whole
machine. What is done is kept in DIR, so an interrupted benchmark goes on where it stopped; runs that failed are done
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.digits import BATCH, NODES, PARTS, WIDTHS, Figures, new_net, train  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from benchmarks.strategy_settings import BY_KEY, CLAIMS, ENTRIES, Claim, Entry  # noqa: E402
from exogym import ExogymError  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-strategies"
CHART = PROJECT / "docs" / "strategies.svg"
STEPS, SWEEP_STEPS, LAYERS_STEPS, QUICK_STEPS = 2000, 600, 200, 120
SWEEP_SEED = 100  # none of those that the table is made with
WITHIN = 0.03  # of AllReduce's accuracy
HEAD = (
    *("strategy", "lr", "train loss", "validation loss", "accuracy, %", "of the seeds", "against AllReduce's, %"),
    *("bytes per node and step", "MB per node", "times less", "s"),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training. settings: those of its entry, as text, so that other ones are another task."""

    key: str
    net: str
    lr: float
    steps: int
    seed: int
    settings: str

    def __str__(self) -> str:
        return f"{self.key} on {self.net}, lr {self.lr:g}, {self.steps} steps, seed {self.seed}"


def task_of(entry: Entry, *, net: str = "mlp", lr: float | None = None, steps: int, seed: int) -> Task:
    lr = entry.lr if lr is None else lr
    return Task(key=entry.key, net=net, lr=lr, steps=steps, seed=seed, settings=json.dumps(dict(entry.settings)))


@dataclass(frozen=True, kw_only=True)
class Result:
    task: Task
    figures: Figures
    commit: str


class Runs:
    """Trainings that are kept in a file as soon as each is done."""

    def __init__(self, tasks: Iterable[Task], kept: Path):
        self.tasks, self.kept = list(dict.fromkeys(tasks)), kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        self.results = {result.task: result for result in read(kept) if result.task in set(self.tasks)}
        self.failed: dict[Task, str] = {}

    def left(self) -> list[Task]:
        return [task for task in self.tasks if task not in self.results]

    def run(self, most: int) -> None:
        """No more than so many."""
        for task in self.left()[:most]:
            try:
                strategy = BY_KEY[task.key].build(task.lr)
                figures = train(strategy, net=task.net, steps=task.steps, seed=task.seed)
            except ExogymError as error:
                self.failed[task] = str(error).strip().splitlines()[-1]
                print(f"{task}: failed: {error}", flush=True)
                continue
            self.results[task] = Result(task=task, figures=figures, commit=current_commit())
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.results[task])) + "\n")
            print(f"{told(task, figures)}; {len(self.results)} of {len(self.tasks)}", flush=True)

    def of(self, entry: Entry, net: str = "mlp") -> list[Figures]:
        return [r.figures for task, r in self.results.items() if (task.key, task.net) == (entry.key, net)]

    def commits(self) -> list[str]:
        return [result.commit for result in self.results.values()]


def read(path: Path) -> list[Result]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [
        Result(task=Task(**kept["task"]), figures=Figures(**kept["figures"]), commit=kept["commit"])
        for kept in map(json.loads, lines)
    ]


def told(task: Task, figures: Figures) -> str:
    sent = f"{figures.mean_sent / 1e6:.2f} MB sent per node, {figures.seconds:.0f} s"
    return f"{task}: validation loss {figures.val_loss:.3f}, accuracy {100 * figures.accuracy:.1f} %, {sent}"


class Table:
    """What the runs say: medians over the seeds."""

    def __init__(self, runs: Runs, entries: Sequence[Entry], steps: int):
        self.runs, self.steps = runs, steps
        self.entries = [entry for entry in entries if runs.of(entry)]

    def middle(self, entry: Entry, value: Callable[[Figures], float], net: str = "mlp") -> float | None:
        figures = self.runs.of(entry, net)
        return median(map(value, figures)) if figures else None

    def times_less(self, entry: Entry, net: str = "mlp") -> float | None:
        """What AllReduce sends, by what this one sends; in as many steps."""
        sent, most = (self.middle(e, lambda f: f.mean_sent, net) for e in (entry, BY_KEY["allreduce"]))
        return most / sent if sent and most else None

    def behind(self, entry: Entry) -> float | None:
        """By what part of AllReduce's accuracy this one's differs; below 0 is worse."""
        accuracy, best = (self.middle(e, lambda f: f.accuracy) for e in (entry, BY_KEY["allreduce"]))
        return accuracy / best - 1 if accuracy is not None and best else None

    def rows(self) -> list[list]:
        return [self._row(entry) for entry in self.entries]

    def _row(self, entry: Entry) -> list:
        losses = [self.middle(entry, lambda f: f.train_loss), self.middle(entry, lambda f: f.val_loss)]
        accuracy, sent = self.middle(entry, lambda f: f.accuracy), self.middle(entry, lambda f: f.mean_sent)
        behind, less = self.behind(entry), self.times_less(entry)
        seeds = sorted(figures.accuracy for figures in self.runs.of(entry))
        return [
            *(entry.name, f"{entry.lr:g}", *(f"{loss:.3f}" for loss in losses), f"{100 * accuracy:.1f}"),
            f"{100 * seeds[0]:.1f} to {100 * seeds[-1]:.1f}",
            "" if behind is None else f"{100 * behind:+.1f}" + (" (misses)" if behind < -WITHIN else ""),
            *(f"{sent / self.steps:,.0f}", f"{sent / 1e6:.2f}", "" if less is None else f"{less:.1f}"),
            f"{self.middle(entry, lambda f: f.seconds):.0f}",
        ]

    def claims(self) -> list[tuple[str, str]]:
        """Whether it "holds" or "misses", and a sentence, for each claim of which there are figures."""
        return [judged for claim in CLAIMS if (judged := self._judged(claim))]

    def _judged(self, claim: Claim) -> tuple[str, str] | None:
        less = self.times_less(BY_KEY[claim.key], claim.net)
        if less is None:
            return None
        steps = next(task.steps for task in self.runs.tasks if (task.key, task.net) == (claim.key, claim.net))
        verdict = "too short to judge" if steps < claim.steps else "holds" if less >= claim.times else "misses"
        measured = f"{claim.what} sends {less:.1f} times less than AllReduce over {steps:,} steps"
        formula = f"{claim.times:g} times are claimed, {claim.by_formula:.4g} are the formula's ({claim.formula})"
        return verdict, f"{measured}; {formula}"

    def misses(self) -> list[str]:
        found = [f"{task}: the run failed: {why}" for task, why in self.runs.failed.items()]
        found += [sentence for verdict, sentence in self.claims() if verdict == "misses"]
        for entry in self.entries:
            behind = self.behind(entry)
            if behind is not None and behind < -WITHIN:
                how_much = f"accuracy {-100 * behind:.1f} % below AllReduce's, {100 * WITHIN:g} % allowed"
                found.append(f"{entry.name}: {how_much}: {entry.note or 'why is not known'}")
        return found

    def unequal(self) -> list[str]:
        """Of strategies whose nodes do not all send as much."""
        lines = []
        for entry in self.entries:
            sent = self.runs.of(entry)[0].sent
            if max(sent) > 1.01 * min(sent):
                each = ", ".join(f"{bytes_ / 1e6:.2f}" for bytes_ in sent)
                lines.append(f"{entry.name}: nodes send {each} MB; above is the mean")
        return lines

    def lines(self) -> list[str]:
        runs = [r.figures for r in self.runs.results.values()]
        seeds = len({task.seed for task in self.runs.tasks})
        parameters = sum(p.numel() for p in new_net("mlp", 0).parameters())
        left = f" so far; runs left to do: {len(self.runs.left())}" if self.runs.left() else ""
        sizes = ", ".join(f"{size:,} {part}" for part, size in PARTS.items())
        return [
            f"scikit-learn's handwritten digits ({sizes}), an MLP of {'-'.join(map(str, WIDTHS))} ({parameters:,} "
            f"parameters), {NODES} nodes on this machine, {self.steps:,} steps of {BATCH} images on each node; all "
            f"strategies see the same images. Medians of {seeds} seeds; losses and accuracy (on the test digits) are "
            "those of the model that `fit` returns. AdamW but for DeMo, cosine schedule, rates from `--sweep`. "
            "Bytes are by our counter, without headers. Those before the first step are not counted: "
            f"{max(max(f.first) for f in runs):,} at most, since all nodes begin with the same weights. Seconds are "
            "without the start of the processes.",
            "",
            *table(HEAD, self.rows()),
            "",
            *(f"- {verdict}: {sentence}" for verdict, sentence in self.claims()),
            *(f"- {line}" for line in self.unequal()),
            *(listed(self.misses()) or ["", f"No misses{left}."]),
        ]


def compare(args: argparse.Namespace, entries: Sequence[Entry]) -> int:
    steps, seeds = (QUICK_STEPS, 1) if args.quick else (STEPS, args.seeds)
    layers = [entry for entry in entries if entry.key in ("allreduce", "demo")] if BY_KEY["demo"] in entries else []
    tasks = [task_of(entry, steps=steps, seed=seed) for seed in range(seeds) for entry in entries]
    tasks += [task_of(entry, net="layers", steps=min(steps, LAYERS_STEPS), seed=0) for entry in layers]
    runs = Runs(tasks, args.out / "done.jsonl")
    runs.run(len(tasks) if args.more is None else args.more)
    found = Table(runs, entries, steps)
    lines = found.lines() if found.entries else ["No run has ended."]
    print("\n".join(lines))
    if not runs.left():
        draw(found, args.out / CHART.name if args.quick or args.only else CHART)
        if not args.quick and not args.only:
            chart = ["", f"![accuracy by bytes sent](../docs/{CHART.name})"]
            write_section("strategies: digits on four nodes", [*lines, *chart], runs.commits())
    return int(bool(runs.failed))


def draw(found: Table, path: Path) -> None:
    from benchmarks.strategy_chart import Point, draw_chart

    points = [
        Point(
            entry.label or entry.name,
            entry.strategy,
            found.middle(entry, lambda f: f.mean_sent) / 1e6,
            found.middle(entry, lambda f: f.accuracy) * 100,
        )
        for entry in found.entries
    ]
    best = found.middle(BY_KEY["allreduce"], lambda f: f.accuracy)
    draw_chart(points, path, least=None if best is None else 100 * best * (1 - WITHIN))
    print(path)


def sweep(args: argparse.Namespace, entries: Sequence[Entry]) -> int:
    steps = QUICK_STEPS if args.quick else SWEEP_STEPS
    tasks = [task_of(entry, lr=lr, steps=steps, seed=SWEEP_SEED) for entry in entries for lr in entry.rates]
    runs = Runs(tasks, args.out / "sweep.jsonl")
    runs.run(len(tasks) if args.more is None else args.more)
    rows = []
    for entry in entries:
        found = {task.lr: result.figures for task, result in runs.results.items() if task.key == entry.key}
        best = best_rate(found)
        cells = ", ".join(f"{lr:g}: {100 * f.val_accuracy:.1f} ({f.val_loss:.3f})" for lr, f in sorted(found.items()))
        other = "" if best in (None, entry.lr) else f"strategy_settings.py has {entry.lr:g}"
        rows.append([entry.name, cells, "" if best is None else f"{best:g}", other])
    head = f"Accuracy in % (and loss) on the validation digits after {steps} steps by learning rate; seed {SWEEP_SEED}."
    lines = [head, "", *table(("strategy", "by learning rate", "best", ""), rows)]
    print("\n".join(lines))
    if not runs.left() and not args.quick and not args.only:
        write_section("strategies: learning rates", lines, runs.commits())
    return int(bool(runs.failed))


def best_rate(found: Mapping[float, Figures]) -> float | None:
    """The one with the highest validation accuracy; of several the one with the lowest loss."""
    return max(found, key=lambda lr: (found[lr].val_accuracy, -found[lr].val_loss), default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="KEYS", help=", ".join(BY_KEY))
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--wire", action="store_true", help="needs Linux, root, and the system packages of `make test`")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed; leaves RESULTS.md alone")
    args = parser.parse_args()
    if unknown := [key for key in args.only if key not in BY_KEY]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(BY_KEY)}")
    args.out = args.out / "quick" if args.quick else args.out
    entries = [entry for entry in ENTRIES if not args.only or entry.key in args.only]
    if args.wire:
        from benchmarks.wire import compare_counters

        return compare_counters(entries, args.out, is_quick=args.quick)
    return sweep(args, entries) if args.sweep else compare(args, entries)


if __name__ == "__main__":
    sys.exit(main())
