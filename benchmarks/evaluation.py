"""How much faster is `evaluate` than plain transformers clip by clip, and is the WER the same?

    python benchmarks/evaluation.py MODEL TEST.csv [--base BASE] [--quick] [--language CODE] [--batch-size 16]

Both read the same files and pad them to 30 s; imports and the loading of the model are not counted. With `--base` the
model before training is compared too: `evaluate` has transcribed it in an earlier evaluation, and keeps what it wrote.
They take turns, three times each, and the median counts. What is done is kept in DIR (`--out`), so an interrupted
benchmark goes on where it stopped. --quick: six clips, once; nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import soundfile
import torch

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from exogym import device as devices  # noqa: E402
from whisper_tuner.data.audio import SAMPLE_RATE  # noqa: E402
from whisper_tuner.data.dataset import Sample, load_manifest  # noqa: E402
from whisper_tuner.eval.evaluation import GREEDY, Evaluation, Transcript, compared, evaluate, generation_settings  # noqa: E402
from whisper_tuner.eval.text_cache import Decoding, TextCache  # noqa: E402
from whisper_tuner.export.final import load_model  # noqa: E402
from whisper_tuner.fact_store import FactStore  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-evaluation"
REPEATS, WANTED = 3, 3.0  # times as fast
WAYS = ("plain transformers, clip by clip", "evaluate")
QUICK_CLIPS = 6
LONGEST_S = 30.0  # plain transformers cuts a longer clip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One pass over the test set; `load` is the machine's, from the minute before."""

    way: str
    seconds: float
    wer: float
    loops: int
    texts: list[str]
    load: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("test", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--language")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.base == options.model:
        parser.error("--base: that is the model itself")
    samples = load_manifest(options.test, max_duration_s=LONGEST_S).samples[: QUICK_CLIPS if options.quick else None]
    models = [f"{Path(one).parent.name}-{Path(one).name}" for one in (options.model, options.base) if one]
    about = [*models, options.test.stem, current_commit(), str(options.batch_size)]
    kept = options.out / f"{'-'.join(about)}.json"
    done = [] if options.quick or not kept.exists() else [Measured(**one) for one in json.loads(kept.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        passes = ways(options.model, options.base, samples, options.language, options.batch_size, Path(folder))
        repeat_all(passes, done, kept, options)
    lines = summary(done, len(samples), sum(sample.duration_s for sample in samples), options.batch_size, options.base)
    print("\n".join(lines))
    if not options.quick:
        names = " and ".join(Path(one).name for one in (options.base, options.model) if one)
        write_section(f"evaluation: {names} on {options.test.parent.name}/{options.test.name}", lines)
    return 0


def repeat_all(passes: dict[str, Callable], done: list[Measured], kept: Path, options: argparse.Namespace) -> None:
    for repeat in range(1 if options.quick else REPEATS):
        for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
            if sum(one.way == way for one in done) <= repeat:
                done.append(measured(way, passes[way]))
                print(f"{way}: {done[-1].seconds:.1f} s, WER {done[-1].wer:.2f}", file=sys.stderr)
                if not options.quick:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps([asdict(one) for one in done]), encoding="utf-8")


def ways(
    name: str, base: str | None, samples: Sequence[Sample], language: str | None, batch_size: int, folder: Path
) -> dict[str, Callable[[], Evaluation]]:
    """Each gives the result of `name`, and the seconds of all that it did."""
    models = {one: load_model(one) for one in filter(None, (base, name))}
    for model, _ in models.values():
        model.to(devices.choose()).eval()
    texts = TextCache(FactStore(folder))
    decoding = Decoding(device=devices.choose().type, language=language, task=None)

    def plain_one(name: str) -> Evaluation:
        model, processor = models[name]
        arguments, written = generation_settings(model, language, None)
        arguments |= {"max_new_tokens": model.config.max_target_positions // 2}
        began, heard = time.perf_counter(), []
        for sample in samples:
            audio, rate = soundfile.read(sample.audio)
            if rate != SAMPLE_RATE or audio.ndim > 1:
                raise SystemExit(f"{sample.audio}: not mono at {SAMPLE_RATE} Hz, which plain transformers needs")
            features = processor(audio, sampling_rate=rate, return_tensors="pt").input_features.to(model.device)
            heard += processor.batch_decode(model.generate(features, **arguments), skip_special_tokens=True)
        seconds = time.perf_counter() - began
        return compared(samples, [Transcript(text.strip()) for text in heard], written, seconds)

    def own(name: str, samples: Sequence[Sample] = samples) -> Evaluation:
        return evaluate(*models[name], samples, language=language, temperatures=GREEDY, batch_size=batch_size)

    def plain() -> Evaluation:
        results = [plain_one(one) for one in models]
        return replace(results[-1], seconds=sum(result.seconds for result in results))

    def ours() -> Evaluation:
        began = time.perf_counter()
        if base and texts.read(texts.key(base, samples, decoding), samples) is None:
            raise SystemExit(f"{base}: what it wrote was not kept")
        result = own(name)
        return replace(result, seconds=time.perf_counter() - began)

    if base:
        texts.write(texts.key(base, samples, decoding), own(base))
    own(name, samples[:1])  # to warm up
    return dict(zip(WAYS, (plain, ours), strict=True))


def measured(way: str, run: Callable[[], Evaluation]) -> Measured:
    result = run()
    return Measured(
        way=way,
        seconds=round(result.seconds, 2),
        wer=round(100 * result.normalized.wer, 2),
        loops=result.loops,
        texts=[row.hypothesis for row in result.rows],
        load=round(os.getloadavg()[0], 1),
    )


def summary(done: Sequence[Measured], clips: int, seconds: float, batch_size: int, base: str | None) -> list[str]:
    by_way = {way: [one for one in done if one.way == way] for way in WAYS}
    medians = {way: statistics.median(one.seconds for one in passes) for way, passes in by_way.items()}
    rows = [
        (
            way,
            ", ".join(f"{one.seconds:.1f}" for one in passes),
            f"{medians[way]:.1f}",
            passes[0].wer,
            passes[0].loops,
            ", ".join(f"{one.load:.1f}" for one in passes),
        )
        for way, passes in by_way.items()
    ]
    plain, ours = (by_way[way][0] for way in WAYS)
    ratio = medians[WAYS[0]] / medians[WAYS[1]]
    differ = sum(one != other for one, other in zip(plain.texts, ours.texts, strict=True))
    misses = [f"{ratio:.2f} times as fast, not {WANTED:g}"] if ratio < WANTED else []
    misses += [f"WER {ours.wer} instead of {plain.wer}"] if ours.wer != plain.wer else []
    too = "The base model as well, of which `evaluate` keeps what it wrote. " if base else ""
    return [
        f"{clips} clips, {seconds:.0f} s of audio, on {devices.choose().type} with {torch.get_num_threads()} threads; "
        f"`evaluate` in batches of {batch_size}. {too}"
        f"{ratio:.2f} times as fast; {differ} texts differ.",
        "",
        *table(("way", "s", "median", "WER", "loops", "load of the machine"), rows),
        *listed(misses),
    ]


if __name__ == "__main__":
    sys.exit(main())
