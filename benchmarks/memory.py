"""Does a long run need more and more memory? Resident memory of launcher and workers over 2,000 rounds.

    python benchmarks/memory.py [--rounds 2000] [--out DIR]

Two local ranks train the bundled model with DiLoCo and H = 1: so every step is a round with its collective, vote and
commit. Writes a table and a graph (memory.svg). --quick is there to see that it works; its slope means nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from benchmarks.base import (  # noqa: E402
    BUNDLED_DATA,
    BUNDLED_MODEL,
    ended,
    parser_of,
    profile_of,
    publish,
    start_finetune,
    table,
    watching,
)

GRAPH = Path(__file__).with_name("memory.svg")
SETTINGS = {"num_threads": 1, "device": "cpu", "epochs": 1000, "batch_size": 2, "learning_rate": 1e-5}
ROUNDS = {"base_profile": "tiny", "shares": "fixed", "communication_interval": 1, "checkpoint_interval": 50}
EVERY_S = 1.0
WARM_UP = 0.25  # of the rounds: caches and the allocator fill up
Series = dict[str, list[tuple[int, float]]]  # name of a process: (rounds, MB)


def main() -> int:
    parser = parser_of(__doc__, "memory", "100 rounds", more=False)
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    rounds = 100 if args.quick else args.rounds
    series = measure(args.out.resolve() / "run", rounds)
    head = ["Two local ranks, the bundled model, DiLoCo with H = 1.", "", f"![memory]({GRAPH.name})", ""]
    publish(f"memory: {rounds:,} rounds", [*head, *summary(series)], write=not args.quick)
    if not args.quick:
        from benchmarks.charts import draw_memory

        draw_memory(series, GRAPH)
    return 0


def measure(folder: Path, rounds: int) -> Series:
    series: Series = {}
    profile = profile_of(BUNDLED_MODEL, BUNDLED_DATA, **SETTINGS)
    sections = {"profile:tiny": profile, "distributed:rounds": {**ROUNDS, "max_steps": rounds}}

    def look() -> None:
        events = max(folder.glob("runs/*/events.jsonl"), default=None)
        if events and (done := rounds_of(events)):
            for name, megabytes in resident(events.parent).items():
                series.setdefault(name, []).append((done, megabytes))
            print(f"\r{done}/{rounds}", end="", file=sys.stderr)

    process = start_finetune(folder, sections, "rounds", ranks=2)
    with watching(look, EVERY_S):
        ended(folder, process.wait())
    return series


def rounds_of(events: Path) -> int:
    with events.open("rb") as file:
        file.seek(max(0, events.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[1:-1]
    return max((event["round"] for event in map(json.loads, lines) if event["type"] == "commit"), default=0)


def resident(run_dir: Path) -> dict[str, float]:
    """Return the MB of each process: the launcher, and its workers in the order of their start."""
    for process in psutil.process_iter(["cmdline"]):
        if "distributed.launcher.main" in (process.info["cmdline"] or ()) and str(run_dir) in process.info["cmdline"]:
            workers = [child for child in process.children() if "distributed.worker.main" in child.cmdline()]
            named = {"launcher": process} | {f"worker {n}": child for n, child in enumerate(workers)}
            return {name: one.memory_info().rss / 2**20 for name, one in named.items()}
    return {}


def summary(series: Series) -> list[str]:
    """Make a row for each process, with its slope by least squares over the rounds after the warm-up."""
    rows = []
    for name, points in sorted(series.items()):
        last = points[-1][0]
        counted = [point for point in points if point[0] >= WARM_UP * last]
        slope, start = statistics.linear_regression(*zip(*counted, strict=True))
        noise = statistics.pstdev(megabytes - start - slope * done for done, megabytes in counted)
        grown = abs(slope) * (last - counted[0][0])
        flat = "yes" if grown <= 2 * noise or grown < 0.01 * points[-1][1] else "no"
        rows.append((name, f"{points[-1][1]:.0f}", f"{1000 * slope:+.1f}", f"{noise:.1f}", flat))
    return table(("process", "MB at the end", "MB per 1,000 rounds", "noise, MB", "flat"), rows)


if __name__ == "__main__":
    sys.exit(main())
