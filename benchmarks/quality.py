"""What a trained model is worth outside its test clips: on other speech, in long recordings, in silence.

    python benchmarks/quality.py MODEL DATA [--language fr] [--keeps DATA] [--method lora] [--seeds 3]
                                 [--also "NAME KEY=VALUE ..."] [--recipe N] [--brief] [--minutes N]
                                 [--learning-rate X] [--quick] [--more N] [--out DIR]

MODEL is a folder in transformers layout, DATA one with train.csv, validation.csv and test.csv; --keeps is another such
folder. Rows: the untouched model, the defaults, the clips alone (no timestamps, nothing of --keeps), each --also, and
the usual recipe (seq2seq_recipe.py) for N seeds. Columns: WER of greedy decoding on the unseen clips of DATA and of
--keeps; of the words that training's texts hold at most twice, how many are written; on recordings of a minute or two
that are made of the unseen clips of DATA, by `multimac transcribe --words`: WER, how far a segment's time is from where
its first word's clip says, the same of the time of each clip's first word, which the alignment heads say, and how many
words are written of 30 s without speech. With --brief, no recordings, and not the clips alone. With --minutes, so much
speech of DATA is trained, by chance. What is done is kept in DIR, so an interrupted benchmark goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from benchmarks.base import PROJECT, Done, a_way, finetuned, parser_of, profile_of, publish, table  # noqa: E402
from benchmarks.plain_wer import Clips, against, plain, unseen, wer  # noqa: E402

SETTINGS = {
    "full": {"epochs": 3, "batch_size": 8, "learning_rate": 1e-4},
    "lora": {"epochs": 5, "batch_size": 8, "learning_rate": 1e-3},
}
UNTOUCHED, DEFAULTS, RECIPE = "untouched", "defaults", "recipe"
CLIPS_ALONE = {"timestamps_share": "0", "also_train": ""}
RARE, LETTERS = 2, 4  # a rare word: in so many texts of training at most, so many letters at least
RATE, RECORDING_S, LONGEST_S = 16_000, 90.0, 30.0
PAUSES_S = (0.3, 1.0)
NOISE = 1e-4  # of the pauses: a quiet room. Digital silence is nowhere in a recording
QUICK_STEPS, QUICK_CLIPS = 4, 4
HEAD = (
    "model",
    "WER",
    "against defaults",
    "of recordings",
    "against defaults",
    "elsewhere",
    "rare words, %",
    "s off, median and 9 of 10",
    "words: s off",
)


@dataclass(frozen=True)
class Said:
    """Words of a clip in a recording, from `start` to `end` in seconds."""

    start: float
    end: float
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model: trained so, or untouched."""

    method: str
    way: str
    seed: int
    settings: str
    max_steps: int

    def __str__(self) -> str:
        return f"{self.method}, {self.way}, seed {self.seed}" if self.method else self.way


def recordings(data: Path, folder: Path) -> Iterator[tuple[Path, list[Said]]]:
    """Join the unseen clips of a data folder, in an order by chance, into recordings with pauses between them."""
    rows = [(manifest.parent / row["audio_path"], row) for manifest in unseen(data) for row in rows_of(manifest)]
    chance = random.Random(0)
    chance.shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    pieces: list[np.ndarray] = []
    said: list[Said] = []
    number = 0

    def whole() -> tuple[Path, list[Said]]:
        path = folder / f"{number}.wav"
        soundfile.write(path, np.concatenate(pieces), RATE)
        return path, said

    for audio, row in rows:
        waveform, _ = soundfile.read(audio, dtype="float32")
        if len(waveform) > LONGEST_S * RATE:
            continue
        at = sum(map(len, pieces)) / RATE
        loud = np.flatnonzero(np.abs(waveform) > 0.02 * np.abs(waveform).max())
        said.append(Said(at + loud[0] / RATE, at + loud[-1] / RATE, tuple(plain(row["transcription"]).split())))
        pause = NOISE * noise.standard_normal(round(chance.uniform(*PAUSES_S) * RATE))
        pieces += [waveform, pause.astype(np.float32)]
        if sum(map(len, pieces)) > RECORDING_S * RATE:
            yield whole()
            pieces, said, number = [], [], number + 1
    if pieces:
        yield whole()


