"""Does a model get better by `multimac data check --fix`? WER after training on real and on spoiled data.

    python benchmarks/fixed_data.py [MODEL DATA] [--quick] [--seeds 3] [--more N] [--out DIR]

MODEL is a folder in transformers layout, DATA one with English train.csv, validation.csv and test.csv; without them it
is what is bundled, with the settings of config.ini's [profile:demo]. Four training sets: that of DATA; what `--fix`
makes of it; one in which every fourth row is spoiled, in a way that training does not refuse; and what `--fix` makes of
that. This machine fine-tunes on each alone. WER is that of plain transformers (plain_wer.py) on
validation and test clips together, with 95 % of paired resamplings of the clips. What is done is kept in DIR, so an
interrupted benchmark goes on where it stopped. --quick: 4 steps, few clips; leaves RESULTS.md alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import finetuned  # noqa: E402
from benchmarks.pooled_wer import PARTS, Clips, difference, transcribed, wer  # noqa: E402
from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from whisper_tuner.data.audio import load_audio  # noqa: E402
from whisper_tuner.data.dataset import Sample, load_manifest, write_manifest  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-fixed-data"
BUNDLED = (PROJECT / "bundled" / "model", PROJECT / "bundled" / "data")
BUNDLED_SETTINGS = {"epochs": 8, "batch_size": 4, "learning_rate": 1.5e-3, "language": "en", "device": "cpu"}
SETTINGS = {"epochs": 2, "batch_size": 8, "learning_rate": 3.75e-5, "language": "en", "device": "cpu"}
QUICK, QUICK_CLIPS = {"max_steps": 4}, 16
RATE = 16_000
SPOILED_EVERY = 4
REAL, REAL_FIXED, SPOILED, SPOILED_FIXED = SETS = ("real", "real, fixed", "spoiled", "spoiled, fixed")
HEAD = ("trained on", "rows", "WER of each seed", "WER", "against the same without --fix")


def silent(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    return np.zeros_like(audio), sample.text


def cut_short(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    return audio[: int(0.3 * RATE)], f"{sample.text} {other.text}"


def placeholder(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    return audio, "N/A"


def commands(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    return audio, f"<|0.00|> {sample.text}<|{round(len(audio) / RATE, 1):.2f}|>"


def markup(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    first, _, rest = sample.text.partition(" ")
    return audio, f"<i>{first}</i>&nbsp;{rest}"


def misread(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    return audio, f"\u201c{sample.text}\u201d".encode().decode("cp1252", "replace")


def again(sample: Sample, audio: np.ndarray, other: Sample) -> tuple[np.ndarray, str]:
    """The recording of one row with the text of another: both stand in the set."""
    return load_audio(other.audio), sample.text


WAYS: tuple[Callable, ...] = (silent, cut_short, placeholder, commands, markup, misread, again)


class Bench:
    def __init__(self, model: Path, data: Path, seeds: int, out: Path, *, quick: bool):
        self.model, self.data, self.quick = model.resolve(), data.resolve(), quick
        self.settings = BUNDLED_SETTINGS if (self.model, self.data) == BUNDLED else SETTINGS
        self.out = out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.tasks = [(name, seed) for seed, name in itertools.product(range(seeds), SETS)]
        self.kept = self.out / "done.jsonl"
        lines = self.kept.read_text().splitlines() if self.kept.exists() else []
        self.results = {(one["set"], one["seed"]): one for one in map(json.loads, lines)}
        self.manifests = self._manifests()

    def left(self) -> list[tuple[str, int]]:
        return [task for task in self.tasks if task not in self.results]

    def run(self, most: int) -> None:
        """No more than so many runs."""
        for name, seed in self.left()[:most]:
            began, commit = time.monotonic(), current_commit()
            clips = self._known(name, seed) or self.train(name, seed)
            took = round(time.monotonic() - began)
            one = {"set": name, "seed": seed, "clips": clips, "seconds": took, "commit": commit}
            self.results[name, seed] = one
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
            print(f"{name}, seed {seed}: WER {wer(clips):.1f}, {took} s; {len(self.left())} left", flush=True)

    def _known(self, name: str, seed: int) -> Clips | None:
        """Of the same without --fix, where that changes nothing: what is trained follows from the rows."""
        without = name.removesuffix(", fixed")
        if without == name or rows_of(self.manifests[name]) != rows_of(self.manifests[without]):
            return None
        return self.results[without, seed]["clips"] if (without, seed) in self.results else None

    def train(self, name: str, seed: int) -> Clips:
        folder = self.out / f"{name.replace(', ', '-')}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        values = {"base_model": self.model, "train": self.manifests[name], "validation": self.data / "validation.csv"}
        values |= {"seed": seed, **self.settings, **(QUICK if self.quick else {})}
        text = "\n".join(["[profile:mine]", *(f"{key} = {value}" for key, value in values.items()), ""])
        (folder / "config.ini").write_text(text, encoding="utf-8")
        print(f"{name}, seed {seed}: {folder / 'console.txt'} says how far it is", flush=True)
        if status := finetuned(folder, "mine"):
            sys.exit(f"status {status}: see {folder / 'console.txt'}")
        [final] = folder.glob("runs/*/final")
        clips = transcribed(final, None, self.data, folder, QUICK_CLIPS if self.quick else None)
        shutil.rmtree(folder)
        return clips

    def _manifests(self) -> dict[str, Path]:
        """Of the training sets; those of --fix by the command itself."""
        found = {REAL: self.out / "real.csv", SPOILED: self.out / "spoiled.csv"}
        samples = load_manifest(self.data / "train.csv").samples[: QUICK_CLIPS if self.quick else None]
        if not found[REAL].exists():
            write_manifest(found[SPOILED], spoiled(samples, self.out / "spoiled"))
            write_manifest(found[REAL], samples)
        for name in (REAL, SPOILED):
            folder = self.out / f"{found[name].stem}-fixed"
            if not (folder / "train.csv").exists():
                shutil.copy(found[name], self.out / "train.csv")
                self._fix(folder)
            found[f"{name}, fixed"] = folder / "train.csv"
        return found

    def _fix(self, folder: Path) -> None:
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "data", "check", str(self.out / "train.csv")]
        command += [str(self.data / f"{part}.csv") for part in PARTS]
        command += ["--fix", str(folder), "--language", "en", "--out", str(self.out / f"{folder.name}-report")]
        print(f"multimac data check --fix {folder.name}", flush=True)
        subprocess.run(command, check=True, cwd=PROJECT)

    def report(self) -> list[str]:
        done = {name: [one for one in self.results.values() if one["set"] == name] for name in SETS}
        clips = {name: [one["clips"] for one in found] for name, found in done.items()}
        rows, misses = [], []
        for name in filter(clips.get, SETS):
            pooled = wer([clip for run in clips[name] for clip in run])
            against = ""
            without = name.removesuffix(", fixed")
            if without != name and len(clips[without]) == len(clips[name]):
                more, low, high = difference(clips[name], clips[without])
                against = f"{more:+.1f} ({low:+.1f} to {high:+.1f})"
                if low > 0:
                    misses.append(f"{name}: worse than without --fix")
            count = len(rows_of(self.manifests[name])) - 1
            rows.append([name, count, ", ".join(f"{wer(run):.1f}" for run in clips[name]), f"{pooled:.1f}", against])
        untrained = wer(transcribed(self.model, None, self.data, self.out, QUICK_CLIPS if self.quick else None))
        told = ", ".join(f"{key} = {value}" for key, value in self.settings.items())
        ways = ", ".join(way.__name__.replace("_", " ") for way in WAYS)
        return [
            f"{self.model.name}, full fine-tuning on this machine ({told}); WER {untrained:.1f} untrained, by plain "
            f"transformers on the {len(next(iter(clips.values()))[0])} validation and test clips together. Of the "
            f"spoiled set every {SPOILED_EVERY}th row is spoiled, in turn: {ways}.",
            "",
            *table(HEAD, rows),
            *(listed(misses) or ["", "No misses."]),
        ]


def rows_of(manifest: Path) -> list[list[str]]:
    with manifest.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def spoiled(samples: Sequence[Sample], folder: Path) -> list[Sample]:
    folder.mkdir(exist_ok=True)
    found = list(samples)
    for turn, number in enumerate(range(1, len(samples), SPOILED_EVERY)):
        sample = samples[number]
        audio, text = WAYS[turn % len(WAYS)](sample, load_audio(sample.audio), samples[number - 1])
        path = folder / f"{number:04}.wav"
        soundfile.write(path, audio, RATE, subtype="PCM_16")
        found[number] = replace(sample, audio=path, text=text, duration_s=len(audio) / RATE)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED[0])
    parser.add_argument("data", type=Path, nargs="?", default=BUNDLED[1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--more", type=int, metavar="N", help="do no more than N runs now")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.model, args.data, args.seeds, args.out / "quick" if args.quick else args.out, quick=args.quick)
    bench.run(len(bench.tasks) if args.more is None else args.more)
    if bench.left():
        return 0
    lines = bench.report()
    print("\n".join(lines))
    if not args.quick:
        name = f"fixed data: {bench.model.name} on {bench.data.name}"
        write_section(name, lines, [one["commit"] for one in bench.results.values()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
