"""Does a long run need more and more memory? Resident memory of launcher and workers over 2,000 rounds.

    python benchmarks/memory.py [--rounds 2000] [--out DIR]

Two local ranks train the bundled model with DiLoCo and H = 1: so every step is a round with its collective, vote and
commit. Writes a table and a graph (memory.svg). --quick: 100 rounds, to see that it works; its slope means nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import BUNDLED, start_finetune  # noqa: E402
from benchmarks.results import table, write_section  # noqa: E402

GRAPH = Path(__file__).with_name("memory.svg")
CONFIG = """
[distributed:rounds]
base_profile = tiny
shares = fixed
communication_interval = 1
checkpoint_interval = 50
max_steps = {rounds}
[profile:tiny]
test =
{bundled}
epochs = 1000
batch_size = 2
learning_rate = 1e-5
"""
EVERY_S = 1.0
WARM_UP = 0.25  # of the rounds: caches and the allocator fill up
Series = dict[str, list[tuple[int, float]]]  # name of a process: (rounds, MB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="folder of the run, kept [default: a temporary one]")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds = 100 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        series = measure(options.out or Path(folder), rounds)
    lines = summary(series)
    print("\n".join(lines))
    if not options.quick:
        GRAPH.write_text(svg(series), encoding="utf-8")
        head = ["Two local ranks, the bundled model, DiLoCo with H = 1.", "", "![memory](memory.svg)", ""]
        write_section(f"memory: {rounds:,} rounds", [*head, *lines])
    return 0


def measure(folder: Path, rounds: int) -> Series:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.ini"
    config.write_text(CONFIG.format(bundled=BUNDLED, rounds=rounds), encoding="utf-8")
    series: Series = {}
    with (folder / "console.txt").open("wb") as console, start_finetune(config, "rounds", 2, console) as process:
        while process.poll() is None:
            time.sleep(EVERY_S)
            events = max(folder.glob("runs/*/events.jsonl"), default=None)
            if events and (done := rounds_of(events)):
                for name, megabytes in resident(events.parent).items():
                    series.setdefault(name, []).append((done, megabytes))
                print(f"\r{done}/{rounds}", end="", file=sys.stderr)
    if process.returncode:
        raise SystemExit(f"the run failed: see {folder}")
    return series


def rounds_of(events: Path) -> int:
    with events.open("rb") as file:
        file.seek(max(0, events.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[1:-1]
    return max((event["round"] for event in map(json.loads, lines) if event["type"] == "commit"), default=0)


def resident(run_dir: Path) -> dict[str, float]:
    """MB by process: the launcher, and its workers in the order of their start."""
    for process in psutil.process_iter(["cmdline"]):
        if "distributed.launcher.main" in (process.info["cmdline"] or ()) and str(run_dir) in process.info["cmdline"]:
            workers = [child for child in process.children() if "distributed.worker.main" in child.cmdline()]
            named = {"launcher": process} | {f"worker {n}": child for n, child in enumerate(workers)}
            return {name: one.memory_info().rss / 2**20 for name, one in named.items()}
    return {}


def summary(series: Series) -> list[str]:
    """Least squares over the rounds after the warm-up."""
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


def svg(series: Series) -> str:
    """Rounds to the right, MB upwards from 0."""
    width, height, margin = 720, 300, 50
    most = max(megabytes for points in series.values() for _, megabytes in points) * 1.1
    last = max(points[-1][0] for points in series.values())
    colours = ("#222222", "#1f77b4", "#d62728", "#2ca02c")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{margin} 10V{height - margin}H{width - 100}" fill="none" stroke="#888888"/>',
        f'<text x="{margin - 8}" y="20" text-anchor="end">{most:.0f}</text><text x="10" y="{height / 2}">MB</text>',
        f'<text x="{width - 110}" y="{height - margin + 20}" text-anchor="end">{last} rounds</text>',
    ]
    for colour, (name, points) in zip(colours, sorted(series.items()), strict=False):
        xy = [
            (margin + (width - 100 - margin) * done / last, (height - margin) - (height - margin - 10) * mb / most)
            for done, mb in points
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{xy[-1][0] + 6:.0f}" y="{xy[-1][1] + 4:.0f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