def part_of(data: Path, minutes: float, folder: Path) -> Path:
    """Write lists of a data folder's clips whose training lasts so long; returns their folder."""
    folder = folder / f"{data.name}-{minutes:g}min"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        rows, seconds = rows_of(data / f"{split}.csv"), 0.0
        random.Random(0).shuffle(rows)
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            for row in rows:
                if split != "train" or (seconds := seconds + float(row["duration_s"])) <= 60 * minutes:
                    writer.writerow(row | {"audio_path": str(data / row["audio_path"])})
    return folder


def rows_of(manifest: Path) -> list[dict]:
    return list(csv.DictReader(manifest.read_text(encoding="utf-8").splitlines()))


def rare_words(data: Path, texts: Iterable[str]) -> list[str]:
    """List the words of unseen texts that the texts of a folder's train.csv hold at most twice."""
    trained = Counter(word for row in rows_of(data / "train.csv") for word in set(plain(row["transcription"]).split()))
    words = {word for text in texts for word in text.split() if len(word) >= LETTERS}
    return sorted(word for word in words if trained[word] <= RARE)


def without_speech(folder: Path) -> list[Path]:
    """Write recordings of 30 s in which nobody speaks: noises of several colours and levels, hum, tones."""
    chance = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = np.arange(int(LONGEST_S * RATE)) / RATE
    made = []
    for level in (0.0, 0.001, 0.01, 0.1):
        for colour in (0.0, 1.0, 2.0):
            spectrum = np.fft.rfft(chance.standard_normal(len(seconds)))
            spectrum[1:] /= np.arange(1, len(spectrum)) ** (colour / 2)
            noise = np.fft.irfft(spectrum, len(seconds))
            made.append(level * noise / np.abs(noise).max())
    for pitch in (50.0, 110.0, 440.0, 1000.0):
        notes = 2.0 ** (np.round(seconds * 2) % 12 / 12) if pitch > 100 else 1.0
        made.append(0.1 * np.sin(2 * np.pi * np.cumsum(pitch * notes * np.ones_like(seconds)) / RATE))
    for number, waveform in enumerate(made):
        soundfile.write(folder / f"{number}.wav", waveform.astype(np.float32), RATE)
    return [folder / f"{number}.wav" for number in range(len(made))]


