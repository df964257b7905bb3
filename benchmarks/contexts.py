"""What audio_context does to a model: WER and loops, decoded padded to 30 s and cropped, before and after training.

    python benchmarks/contexts.py MODEL DATA... [--quick] [--contexts cropped,mixed] [--epochs 3] [--seeds 1]

MODEL is a Whisper checkpoint in transformers layout; each DATA a folder with train.csv, validation.csv and test.csv.
All weights are trained on one machine. Validation and test are pooled: nothing was chosen by either. A loop is a clip
in whose text a phrase repeats itself. What is done is kept in DIR, so an interrupted benchmark goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym")]

from benchmarks.local_run import finetuned  # noqa: E402
from benchmarks.results import current_commit, table, write_section  # noqa: E402

OUT = Path.home() / ".cache" / "multimac" / "bench-contexts"
CONTEXTS, DECODED = ("cropped", "mixed", "pack", "full"), ("full", "cropped")
HEAD = ("data", "trained", "WER padded", "loops", "WER cropped", "loops")
CONFIG = """
[profile:bench]
base_model = {model}
train = {data}/train.csv
validation =
test =
runs_dir = {out}
audio_context = {context}
epochs = {epochs}
max_steps = {steps}
batch_size = 8
learning_rate = 1e-4
seed = {seed}
"""


def measured(model: Path, data: Path, parts: tuple[str, ...]) -> dict[str, list[float]]:
    """By the way of decoding: (WER in per cent, clips with a loop, clips)."""
    from whisper_tuner.data.dataset import load_manifest
    from whisper_tuner.eval.evaluation import GREEDY, evaluate
    from whisper_tuner.export.final import load_model

    trained, processor = load_model(str(model))
    samples = [sample for part in parts for sample in load_manifest(data / f"{part}.csv").samples]
    found = {}
    for context in DECODED:
        result = evaluate(trained, processor, samples, audio_context=context, temperatures=GREEDY, batch_size=16)
        found[context] = [100 * result.normalized.wer, result.loops, len(result.rows)]
    return found


def trained(model: Path, data: Path, context: str, seed: int, folder: Path, epochs: int, steps: int) -> dict:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    values = {"model": model, "data": data, "out": folder, "context": context}
    config = CONFIG.format(**values, epochs=epochs, steps=steps, seed=seed)
    (folder / "config.ini").write_text(config, encoding="utf-8")
    if status := finetuned(folder, "bench"):
        raise RuntimeError(f"{context} failed with status {status}: {(folder / 'console.txt').read_text()[-2000:]}")
    [run] = (path.parent for path in folder.glob("*/events.jsonl"))
    parts = ("test",) if steps else ("validation", "test")
    return {"decoded": measured(run / "final", data, parts)}


def report(done: dict[str, dict], data: list[Path], about: str) -> list[str]:
    rows = []
    for folder in data:
        for context in ("before", *CONTEXTS):
            found = [done[key] for key in sorted(done) if key.rpartition(" ")[0] == f"{folder.name} {context}"]
            if not found:
                continue
            cells = []
            for way in DECODED:
                cells.append(", ".join(f"{result['decoded'][way][0]:.1f}" for result in found))
                cells.append(
                    ", ".join(f"{result['decoded'][way][1]} of {result['decoded'][way][2]}" for result in found)
                )
            rows.append([folder.name, context, *cells])
    return [about, "", *table(HEAD, rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--contexts", default=",".join(CONTEXTS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="2 steps, the test set alone; leaves RESULTS.md alone")
    args = parser.parse_args()
    model, data, contexts = args.model.resolve(), [folder.resolve() for folder in args.data], args.contexts.split(",")
    steps = 2 if args.quick else 0
    kept = args.out / f"{model.name}-{args.epochs}{'-quick' if args.quick else ''}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(kept.read_text()) if kept.exists() else {}
    # All contexts of one data set, then the next: so that an interrupted benchmark has something to compare.
    cells = [(folder, "before", 0) for folder in data]
    cells += [(folder, context, seed) for seed in range(args.seeds) for folder in data for context in contexts]
    for folder, context, seed in cells:
        if (key := f"{folder.name} {context} {seed}") in done:
            continue
        if context == "before":
            parts = ("test",) if steps else ("validation", "test")
            result = {"decoded": measured(model, folder, parts)}
        else:
            result = trained(model, folder, context, seed, args.out / key.replace(" ", "-"), args.epochs, steps)
        done[key] = result | {"commit": current_commit()}
        kept.write_text(json.dumps(done, indent=2))
        print(key, json.dumps(result), flush=True)
    about = (
        f"{model.name}, all weights, {args.epochs} epochs, batches of 8, learning rate 1e-4; one value for each "
        "seed. WER of validation and test pooled, after Whisper's normaliser, decoded by transformers' generate."
    )
    lines = report(done, data, about)
    print("\n".join(lines))
    if not args.quick:
        write_section(f"contexts: {model.name}", lines, [result["commit"] for result in done.values()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
