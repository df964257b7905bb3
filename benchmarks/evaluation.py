"""How much faster is `evaluate` than plain transformers clip by clip, and is the WER the same?

    python benchmarks/evaluation.py MODEL TEST.csv [--base BASE] [--quick] [--language CODE] [--batch-size 16]

Both read the same files and pad them to 30 s; imports and the loading of the model are not counted. With `--base` the
model before training is compared too: `evaluate` has transcribed it in an earlier evaluation, and keeps what it wrote.
They take turns, three times each, and the median counts. What is done is kept in DIR (`--out`), so an interrupted
benchmark goes on where it stopped.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import soundfile
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from benchmarks.base import Done, current_commit, parser_of, publish, table  # noqa: E402
from exogym import device as devices  # noqa: E402
from whisper_tuner.data.audio import SAMPLE_RATE  # noqa: E402
from whisper_tuner.data.dataset import Sample, load_manifest  # noqa: E402
from whisper_tuner.eval.evaluation import GREEDY, Evaluation, Transcript, compared, evaluate, generation_settings  # noqa: E402
from whisper_tuner.eval.text_cache import Decoding, TextCache  # noqa: E402
from whisper_tuner.export.final import load_model  # noqa: E402
from whisper_tuner.fact_store import FactStore  # noqa: E402

REPEATS, WANTED = 3, 3.0  # times as fast
WAYS = ("plain transformers, clip by clip", "evaluate")
QUICK_CLIPS = 6
LONGEST_S = 30.0  # plain transformers cuts a longer clip


def main() -> int:
    parser = parser_of(__doc__, "evaluation", "six clips, once")
    parser.add_argument("model")
    parser.add_argument("test", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--language")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    if args.base == args.model:
        parser.error("--base: that is the model itself")
    samples = load_manifest(args.test, max_duration_s=LONGEST_S).samples[: QUICK_CLIPS if args.quick else None]
    repeats = 1 if args.quick else REPEATS
    turns = {f"{way}, {n + 1}": way for n in range(repeats) for way in (WAYS if n % 2 == 0 else reversed(WAYS))}
    models = [f"{Path(one).parent.name}-{Path(one).name}" for one in (args.model, args.base) if one]
    name = "-".join([*models, args.test.stem, current_commit(), str(args.batch_size)])
    with tempfile.TemporaryDirectory() as folder:
        done = Done(Path(folder) if args.quick else args.out / name)
        passes = ways(args.model, args.base, samples, args.language, args.batch_size, Path(folder))
        done.run(list(turns), lambda turn: measured(passes[turns[turn]]), args.more)
    if done.left(turns):
        return 1
    seconds, names = sum(sample.duration_s for sample in samples), filter(None, (args.base, args.model))
    lines = summary(done, turns, len(samples), seconds, args.batch_size, args.base)
    section = f"evaluation: {' and '.join(Path(one).name for one in names)} on {args.test.parent.name}/{args.test.name}"
    publish(section, lines, done.commits(turns), write=not args.quick)
    return 0


def ways(
    name: str, base: str | None, samples: Sequence[Sample], language: str | None, batch_size: int, folder: Path
) -> dict[str, Callable[[], Evaluation]]:
    """Make the two ways: each gives the result of `name`, and the seconds of all that it did."""
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


def measured(run: Callable[[], Evaluation]) -> dict:
    """Make one pass; `load` is the machine's, from the minute before."""
    result = run()
    wer = round(100 * result.normalized.wer, 2)
    return {
        "seconds": round(result.seconds, 2),
        "wer": wer,
        "loops": result.loops,
        "texts": [row.hypothesis for row in result.rows],
        "load": round(os.getloadavg()[0], 1),
        "told": f"{result.seconds:.1f} s, WER {wer:.2f}",
    }


def summary(
    done: Done, turns: dict[str, str], clips: int, seconds: float, batch_size: int, base: str | None
) -> list[str]:
    by_way = {way: [one for turn, one in done.found(turns) if turns[turn] == way] for way in WAYS}
    medians = {way: statistics.median(one["seconds"] for one in passes) for way, passes in by_way.items()}
    rows = [
        [
            way,
            ", ".join(f"{one['seconds']:.1f}" for one in passes),
            f"{medians[way]:.1f}",
            passes[0]["wer"],
            passes[0]["loops"],
            ", ".join(f"{one['load']:.1f}" for one in passes),
        ]
        for way, passes in by_way.items()
    ]
    plain, ours = (by_way[way][0] for way in WAYS)
    ratio = medians[WAYS[0]] / medians[WAYS[1]]
    differ = sum(one != other for one, other in zip(plain["texts"], ours["texts"], strict=True))
    misses = [f"{ratio:.2f} times as fast, not {WANTED:g}"] if ratio < WANTED else []
    misses += [f"WER {ours['wer']} instead of {plain['wer']}"] if ours["wer"] != plain["wer"] else []
    too = "The base model as well, of which `evaluate` keeps what it wrote. " if base else ""
    return [
        f"{clips} clips, {seconds:.0f} s of audio, on {devices.choose().type} with {torch.get_num_threads()} threads; "
        f"`evaluate` in batches of {batch_size}. {too}"
        f"{ratio:.2f} times as fast; {differ} texts differ.",
        "",
        *table(("way", "s", "median", "WER", "loops", "load of the machine"), rows),
        *done.listed(turns, misses),
    ]


if __name__ == "__main__":
    sys.exit(main())
