"""How long do `multimac data import` and `data check` take for 100,000 clips, and how much memory?

    python benchmarks/large_data.py [--quick] [--clips N] [--out DIR]

Each clip is a piece out of one bundled clip and then out of another, so that few are alike; its text is a word of each.
They are listed as a Common Voice release, imported, imported again, checked, and checked again: the second time each
command finds what it knows of the files in .multimac/cache. Times of the CPU are of all cores together. Needs 5 GB in
DIR (`--out`).
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import soundfile

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tests")]

from benchmarks.base import BUNDLED_DATA, Peak, listed, parser_of, publish, table, watching  # noqa: E402
from whisper_tuner.data.audio import load_audio  # noqa: E402
from whisper_tuner.data.dataset import load_manifest  # noqa: E402

CLIPS, QUICK_CLIPS = 100_000, 500
RATE, BEGIN_S, PIECE_S = 16_000, 0.5, 0.6  # of each of the two pieces of a clip
COLUMNS = ("client_id", "path", "sentence_id", "sentence", "up_votes", "down_votes", "locale", "segment")
MINUTES, MEMORY_MB = 15.0, 600.0  # more is a miss
FOUND = 4  # the status of a check that has found errors
HEAD = ("command", "s", "clips a second", "s of the CPU", "peak memory, MB")


def main() -> int:
    parser = parser_of(__doc__, "large-data", f"{QUICK_CLIPS} clips", more=False)
    parser.add_argument("--clips", type=int, default=CLIPS)
    args = parser.parse_args()
    clips = QUICK_CLIPS if args.quick else args.clips
    args.out.mkdir(parents=True, exist_ok=True)
    rows, misses = [], []
    with tempfile.TemporaryDirectory(dir=args.out) as name:
        release, out = Path(name) / "release", Path(name) / "imported"
        write_release(release, clips)
        bring_in = ["data", "import", str(release), "--out", str(out), "--language", "en"]
        check = ["data", "check", str(out / "train.csv"), "--language", "en", "--out", str(Path(name) / "report")]
        commands = {"import": bring_in, "import again": bring_in, "check": check, "check again": check}
        for what, command in commands.items():
            seconds, cpu_s, peak = measured(command)
            rows.append([what, f"{seconds:.1f}", f"{clips / seconds:.0f}", f"{cpu_s:.0f}", f"{peak / 1e6:.0f}"])
            misses += [f"{what}: {seconds / 60:.1f} min, not {MINUTES:g}"] * (seconds > 60 * MINUTES)
            misses += [f"{what}: {peak / 1e6:.0f} MB, not {MEMORY_MB:g}"] * (peak > 1e6 * MEMORY_MB)
            print(rows[-1], flush=True)
    hours = 2 * PIECE_S * clips / 3600
    about = f"{clips:,} clips, {hours:.1f} h of speech, u-law WAV of 16 kHz, as a Common Voice release."
    body = [about, "", *table(HEAD, rows), *listed(misses)]
    publish(f"large data: {clips:,} clips", body, write=not args.quick)
    return int(bool(misses))


def write_release(folder: Path, clips: int) -> None:
    samples = [
        s for part in ("train", "validation", "test") for s in load_manifest(BUNDLED_DATA / f"{part}.csv").samples
    ]
    pieces = [
        (load_audio(sample.audio)[round(BEGIN_S * RATE) :][: round(PIECE_S * RATE)], sample.text.split()[1])
        for sample in samples
    ]
    pairs = list(itertools.product(pieces, pieces))
    random.Random(0).shuffle(pairs)
    lines = ["\t".join(COLUMNS)]
    for number, ((one, first), (other, second)) in enumerate(pairs[:clips]):
        path = folder / "clips" / f"common_voice_en_{number:08d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.concatenate([one, other]), RATE, subtype="ULAW")
        cells = [f"{number % 997:064x}", path.name, f"{number:064x}", f"{first} {second}", "2", "0", "en", ""]
        lines.append("\t".join(cells))
    (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(command: list[str]) -> tuple[float, float, int]:
    """Return seconds, seconds of the CPU, and the most bytes that one process of the command held."""
    began, before = time.perf_counter(), psutil.Process().cpu_times()
    process = subprocess.Popen([sys.executable, str(PROJECT / "cli_typer.py"), *command], stdout=subprocess.DEVNULL)
    peak = Peak(process.pid)
    with watching(peak.look, 0.1):
        status = process.wait()
    if status not in (0, FOUND):
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    after = psutil.Process().cpu_times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, cpu_s, peak.bytes


if __name__ == "__main__":
    sys.exit(main())