def aligned(
    said: Sequence[Said], heard: Sequence[tuple[float, str]], *, firsts: bool = False
) -> tuple[list[list[int]], list[float]]:
    """Compare a recording's words: [errors, words] of each clip, and the error of each segment's time in seconds.

    heard: (start, text) of segments. What is inserted between two clips counts for the second. A segment's
    time is that of its first word: a clip's words are taken to be spread evenly over it. firsts: only of first words.
    """
    import jiwer

    reference = [(clip, place) for clip, each in enumerate(said) for place in range(len(each.words))]
    starts: dict[int, float] = {}
    words: list[str] = []
    for start, text in heard:
        starts[len(words)] = start
        words += plain(text).split()
    counts = [[0, len(each.words)] for each in said]
    off: list[float] = []
    made = jiwer.process_words(" ".join(w for each in said for w in each.words), " ".join(words) or "-")
    for chunk in made.alignments[0]:
        size = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
        for step in range(size):
            place = min(chunk.ref_start_idx + step, len(reference) - 1)
            clip, number = reference[place]
            if chunk.type != "equal":
                counts[clip][0] += 1
            elif (time := starts.get(chunk.hyp_start_idx + step)) is not None and not (firsts and number):
                each = said[clip]
                off.append(abs(time - each.start - (each.end - each.start) * number / len(each.words)))
    return counts, off


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.model, self.data, self.args = args.model.resolve(), args.data.resolve(), args
        if args.minutes:
            self.data = part_of(self.data, args.minutes, args.out.resolve())
        kept = {"keeps": "keeps"} if args.keeps else {}
        self.ways = {DEFAULTS: kept, **({} if args.brief else {"clips alone": CLIPS_ALONE})}
        self.ways |= {name: kept | settings for name, settings in args.also}
        steps, settings = QUICK_STEPS if args.quick else 0, SETTINGS[args.method]
        if args.learning_rate:
            settings = settings | {"learning_rate": args.learning_rate}
        self.settings = settings
        self.untouched = Task(method="", way=UNTOUCHED, seed=0, settings="", max_steps=0)
        self.tasks = [self.untouched] + [
            Task(
                method=args.method,
                way=way,
                seed=seed,
                settings=json.dumps(settings | more),
                max_steps=steps,
            )
            for seed in range(args.seeds)
            for way, more in self.ways.items()
        ]
        self.tasks += [
            Task(
                method=args.method,
                way=RECIPE,
                seed=seed,
                settings=json.dumps(settings),
                max_steps=steps,
            )
            for seed in range(args.recipe)
        ]
        self.done = Done(args.out / f"{self.model.name}-{self.data.name}{'-quick' * args.quick}")
        self.folder = self.done.path.parent.resolve()

    def work(self, task: Task) -> dict:
        if task.way == UNTOUCHED:
            return self._measured(self.model)
        folder = self.folder / f"{task.method}-{task.way}-{task.seed}".replace(" ", "-")
        if task.way == RECIPE:
            self._train_recipe(task, folder)
            return self._measured_and_removed(folder, folder)
        settings = {"method": task.method, "seed": task.seed, "max_steps": task.max_steps} | json.loads(task.settings)
        settings |= {"language": self.args.language, "checkpoint_interval": 10_000}
        profile = profile_of(self.model, self.data, **settings)
        sections = {"profile:base": profile}
        if self.args.keeps:
            kept = self.args.keeps.resolve()
            sections["dataset:keeps"] = {"train": kept / "train.csv", "test": kept / "test.csv"}
        run = finetuned(folder, sections, "base")
        return self._measured_and_removed(run / "final", folder)

    def _train_recipe(self, task: Task, folder: Path) -> None:
        """Train by the usual recipe, which knows nothing of what is kept."""
        script = PROJECT / "benchmarks" / "seq2seq_recipe.py"
        options = [str(word) for key, value in json.loads(task.settings).items() for word in (f"--{key}", value)]
        options = [word.replace("_", "-") if word.startswith("--") else word for word in options]
        if task.max_steps:
            options += ["--max-steps", str(task.max_steps)]
        command = [sys.executable, str(script), str(self.model), str(self.data / "train.csv"), str(folder)]
        subprocess.run([*command, "--method", task.method, "--seed", str(task.seed), *options], check=True)

    def _measured_and_removed(self, model: Path, folder: Path) -> dict:
        found = self._measured(model)
        shutil.rmtree(folder)
        return found

    def _measured(self, model: Path) -> dict:
        from whisper_tuner.export.final import load_model

        whisper, processor = load_model(model)
        clips, rare = self._clips(whisper, processor, self.data)
        elsewhere = self._clips(whisper, processor, self.args.keeps)[0] if self.args.keeps else []
        counts, off, words_off, invented = ([], [], [], 0) if self.args.brief else self._heard(whisper, processor)
        told = f"WER {wer(clips):.1f}"
        told += f", of recordings {wer(counts):.1f}, {invented} words of no speech" if counts else ""
        if elsewhere:
            told += f", elsewhere {wer(elsewhere):.1f}"
        told += f", {statistics.median(off or [0.0]):.2f} s off"
        return {
            **{"clips": clips, "elsewhere": elsewhere, "recordings": counts, "off": off},
            **{"words_off": words_off, "rare": rare, "invented": invented, "told": told},
        }

    def _clips(self, whisper, processor, data: Path) -> tuple[Clips, list[int]]:
        """Decode the unseen clips of a folder greedily; a text that repeats itself counts as one twice as long.

        Also returns [written, said] of its rare words.
        """
        from whisper_tuner.data.check import check_manifest
        from whisper_tuner.eval.evaluation import GREEDY, evaluate
        from whisper_tuner.eval.terms import count_terms

        most = QUICK_CLIPS if self.args.quick else None
        store = self.folder / "store"
        read = [check_manifest(path, LONGEST_S, store, kind="test").samples[:most] for path in unseen(data)]
        language = None if data == self.args.keeps else self.args.language
        found = evaluate(whisper, processor, sum(read, ()), language=language or None, temperatures=GREEDY)
        counts = [(row.rates.errors, row.rates.words) for row in found.rows]
        texts = [(plain(row.sample.text), plain(row.hypothesis)) for row in found.rows]
        rare, _ = count_terms(rare_words(data, (said for said, _ in texts)), str, texts)
        clips = [[min(errors, 2 * words + 10), words] for errors, words in counts]
        return clips, [sum(word.found for word in rare), sum(word.said for word in rare)]

    def _heard(self, whisper, processor) -> tuple[list[list[int]], list[float], list[float], int]:
        from whisper_tuner.eval.transcription import transcribe_recording

        counts: list[list[int]] = []
        off: list[float] = []
        words_off: list[float] = []
        tells_words = bool(getattr(whisper.generation_config, "alignment_heads", None))
        most = 1 if self.args.quick else None
        for path, said in list(recordings(self.data, self.folder / "recordings"))[:most]:
            language = self.args.language or None
            found = transcribe_recording(whisper, processor, path, language=language, words=tells_words)
            own, late = aligned(said, [(each.start, each.text) for each in found.segments])
            counts, off = counts + own, off + late
            words = [(word.start, word.text) for each in found.segments for word in each.words]
            words_off += aligned(said, words, firsts=True)[1]
        silent = without_speech(self.folder / "silence")[:most]
        heard = [transcribe_recording(whisper, processor, path, language=self.args.language or None) for path in silent]
        return counts, off, words_off, sum(len(plain(each.text).split()) for each in heard)

    def report(self) -> list[str]:
        rows, misses = [], []
        of_defaults = self._results(DEFAULTS)
        for way in (UNTOUCHED, *self.ways, RECIPE):
            if not (runs := self._results(way)):
                continue
            cells = [way]
            for part in ("clips", "recordings"):
                difference = ""
                pairs = min(len(runs), len(of_defaults))
                if way not in (UNTOUCHED, DEFAULTS) and pairs and runs[0][part]:
                    those = [run[part] for run in of_defaults[:pairs]]
                    difference, is_worse = against([run[part] for run in runs[:pairs]], those)
                    misses += [f"{way}: {difference} points of WER of {part} above the defaults"] * is_worse
                cells += [", ".join(f"{wer(run[part]):.1f}" for run in runs if run[part]), difference]
            cells += [", ".join(f"{wer(run['elsewhere']):.1f}" for run in runs if run["elsewhere"])]
            cells += [", ".join(f"{100 * run['rare'][0] / max(1, run['rare'][1]):.0f}" for run in runs)]
            cells += [_spread([each for run in runs for each in run[part]]) for part in ("off", "words_off")]
            rows.append([*cells, ", ".join(str(run["invented"]) for run in runs if run["recordings"])])
        shown = {name: {key: Path(value).name for key, value in way.items()} for name, way in self.ways.items()}
        ways = "".join(f" {name}: {settings}." for name, settings in shown.items() if settings)
        return [
            f"{self.model.name} on {self.data.name}, {self.args.method}, {self.settings}.{ways} WER of "
            f"each seed, of words without case and signs. Recordings: {RECORDING_S:.0f} s, of the unseen clips.",
            "",
            *table((*HEAD, "words of no speech"), rows),
            *self.done.listed(self.tasks, misses),
        ]

    def _results(self, way: str) -> list[dict]:
        return [result for task, result in self.done.found(self.tasks) if task.way == way]


