"""Does every runtime write with an exported model what transformers writes with it? WER, size and speed of each.

    python benchmarks/exports.py MODEL... --data TEST.csv [--language CODE] [--quick]

MODEL is a trained model, a folder as a run's `final` or a base. Each format is exported at each of its precisions, and
decodes the clips by its own runtime, as `multimac export --verify` does. What is done is kept in DIR (`--out`), so an
interrupted benchmark goes on where it stopped. Needs the runtimes: sh tools/runtimes.sh.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from benchmarks.base import Done, current_commit, listed, parser_of, publish, table  # noqa: E402
from distributed.run_dir.folder import disk_use  # noqa: E402
from whisper_tuner.data.dataset import Sample, load_manifest  # noqa: E402
from whisper_tuner.eval.evaluation import GREEDY, evaluate  # noqa: E402
from whisper_tuner.eval.exported import LIMIT, decoded, is_off, speech_of  # noqa: E402
from whisper_tuner.eval.predictions import counts  # noqa: E402
from whisper_tuner.eval.wer import Difference, wer_difference, wer_interval  # noqa: E402
from whisper_tuner.export.final import load_model  # noqa: E402
from whisper_tuner.export.formats import WHOLE, Merged, formats  # noqa: E402
from whisper_tuner.text import size  # noqa: E402

QUICK_CLIPS = 6
LONGEST_S = 30.0
HERE = "before the export"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model in one format and precision; before it is exported, `which` is None."""

    model: str
    which: str | None
    precision: str

    def __str__(self) -> str:
        return f"{Path(self.model).parent.name}/{Path(self.model).name}: {self.which or HERE} {self.precision}"


def main() -> int:
    parser = parser_of(__doc__, "exports", "six clips, and of most formats the default precision alone")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--language")
    args = parser.parse_args()
    samples = load_manifest(args.data, max_duration_s=LONGEST_S).samples[: QUICK_CLIPS if args.quick else None]
    lines, misses = [], []
    with tempfile.TemporaryDirectory() as folder:
        done = Done(Path(folder) if args.quick else args.out / f"{current_commit()}-{args.data.stem}-{len(samples)}")
        for model in args.models:
            rows, wrong = measured(model, samples, done, args)
            head = ("runtime", "precision", "WER", "95 %", "points more", "95 %", "size", "s of audio a second")
            lines += [f"{Path(model).parent.name}/{Path(model).name}", "", *table(head, rows), ""]
            misses += wrong
    misses += [f"{task}: {why}" for task, why in done.failed.items()]
    seconds = sum(sample.duration_s for sample in samples)
    about = f"{len(samples)} clips, {seconds:.0f} s of audio, decoded greedily and without timestamps, on the CPU."
    body = [about, "", *lines[:-1], *listed(misses)]
    publish(f"exports: on {args.data.parent.name}/{args.data.name}", body, write=not args.quick and args.more is None)
    return 0


def measured(name: str, samples: Sequence[Sample], done: Done, args: argparse.Namespace) -> tuple[list, list[str]]:
    """Return a row for each export, and misses."""
    model, processor = load_model(name)
    merged = Merged(model=model.eval(), processor=processor)
    speech = speech_of(model, args.language, None)
    here = Export(model=name, which=None, precision="float32")
    exports = [
        Export(model=name, which=which.name, precision=precision)
        for which in formats().values()
        for precision in which.precisions[: 1 if args.quick and which.name != "transformers" else None]
    ]

    def work(export: Export) -> dict:
        if export.which is None:
            asked = {"language": speech.language, "task": speech.task, "temperatures": GREEDY}
            result, taken = evaluate(model, processor, samples, **asked), 0
        else:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "exported"
                formats()[export.which].write(merged, out, export.precision)
                result, taken = decoded(formats()[export.which], out, samples, speech), disk_use(out)[0]
        told = f"WER {100 * result.normalized.wer:.1f}"
        return {"counts": counts(result.rows), "speed": result.speed, "bytes": taken, "told": told}

    done.run([here, *exports], work, args.more)
    if here not in done:
        return [], []
    rows, misses = [row(HERE, "float32", done[here], None)], []
    for export, found in done.found(exports):
        difference = wer_difference(found["counts"], done[here]["counts"])
        rows.append(row(formats()[export.which].runtime, export.precision, found, difference))
        rounded_alike = Export(model=name, which="transformers", precision=export.precision)
        like = here if export.precision == "float32" or rounded_alike not in done else rounded_alike
        if export.precision in WHOLE:
            off = wer_difference(found["counts"], done[like]["counts"])
            if is_off(off):
                misses.append(f"{export}: {off.points:+.1f} points from {like}, more than {LIMIT}")
    return rows, misses


def row(runtime: str, precision: str, found: dict, difference: Difference | None) -> tuple:
    errors, words = map(sum, zip(*found["counts"], strict=True))
    points = [f"{difference.points:+.2f}", str(difference.interval)] if difference else ["", ""]
    taken = size(found["bytes"]) if found["bytes"] else ""
    rates = [f"{100 * errors / words:.1f}", str(wer_interval(found["counts"]))]
    return runtime, precision, *rates, *points, taken, f"{found['speed']:.1f}"


if __name__ == "__main__":
    sys.exit(main())
