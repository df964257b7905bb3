"""The same task with every strategy on four nodes: loss, accuracy, bytes sent and time.

    python benchmarks/strategies.py [--quick] [--seeds 3] [--only diloco,demo] [--more N] [--out DIR]

Handwritten digits and a small model on local processes (digits.py); what is compared stands in strategy_settings.py.
Writes a table, says which claims hold, and draws docs/strategies.svg. Run after run, since each takes the whole
machine. What is done is kept in DIR, so an interrupted benchmark goes on where it stopped; runs that failed are done
again. That our counter of bytes is right shows in scaling.py, beside what the interfaces of its hosts have sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tests")]

from benchmarks.base import Done, names, parser_of, publish, table  # noqa: E402
from benchmarks.digits import BATCH, NODES, PARTS, WIDTHS, Figures, new_net, train  # noqa: E402
from benchmarks.strategy_settings import BY_KEY, CLAIMS, ENTRIES, Claim, Entry  # noqa: E402

CHART = PROJECT / "docs" / "strategies.svg"
STEPS, LAYERS_STEPS, QUICK_STEPS = 2000, 200, 120
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


def task_of(entry: Entry, *, net: str = "mlp", steps: int, seed: int) -> Task:
    settings = json.dumps(dict(entry.settings))
    return Task(key=entry.key, net=net, lr=entry.lr, steps=steps, seed=seed, settings=settings)


def work(task: Task) -> dict:
    figures = train(BY_KEY[task.key].build(), net=task.net, steps=task.steps, seed=task.seed)
    told = f"validation loss {figures.val_loss:.3f}, accuracy {100 * figures.accuracy:.1f} %"
    return {"figures": asdict(figures), "told": f"{told}, {figures.mean_sent / 1e6:.2f} MB sent per node"}


class Table:
    """What the runs say: medians over the seeds."""

    def __init__(self, done: Done, tasks: Sequence[Task], entries: Sequence[Entry], steps: int):
        self.done, self.tasks, self.steps = done, tasks, steps
        self.entries = [entry for entry in entries if self.figures_of(entry)]

    def figures_of(self, entry: Entry, net: str = "mlp") -> list[Figures]:
        found = self.done.found(self.tasks)
        return [Figures(**result["figures"]) for task, result in found if (task.key, task.net) == (entry.key, net)]

    def middle(self, entry: Entry, value: Callable[[Figures], float], net: str = "mlp") -> float | None:
        figures = self.figures_of(entry, net)
        return median(map(value, figures)) if figures else None

    def times_less(self, entry: Entry, net: str = "mlp") -> float | None:
        """Divide what AllReduce sends by what this one sends, in as many steps."""
        sent, most = (self.middle(e, lambda f: f.mean_sent, net) for e in (entry, BY_KEY["allreduce"]))
        return most / sent if sent and most else None

    def behind(self, entry: Entry) -> float | None:
        """Return by what part of AllReduce's accuracy this one's differs; below 0 is worse."""
        accuracy, best = (self.middle(e, lambda f: f.accuracy) for e in (entry, BY_KEY["allreduce"]))
        return accuracy / best - 1 if accuracy is not None and best else None

    def row(self, entry: Entry) -> list:
        losses = [self.middle(entry, lambda f: f.train_loss), self.middle(entry, lambda f: f.val_loss)]
        accuracy, sent = self.middle(entry, lambda f: f.accuracy), self.middle(entry, lambda f: f.mean_sent)
        behind, less = self.behind(entry), self.times_less(entry)
        seeds = sorted(figures.accuracy for figures in self.figures_of(entry))
        return [
            *(entry.name, f"{entry.lr:g}", *(f"{loss:.3f}" for loss in losses), f"{100 * accuracy:.1f}"),
            f"{100 * seeds[0]:.1f} to {100 * seeds[-1]:.1f}",
            "" if behind is None else f"{100 * behind:+.1f}" + (" (misses)" if behind < -WITHIN else ""),
            *(f"{sent / self.steps:,.0f}", f"{sent / 1e6:.2f}", "" if less is None else f"{less:.1f}"),
            f"{self.middle(entry, lambda f: f.seconds):.0f}",
        ]

    def claims(self) -> list[tuple[str, str]]:
        """Return whether it "holds" or "misses", and a sentence, for each claim of which there are figures."""
        return [judged for claim in CLAIMS if (judged := self._judged(claim))]

    def _judged(self, claim: Claim) -> tuple[str, str] | None:
        less = self.times_less(BY_KEY[claim.key], claim.net)
        if less is None:
            return None
        steps = next(task.steps for task in self.tasks if (task.key, task.net) == (claim.key, claim.net))
        verdict = "too short to judge" if steps < claim.steps else "holds" if less >= claim.times else "misses"
        measured = f"{claim.what} sends {less:.1f} times less than AllReduce over {steps:,} steps"
        formula = f"{claim.times:g} times are claimed, {claim.by_formula:.4g} are the formula's ({claim.formula})"
        return verdict, f"{measured}; {formula}"

    def misses(self) -> list[str]:
        found = [sentence for verdict, sentence in self.claims() if verdict == "misses"]
        for entry in self.entries:
            behind = self.behind(entry)
            if behind is not None and behind < -WITHIN:
                how_much = f"accuracy {-100 * behind:.1f} % below AllReduce's"
                found.append(f"{entry.name}: {how_much}, {100 * WITHIN:g} % allowed")
        return found

    def lines(self) -> list[str]:
        seeds = len({task.seed for task in self.tasks})
        parameters = sum(p.numel() for p in new_net("mlp", 0).parameters())
        sizes = ", ".join(f"{size:,} {part}" for part, size in PARTS.items())
        return [
            f"scikit-learn's handwritten digits ({sizes}), an MLP of {'-'.join(map(str, WIDTHS))} ({parameters:,} "
            f"parameters), {NODES} nodes on this machine, {self.steps:,} steps of {BATCH} images on each node; all "
            f"strategies see the same images. Medians of {seeds} seeds; losses and accuracy (on the test digits) are "
            "those of the model that `fit` returns. AdamW but for DeMo, cosine schedule. "
            "Bytes are by our counter, the mean of all nodes, without headers, with the few before the first step. "
            "Seconds are without the start of the processes.",
            "",
            *table(HEAD, map(self.row, self.entries)),
            "",
            *(f"- {verdict}: {sentence}" for verdict, sentence in self.claims()),
            *self.done.listed(self.tasks, self.misses()),
        ]

    def draw(self, path: Path) -> None:
        from benchmarks.charts import Point, draw_accuracy

        points = [
            Point(
                entry.name,
                entry.strategy,
                self.middle(entry, lambda f: f.mean_sent) / 1e6,
                self.middle(entry, lambda f: f.accuracy) * 100,
            )
            for entry in self.entries
        ]
        best = self.middle(BY_KEY["allreduce"], lambda f: f.accuracy)
        draw_accuracy(points, path, least=None if best is None else 100 * best * (1 - WITHIN))
        print(path)


def main() -> int:
    parser = parser_of(__doc__, "strategies", f"{QUICK_STEPS} steps, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=names, default=[], metavar="KEYS", help=", ".join(BY_KEY))
    args = parser.parse_args()
    if unknown := [key for key in args.only if key not in BY_KEY]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(BY_KEY)}")
    out = args.out / "quick" if args.quick else args.out
    entries = [entry for entry in ENTRIES if not args.only or entry.key in args.only]
    steps, seeds = (QUICK_STEPS, 1) if args.quick else (STEPS, args.seeds)
    layers = [entry for entry in entries if entry.key in ("allreduce", "demo")] if BY_KEY["demo"] in entries else []
    tasks = [task_of(entry, steps=steps, seed=seed) for seed in range(seeds) for entry in entries]
    tasks += [task_of(entry, net="layers", steps=min(steps, LAYERS_STEPS), seed=0) for entry in layers]
    done = Done(out)
    done.run(tasks, work, args.more)
    found, is_whole = Table(done, tasks, entries, steps), not (args.quick or args.only or done.left(tasks))
    lines = found.lines()
    if not done.left(tasks):
        found.draw(CHART if is_whole else out / CHART.name)
    if is_whole:
        lines += ["", f"![accuracy by bytes sent](../docs/{CHART.name})"]
    publish("strategies: digits on four nodes", lines, done.commits(tasks), write=is_whole)
    return int(bool(done.failed))


if __name__ == "__main__":
    sys.exit(main())