def _spread(off: list[float]) -> str:
    off = sorted(off)
    return f"{statistics.median(off):.2f}, {off[int(0.9 * len(off))]:.2f}" if off else ""


def main() -> int:
    parser = parser_of(__doc__, "quality", f"{QUICK_STEPS} steps")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--language", default="")
    parser.add_argument("--keeps", type=Path)
    parser.add_argument("--method", choices=("full", "lora"), default="lora")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", type=int, default=0, metavar="N", help="seeds for which the usual recipe is run")
    parser.add_argument("--brief", action="store_true", help="no recordings")
    parser.add_argument("--learning-rate", type=float, default=0.0, help="where the model is not of tiny's size")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="N", help="minutes of speech to train on")
    parser.add_argument("--also", type=a_way, action="append", default=[], metavar="'NAME KEY=VALUE ...'")
    args = parser.parse_args()
    bench = Bench(args)
    bench.done.run(bench.tasks, bench.work, args.more)
    name = f"quality: {bench.model.name} on {bench.data.name}, {args.method}{', clips' * args.brief}"
    write = not (args.quick or bench.done.left(bench.tasks))
    publish(name, bench.report(), bench.done.commits(bench.tasks), write=write)
    return int(bool(bench.done.failed))


if __name__ == "__main__":
    sys.exit(main())
