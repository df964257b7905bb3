"""WER of models on the validation and test clips together, and whether one is worse than another."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parent.parent
Clips = list[list[int]]  # [errors, words] of each
PARTS = ("validation", "test")


def transcribed(
    trained: Path, base: Path | None, data: Path, folder: Path, most: int | None = None, device: str = "cpu"
) -> Clips:
    """By plain transformers, padded to 30 s. base: of a LoRA adapter. most: clips of each part. `folder` is for lists.

    An untrained model repeats itself for long: of a run of a few steps take few.
    """
    started, env = [], os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    for part in PARTS:
        rows = list(csv.reader((data / f"{part}.csv").read_text(encoding="utf-8").splitlines()))
        audio = rows[0].index("audio_path")
        rows[1:] = [[*row[:audio], str(data / row[audio]), *row[audio + 1 :]] for row in rows[1:]]
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows if most is None else rows[: most + 1])
        command = [sys.executable, str(PROJECT / "benchmarks" / "plain_wer.py"), "--device", device, "--clips"]
        command += [str(trained)]
        command += [str(base)] if base else []
        started.append(
            subprocess.Popen([*command, str(folder / f"{part}.csv")], stdout=subprocess.PIPE, text=True, env=env)
        )
    told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{trained} could not be transcribed")
    return [clip for text in told for clip in json.loads(text.strip().splitlines()[-1])]


def wer(clips: Clips) -> float:
    """In per cent."""
    errors, words = map(sum, zip(*clips, strict=True))
    return 100 * errors / words


def difference(these: Sequence[Clips], those: Sequence[Clips]) -> tuple[float, float, float]:
    """Points of WER by which these runs' is higher, and the interval of 95 % of 10,000 paired resamplings of the clips.

    The same clips in the same order in each run; all runs count together.
    """
    counts = np.array(list(zip(these, those, strict=True)), dtype=float)  # [run, way, clip, 2]
    errors, words = counts[..., 0].sum(0), counts[..., 1].sum(0)
    drawn = np.random.default_rng(0).integers(errors.shape[1], size=(10_000, errors.shape[1]))
    rates = 100 * errors[:, drawn].sum(-1) / words[:, drawn].sum(-1)  # [way, resampling]
    low, high = np.percentile(rates[0] - rates[1], [2.5, 97.5])
    all_of_them = 100 * errors.sum(-1) / words.sum(-1)
    return all_of_them[0] - all_of_them[1], low, high
