"""WER before and after: the untouched base model and the trained one, on the same test clips.

Where that would take long, the hosts of the run transcribe clips beside this machine, see hearing.py.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from distributed.hosts.code import SyncItem, folder_items
from distributed.hosts.paths import STORE
from distributed.plan.launch import Rank
from distributed.plan.prepare import audio_items
from distributed.plan.run_spec import AFTER, BEFORE, DecodeSpec, RunSpec
from exogym import device as devices
from whisper_tuner.data.check import check_manifest
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import RunError
from whisper_tuner.eval.evaluation import Evaluation, compared, generation_settings
from whisper_tuner.eval.predictions import PREDICTIONS, write_predictions
from whisper_tuner.eval.text_cache import Decoding, TextCache
from whisper_tuner.export.final import load_model
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import write_atomically
from whisper_tuner.model.base_model import whisper_of

from .decoding_hosts import WORTH_S, HostDecoder
from .hearing import Hearing

# Each is padded to 30 s, also that of a short clip. Nobody measures what they take, and Apple's GPU ends the process
# for an array of 4 GiB, as attention of 24 with Whisper large would make (pytorch 149325). A CPU is no faster with more
# (8, 16 or 32: within 5 %); a card of NVIDIA's, which waits for its next small kernel at each token, is.
WINDOWS_AT_ONCE = 16
REMEDY = "The model is in final/. Close other programs; `multimac evaluate --batch-size 1` measures it."
NAMES = {BEFORE: "base", AFTER: "final"}  # of the folders with predictions


def evaluate_run(
    spec: RunSpec,
    test: Path,
    events: Callable[[dict], None],
    helpers: Sequence[Rank] = (),
    *,
    worth_s: float = WORTH_S,
) -> None:
    """Tell `evaluating` as it goes, and `evaluation` with `when` = before | after; write run_dir/wer.json.

    helpers: ranks on other hosts, which transcribe too once more than worth_s is left to do.
    """
    profile, events, folder = spec.profile, _one_at_a_time(events), Path(spec.run_dir)
    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    no_speech, store = profile.no_speech == "train", Path(spec.cache_dir).parent
    reading, figures = Reading.of(profile), {}
    manifest = check_manifest(test, profile.max_duration_s, store, no_speech=no_speech, reading=reading, kind="test")
    with closing(_evaluations(spec, manifest, events, helpers, worth_s)) as evaluations:
        for when, result, counts in evaluations:
            for problem in result.problems:
                events({"type": "problem", "what": str(problem)})
            write_predictions(folder / "evaluation" / test.stem / NAMES[when] / PREDICTIONS, result.rows)
            figures[when] = summary(result)
            by_machine = {"clips_of": counts} if len(counts) > 1 else {}
            events({"type": "evaluation", "when": when, **figures[when], "cached": result.cached, **by_machine})
    write_atomically(folder / "wer.json", json.dumps(figures, indent=2) + "\n")


def _evaluations(
    spec: RunSpec, manifest: Manifest, events: Callable[[dict], None], helpers: Sequence[Rank], worth_s: float
) -> Generator[tuple[str, Evaluation, dict[str, int]], None, None]:
    """Yield (when, Evaluation, how many clips each machine has transcribed) of each model."""

    def warn(what: str, **about: str) -> None:
        events({"type": "warning", **about, "what": what})

    def tell_progress(when: str, done: int, total: int) -> None:
        events({"type": "evaluating", "model": when, "done": done, "total": total})

    profile, final, device = spec.profile, Path(spec.run_dir) / "final", devices.choose(spec.wanted_device)
    texts = TextCache(FactStore(Path(spec.cache_dir)))
    decoding = Decoding(device=device.type, language=profile.language or None, task=profile.task)
    paths = {BEFORE: profile.base_model, AFTER: str(final)}
    keys = {when: texts.key(path, manifest.samples, decoding) for when, path in paths.items()}
    known = {when: result for when, key in keys.items() if (result := texts.read(key, manifest.samples))}
    here = DecodeSpec(
        before=profile.base_model,
        language=decoding.language,
        task=decoding.task,
        batch_size=profile.batch_size if device.type == "cuda" else min(profile.batch_size, WINDOWS_AT_ONCE),
    )
    clips, one_each = audio_items("test", manifest), {rank.host.address: rank for rank in reversed(helpers)}
    with Hearing(
        manifest.samples,
        [when for when in paths if when not in known],
        here,
        [_decoder(rank, here, clips, final) for rank in one_each.values()],
        name=spec.name,
        is_cpu=device.type == "cpu",
        warn=lambda host, what: warn(what, host=host),
        worth_s=worth_s,
    ) as hearing:
        base = None
        for when, path in paths.items():
            if not (result := known.get(when)):
                model, processor = load_model(path, base)
                base, began = model.to(device), time.perf_counter()  # an adapter is added to the base
                features = FeatureStore(Path(spec.cache_dir) / "features", processor.feature_extractor, warn=warn)
                with _out_of_memory_told():
                    transcripts = hearing.transcripts(when, base, processor, partial(tell_progress, when), features)
                _, written = generation_settings(whisper_of(base), decoding.language, decoding.task)
                result = compared(manifest.samples, transcripts, written, time.perf_counter() - began)
                if hearing.devices <= {device.type}:
                    texts.write(keys[when], result)
            yield when, result, hearing.counts(when)


def _one_at_a_time(events: Callable[[dict], None]) -> Callable[[dict], None]:
    """Guard `events` with a lock: hosts are told of by threads of their own."""
    lock = threading.Lock()

    def tell(event: dict) -> None:
        with lock:
            events(event)

    return tell


def _decoder(rank: Rank, here: DecodeSpec, clips: Sequence[SyncItem], final: Path) -> HostDecoder:
    """Describe what a host of the run is to do, which has the base model; the trained one is removed afterwards."""
    spec, profile = rank.spec, rank.spec.profile
    tuned = f"{STORE}/evaluated/{spec.run_id}"
    asked = dataclasses.replace(
        here,
        before=str(profile.base_model),
        after=tuned,
        cache_dir=spec.cache_dir,
        device=spec.wanted_device,
        batch_size=profile.batch_size,
        num_threads=profile.num_threads,
    )
    models = {AFTER: lambda: folder_items(final, tuned)}
    return HostDecoder(name=rank.label, host=rank.host, spec=asked, clips=clips, models=models, temporary=[tuned])


@contextmanager
def _out_of_memory_told() -> Iterator[None]:
    """Raise RunError for an allocator's error."""
    try:
        yield
    except Exception as error:
        if not devices.is_out_of_memory(error):
            raise
        what = f"memory ran out while evaluating: {devices.told_out_of_memory(error)}"
        raise RunError(what, remedy=REMEDY) from error


def summary(result: Evaluation) -> dict:
    """Return rates in per cent, corpus-level, and counts (`clips`, `loops` and `decoded_again`).

    `wer` and `cer` are after Whisper's own text normaliser; `wer_greedy` is what it was before any text was decoded
    again.
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
