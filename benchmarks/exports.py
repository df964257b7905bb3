"""Does every runtime write with an exported model what transformers writes with it? WER, size and speed of each.

    python benchmarks/exports.py MODEL... --data TEST.csv [--language CODE] [--quick]

MODEL is a trained model, a folder as a run's `final` or a base. Each format is exported at each of its precisions, and
decodes the clips by its own runtime, as `multimac export --verify` does. What is done is kept in DIR (`--out`), so an
interrupted benchmark goes on where it stopped. --quick: six clips, and of most formats the default precision alone;
nothing is written. Needs the runtimes: sh tools/runtimes.sh.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.results import current_commit, listed, table, write_section  # noqa: E402
from distributed.run_dir.folder import disk_use  # noqa: E402
from whisper_tuner.data.dataset import Sample, load_manifest  # noqa: E402
from whisper_tuner.errors import TunerError  # noqa: E402
from whisper_tuner.eval.evaluation import GREEDY, Evaluation, evaluate  # noqa: E402
from whisper_tuner.eval.exported import LIMIT, decoded, is_off, speech_of  # noqa: E402
from whisper_tuner.eval.intervals import Difference, counts, wer_difference, wer_interval  # noqa: E402
from whisper_tuner.export.final import load_model  # noqa: E402
from whisper_tuner.export.formats import FORMATS, WHOLE  # noqa: E402
from whisper_tuner.export.merged import Merged  # noqa: E402
from whisper_tuner.text import size  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-exports"
QUICK_CLIPS = 6
LONGEST_S = 30.0
HERE = "before the export"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--language")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    samples = load_manifest(options.data, max_duration_s=LONGEST_S).samples[: QUICK_CLIPS if options.quick else None]
    lines, misses = [], []
    for model in options.models:
        rows, wrong = measured(model, samples, options)
        head = ("runtime", "precision", "WER", "95 %", "points more", "95 %", "size", "s of audio a second")
        lines += [f"{Path(model).parent.name}/{Path(model).name}", "", *table(head, rows), ""]
        misses += [f"{Path(model).parent.name}: {one}" for one in wrong]
    seconds = sum(sample.duration_s for sample in samples)
    about = f"{len(samples)} clips, {seconds:.0f} s of audio, decoded greedily and without timestamps, on the CPU."
    body = [about, "", *lines[:-1], *listed(misses)] if misses else [about, "", *lines, "No misses."]
    print("\n".join(body))
    if not options.quick:
        write_section(f"exports: on {options.data.parent.name}/{options.data.name}", body)
    return 0


def measured(name: str, samples: Sequence[Sample], options: argparse.Namespace) -> tuple[list[tuple], list[str]]:
    """A row for each export, and misses."""
    model, processor = load_model(name)
    merged = Merged(model=model.eval(), processor=processor)
    speech = speech_of(model, options.language, None)
    kept = options.out / f"{current_commit()}-{Path(name).parent.name}-{Path(name).name}-{len(samples)}.json"
    done = json.loads(kept.read_text()) if kept.exists() and not options.quick else {}

    def keep(key: str, result: Evaluation, taken: int) -> None:
        done[key] = {"counts": counts(result.rows), "speed": result.speed, "bytes": taken}
        print(f"{name}: {key}: WER {100 * result.normalized.wer:.1f}", file=sys.stderr)
        if not options.quick:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(done), encoding="utf-8")

    asked = {"language": speech.language, "task": speech.task, "temperatures": GREEDY}
    if HERE not in done:
        keep(HERE, evaluate(model, processor, samples, **asked), 0)
    rows, misses = [row(HERE, "float32", done[HERE], None)], []
    for which in FORMATS.values():
        for precision in which.precisions[: 1 if options.quick and which.name != "transformers" else None]:
            key, folder = f"{which.name} {precision}", options.out / "exported"
            try:
                if key not in done:
                    which.write(merged, folder, precision)
                    keep(key, decoded(which, folder, samples, speech), disk_use(folder)[0])
            except TunerError as error:
                misses.append(f"{key}: {error}".splitlines()[0])
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            difference = wer_difference(done[key]["counts"], done[HERE]["counts"])
            rows.append(row(which.runtime, precision, done[key], difference))
            like = HERE if precision == "float32" else f"transformers {precision}"  # weights rounded alike
            if precision in WHOLE:
                off = wer_difference(done[key]["counts"], done[like]["counts"])
                if is_off(off):
                    misses.append(f"{key}: {off.points:+.1f} points from {like}, more than {LIMIT}")
    return rows, misses


def row(runtime: str, precision: str, found: dict, difference: Difference | None) -> tuple:
    errors, words = map(sum, zip(*found["counts"], strict=True))
    points = [f"{difference.points:+.2f}", str(difference.interval)] if difference else ["", ""]
    taken = size(found["bytes"]) if found["bytes"] else ""
    rates = [f"{100 * errors / words:.1f}", str(wer_interval(found["counts"]))]
    return runtime, precision, *rates, *points, taken, f"{found['speed']:.1f}"


if __name__ == "__main__":
    sys.exit(main())
