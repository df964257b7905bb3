"""Speak the bundled data set: English read out by a voice that the bundled checkpoint has never heard.

    python -m bundled.make_data bundled/data

Needs espeak-ng; the same version of it gives the same speech again.
"""

import argparse
import csv
import random
from pathlib import Path

import soundfile

from bundled.sentences import sentences
from bundled.speech import SAMPLE_RATE, Speaker, espeak_version, speak

VOICE = "hu"
SPLITS = {"train": 240, "validation": 30, "test": 60}
SEED = 2024


def dataset_sentences() -> dict[str, list[str]]:
    """The sentences of each split; no sentence is in two of them."""
    texts = iter(sentences(sum(SPLITS.values()), SEED))
    return {split: [next(texts) for _ in range(count)] for split, count in SPLITS.items()}


def make_split(folder: Path, split: str, texts: list[str]) -> float:
    """Write the clips and the manifest of one split; returns its seconds of speech."""
    rng = random.Random(f"{SEED} {split}")
    (folder / split).mkdir(parents=True, exist_ok=True)
    rows = []
    for number, text in enumerate(texts):
        audio = speak(text, Speaker(voice=VOICE, words_per_minute=rng.randint(150, 190), pitch=rng.randint(35, 65)))
        path = f"{split}/{number:03d}.ogg"
        soundfile.write(folder / path, audio, SAMPLE_RATE, format="OGG", subtype="VORBIS", compression_level=1.0)
        rows.append([f"{split}-{number:03d}", path, text, f"{len(audio) / SAMPLE_RATE:.3f}"])
    with (folder / f"{split}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["id", "audio_path", "transcription", "duration_s"], *rows])
    return sum(float(row[-1]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    folder = parser.parse_args().out
    print(espeak_version())
    for split, texts in dataset_sentences().items():
        print(f"{split}: {len(texts)} clips, {make_split(folder, split, texts) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
