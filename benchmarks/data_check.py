"""How long does a check of 100,000 clips take, and how much memory?

    python benchmarks/data_check.py [--quick] [--clips N]

Each clip is a piece out of one bundled clip and then out of another, so that few are alike; its text is a word of each.
The check runs twice, as `multimac data check` does: the second time it finds its measurements of the first. Times of
the CPU are of all cores together. --quick: 500 clips; nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import soundfile

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.results import table, write_section  # noqa: E402
from whisper_tuner.data.audio import load_audio  # noqa: E402
from whisper_tuner.data.dataset import load_manifest  # noqa: E402
from whisper_tuner.text import duration  # noqa: E402

CLIPS, QUICK_CLIPS = 100_000, 500
BEGIN_S, PIECE_S = 0.5, 0.6  # of each of the two
RATE = 16_000
TESTED = 100  # every so many clips one is of the test set


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clips", type=int, default=CLIPS)
    options = parser.parse_args()
    count = QUICK_CLIPS if options.quick else options.clips
    with tempfile.TemporaryDirectory(prefix="multimac-data-check-") as name:
        folder = Path(name)
        seconds = write_clips(folder, count)
        # The product keeps its measurements below the project: here it must not find those of an earlier benchmark.
        rows = [(which, *checked(folder)) for which in ("the first time", "again")]
    told = [
        (which, duration(took), duration(cpu_s), f"{memory / 1e6:.0f} MB", found)
        for which, took, cpu_s, memory, found in rows
    ]
    per_second = count / rows[0][1]
    body = [
        f"{count:,} clips, {seconds / 3600:.1f} h of speech, u-law WAV of 16 kHz, in one train and one test manifest.",
        "",
        *table(("check", "time", "of the CPU", "highest memory", "findings"), told),
        "",
        f"The first check decodes and measures {per_second:.0f} clips a second, on all cores.",
    ]
    print("\n".join(body))
    if not options.quick:
        write_section("data check: time and memory", body)
    return 0


def write_clips(folder: Path, count: int) -> float:
    """Clips and both manifests; their seconds together."""
    samples = [
        s
        for part in ("train", "validation", "test")
        for s in load_manifest(PROJECT / f"bundled/data/{part}.csv").samples
    ]
    pieces = [
        (load_audio(sample.audio)[round(BEGIN_S * RATE) :][: round(PIECE_S * RATE)], sample.text.split()[1])
        for sample in samples
    ]
    parts: dict[str, list[tuple]] = {"train": [], "test": []}
    for number, (sound, text) in enumerate(itertools.islice(joined(pieces), count)):
        path = folder / f"{number // 1000:03}" / f"{number:06}.wav"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, sound, RATE, subtype="ULAW")
        parts["train" if number % TESTED else "test"].append((path, text))
    for part, rows in parts.items():
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("audio", "text"), *rows])
    return 2 * PIECE_S * count


def joined(pieces: list) -> Iterator[tuple[np.ndarray, str]]:
    pairs = list(itertools.product(pieces, pieces))
    random.Random(0).shuffle(pairs)
    for (one, first), (other, second) in pairs:
        yield np.concatenate([one, other]), f"{first} {second}"


def checked(folder: Path) -> tuple[float, float, int, int]:
    """(seconds, seconds of the CPU, highest memory in bytes, findings)."""
    command = [sys.executable, str(Path(__file__).with_name("data_check_run.py")), str(folder)]
    began = time.perf_counter()
    highest, cpu_s = 0, 0.0
    with (folder / "told.json").open("wb") as out:
        process = psutil.Popen(command, stdout=out, cwd=PROJECT)
        while process.poll() is None:
            try:
                highest = max(highest, process.memory_info().rss)
                cpu_s = sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                break
            time.sleep(0.1)
    told = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    if process.returncode not in (0, 4):
        raise SystemExit(f"the check ended with status {process.returncode}")
    print(told["counts"], file=sys.stderr)
    return time.perf_counter() - began, cpu_s, highest, len(told["findings"])


if __name__ == "__main__":
    assert shutil.disk_usage(tempfile.gettempdir()).free > 5e9, "needs 5 GB for its clips"
    sys.exit(main())
