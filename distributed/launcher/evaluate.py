"""WER before and after: the untouched base model and the trained one, on the same test clips."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from distributed.plan.run_spec import RunSpec
from exogym import device as devices
from whisper_tuner.data.check import check_manifest
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.errors import RunError
from whisper_tuner.eval.evaluation import Evaluation, evaluate
from whisper_tuner.eval.predictions import PREDICTIONS, write_predictions
from whisper_tuner.eval.text_cache import TEXTS, Decoding, TextCache
from whisper_tuner.export.final import load_model
from whisper_tuner.files import write_atomically

# Each is padded to 30 s, also that of a short clip. Nobody measures what they take, and Apple's GPU ends the process
# for an array of 4 GiB, as attention of 24 with Whisper large would make (pytorch 149325). A CPU is no faster with more
# (8, 16 or 32: within 5 %); a card of NVIDIA's, which waits for its next small kernel at each token, is.
WINDOWS_AT_ONCE = 16
REMEDY = "The model is in final/. Close other programs; `multimac evaluate --batch-size 1` measures it."


def evaluate_run(spec: RunSpec, test: Path, events: Callable[[dict], None]) -> None:
    """Events `evaluating` as it goes, `evaluation` with `when` = before | after; also written to run_dir/wer.json."""
    profile = spec.profile
    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    no_speech, store = profile.no_speech == "train", Path(spec.cache_dir).parent
    samples = check_manifest(test, profile.max_duration_s, store, no_speech=no_speech).samples
    device = devices.choose(spec.wanted_device)
    decoding = Decoding(device=device.type, language=profile.language or None, task=profile.task)
    texts = TextCache(Path(spec.cache_dir) / TEXTS)
    warn = lambda what: events({"type": "warning", "what": what})  # noqa: E731
    figures, folder, base = {}, Path(spec.run_dir), None
    at_once = profile.batch_size if device.type == "cuda" else min(profile.batch_size, WINDOWS_AT_ONCE)
    for when, path in (("before", profile.base_model), ("after", str(folder / "final"))):
        key = texts.key(path, samples, decoding)
        if (result := texts.read(key, samples)) is None:
            model, processor = load_model(path, base)
            with _out_of_memory_told():
                result = evaluate(
                    model.to(device),
                    processor,
                    samples,
                    language=decoding.language,
                    task=decoding.task,
                    batch_size=at_once,
                    features=FeatureStore(Path(spec.cache_dir) / "features", processor.feature_extractor, warn=warn),
                    progress=lambda done, total, when=when: events(
                        {"type": "evaluating", "model": when, "done": done, "total": total}
                    ),
                )
            texts.write(key, result)
            base = model  # what an adapter is added to
        for problem in result.problems:
            events({"type": "problem", "what": str(problem)})
        name = "base" if when == "before" else "final"
        write_predictions(folder / "evaluation" / test.stem / name / PREDICTIONS, result.rows)
        figures[when] = summary(result)
        events({"type": "evaluation", "when": when, **figures[when], "cached": result.cached})
    write_atomically(folder / "wer.json", json.dumps(figures, indent=2) + "\n")


@contextmanager
def _out_of_memory_told() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not devices.is_out_of_memory(error):
            raise
        what = f"memory ran out while evaluating: {devices.told_out_of_memory(error)}"
        raise RunError(what, remedy=REMEDY) from error


def summary(result: Evaluation) -> dict:
    """Per cent, corpus-level; `wer` and `cer` after Whisper's own text normaliser; `wer_greedy` is what it was before
    any text was decoded again. `clips`, `loops` and `decoded_again` are counts.
    """
    rates = {
        "wer": result.normalized.wer,
        "wer_greedy": result.greedy.wer,
        "cer": result.normalized.cer,
        "wer_raw": result.raw.wer,
        "cer_raw": result.raw.cer,
    }
    return {name: round(100 * rate, 2) for name, rate in rates.items()} | {
        "clips": len(result.rows),
        "loops": result.loops,
        "decoded_again": len(result.again),
    }
