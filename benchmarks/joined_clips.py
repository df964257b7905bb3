"""A data set of longer clips, made of one of short clips: neighbours of a random order joined, with their texts.

    python benchmarks/joined_clips.py OUT DATA... [--at-least 7 | --each 2]

Each DATA is a folder with train.csv, validation.csv and test.csv of mono clips at one rate; OUT gets the same, and
audio/. Clips are joined until they last `--at-least` seconds, or are `--each`; one with which that would be more than
30 s is left out. Prints the median length.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from pathlib import Path

import numpy as np
import soundfile

LONGEST_S, PAUSE_S = 29.5, 0.2
COLUMNS = ("id", "audio_path", "transcription")


def joined(rows: list[tuple[Path, str]], least_s: float, each: int | None) -> list[tuple[np.ndarray, int, str]]:
    """(audio, rate, text) of each; what is left over at the end is left out."""
    found, parts, texts, held = [], [], [], 0.0
    for path, text in rows:
        audio, rate = soundfile.read(path, dtype="float32")
        seconds = len(audio) / rate + PAUSE_S
        if held + seconds > LONGEST_S:
            continue
        parts += [audio, np.zeros(int(PAUSE_S * rate), np.float32)]
        texts.append(text)
        held += seconds
        if (len(texts) == each) if each else (held - PAUSE_S >= least_s):
            found.append((np.concatenate(parts[:-1]), rate, " ".join(texts)))
            parts, texts, held = [], [], 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--at-least", type=float, default=7.0, metavar="SECONDS")
    parser.add_argument("--each", type=int, metavar="N", help="join so many clips instead")
    args = parser.parse_args()
    (args.out / "audio").mkdir(parents=True, exist_ok=True)
    for part in ("train", "validation", "test"):
        lengths = []
        with (args.out / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for order, data in enumerate(args.data):
                rows = csv.DictReader((data / f"{part}.csv").read_text(encoding="utf-8").splitlines())
                clips = [(data / row["audio_path"], row["transcription"]) for row in rows]
                random.Random(0).shuffle(clips)
                for number, (audio, rate, text) in enumerate(joined(clips, args.at_least, args.each)):
                    name = f"{order}-{data.name}-{part}-{number}"
                    soundfile.write(args.out / "audio" / f"{name}.wav", audio, rate)
                    writer.writerow((name, f"audio/{name}.wav", text))
                    lengths.append(len(audio) / rate)
        median, longest = statistics.median(lengths), max(lengths)
        print(f"{part}: {len(lengths)} clips, median {median:.1f} s, longest {longest:.1f} s")


if __name__ == "__main__":
    main()
