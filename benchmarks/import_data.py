"""How long a large data set takes to come in: 100,000 clips imported, imported again, and checked as before a run.

    python benchmarks/import_data.py [--quick]

The clips are links to the bundled ones, listed as a Common Voice release, and parts of long recordings with subtitles.
Each step runs in a process of its own, whose peak memory is read at its end.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "gym")]

from results import listed, table, write_section  # noqa: E402

PROJECT = Path(__file__).resolve().parents[1]
CLIPS, QUICK_CLIPS = 100_000, 5_000
RECORDINGS, QUICK_RECORDINGS = 20, 2
CUES = 400  # of each recording
HEADER = ("client_id", "path", "sentence_id", "sentence", "up_votes", "down_votes", "locale", "segment")
MINUTES = 10.0  # what is meant by "in minutes"
MEMORY_MB = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of it, without RESULTS.md")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step(options.step, options.folder)
        return 0
    clips = QUICK_CLIPS if options.quick else CLIPS
    with tempfile.TemporaryDirectory(prefix="multimac-import-") as folder:
        make_release(Path(folder) / "cv", clips)
        make_talks(Path(folder) / "talks", QUICK_RECORDINGS if options.quick else RECORDINGS)
        rows = [measured(name, Path(folder)) for name in STEPS]
    head = ["step", "clips", "seconds", "clips a second", "peak memory, MB"]
    lines = table(
        head, [[r["what"], r["clips"], f"{r['s']:.1f}", f"{r['clips'] / r['s']:.0f}", f"{r['mb']:.0f}"] for r in rows]
    )
    print("\n".join(lines))
    misses = [f"{r['what']}: {r['s'] / 60:.1f} min" for r in rows if r["s"] > 60 * MINUTES]
    misses += [f"{r['what']}: {r['mb']:.0f} MB" for r in rows if r["mb"] > MEMORY_MB]
    if not options.quick:
        write_section("import_data", [*BODY, "", *lines, *listed(misses)])
    return 1 if misses else 0


BODY = [
    "What `multimac data import` does with a Common Voice release of links to the bundled clips; the same again, with",
    "the headers of audio known; what a run then does before its first step (`check_manifest`: here it compares the",
    "content of all clips, for many are equal); and recordings of 400 cues each, cut at their subtitles.",
]
STEPS = {"import a tenth": ("cv-small", "small"), "import": ("cv", "whole"), "import again": ("cv", "whole")}
STEPS |= {"check": ("cv", "whole"), "subtitles": ("talks", "cut")}


def bundled() -> list[tuple[Path, str]]:
    with (PROJECT / "bundled/data/train.csv").open(encoding="utf-8") as file:
        return [(PROJECT / "bundled/data" / row["audio_path"], row["transcription"]) for row in csv.DictReader(file)]


def make_release(folder: Path, clips: int) -> None:
    """A release of `clips` rows, and beside it one with a tenth of them."""
    sources = bundled()
    (folder / "clips").mkdir(parents=True)
    lines = ["\t".join(HEADER)]
    for number in range(clips):
        audio, text = sources[number % len(sources)]
        name = f"common_voice_en_{number:08d}{audio.suffix}"
        (folder / "clips" / name).symlink_to(audio)
        lines.append("\t".join([f"{number % 997:064x}", name, f"{number:064x}", text, "2", "0", "en", ""]))
    (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    small = folder.with_name("cv-small")
    small.mkdir()
    (small / "clips").symlink_to(folder / "clips")
    (small / "train.tsv").write_text("\n".join(lines[: clips // 10 + 1]) + "\n", encoding="utf-8")


def make_talks(folder: Path, recordings: int) -> None:
    import numpy as np
    import soundfile

    folder.mkdir()
    sources = bundled()
    parts, cues, at = [], [], 0.0
    for number in range(CUES):
        audio, text = sources[number % len(sources)]
        samples, rate = soundfile.read(audio, dtype="float32")
        end = at + len(samples) / rate
        cues.append(f"{number + 1}\n{_stamp(at)} --> {_stamp(end)}\n{text}\n")
        parts += [samples, np.zeros(rate // 5 if number % 3 else 2 * rate, dtype=np.float32)]
        at = end + len(parts[-1]) / rate
    whole = np.concatenate(parts)
    for number in range(recordings):
        soundfile.write(folder / f"talk{number}.flac", whole, rate)
        (folder / f"talk{number}.srt").write_text("\n".join(cues), encoding="utf-8")


def _stamp(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{int(seconds % 1 * 1000):03}"


def measured(what: str, folder: Path) -> dict:
    """What a step took, in a process of its own."""
    command = [sys.executable, __file__, "--step", what, "--folder", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1]) | {"what": what}


def step(what: str, folder: Path) -> None:
    from whisper_tuner.data.audio_check import AudioIndex
    from whisper_tuner.data.check import check_manifest
    from whisper_tuner.data.importing import import_source

    source, out = STEPS[what]
    began = time.monotonic()
    if what == "check":
        manifest = check_manifest(folder / out / "train.csv", 30.0, folder / "store")
        clips = len(manifest.samples) + len(manifest.problems)  # links to one clip are copies, and left out
    else:
        headers = folder / f"headers-{out}.json"
        found = import_source(folder / source, folder / out, index_of=lambda manifest: AudioIndex(headers))
        clips = sum(len(one.samples) for one in found)
    print(json.dumps({"clips": clips, "s": time.monotonic() - began, "mb": peak_mb()}))


def peak_mb() -> float:
    """Of this process; what getrusage has on Linux begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


if __name__ == "__main__":
    sys.exit(main())
