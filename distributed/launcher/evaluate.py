"""WER before and after: the untouched base model and the trained one, on the same test clips.

This machine begins; where that would take long, the hosts of the run transcribe clips beside it. A clip's text depends
on nothing but the clip, so the figures are those of one machine, if all compute on the same kind of device.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from distributed.hosts.code import SyncItem, folder_items
from distributed.hosts.paths import STORE
from distributed.plan.decode_spec import AFTER, BEFORE, DecodeSpec
from distributed.plan.launch import Rank
from distributed.plan.prepare import audio_items
from distributed.plan.run_spec import RunSpec
from exogym import device as devices
from whisper_tuner.data.check import check_manifest
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import RunError
from whisper_tuner.eval.evaluation import FALLBACK, Evaluation, compared, generation_settings, transcribe
from whisper_tuner.eval.predictions import PREDICTIONS, write_predictions
from whisper_tuner.eval.text_cache import Decoding, TextCache
from whisper_tuner.export.final import load_model
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import write_atomically
from whisper_tuner.model.base_model import whisper_of

from .dealer import Dealer, in_groups
from .decoding_hosts import WORTH_S, DecodingHosts, HostDecoder

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
    """Events `evaluating` as it goes, `evaluation` with `when` = before | after; also written to run_dir/wer.json.

    helpers: ranks on other hosts, which transcribe too once more than worth_s is left to do.
    """
    profile, events = spec.profile, _one_at_a_time(events)
    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    no_speech, store = profile.no_speech == "train", Path(spec.cache_dir).parent
    reading = Reading.of(profile)
    manifest = check_manifest(test, profile.max_duration_s, store, no_speech=no_speech, reading=reading, kind="test")
    figures, folder = {}, Path(spec.run_dir)
    with _Evaluations(spec, manifest, events, helpers, worth_s) as evaluations:
        for when, result in evaluations:
            for problem in result.problems:
                events({"type": "problem", "what": str(problem)})
            write_predictions(folder / "evaluation" / test.stem / NAMES[when] / PREDICTIONS, result.rows)
            figures[when] = summary(result)
            told = {"when": when, **figures[when], "cached": result.cached}
            events({"type": "evaluation", **told, **evaluations.counts(when)})
    write_atomically(folder / "wer.json", json.dumps(figures, indent=2) + "\n")


def _one_at_a_time(events: Callable[[dict], None]) -> Callable[[dict], None]:
    """Hosts are told of by threads of their own."""
    lock = threading.Lock()

    def tell(event: dict) -> None:
        with lock:
            events(event)

    return tell


class _Evaluations:
    """Iterates over (when, Evaluation)."""

    def __init__(self, spec: RunSpec, manifest: Manifest, events, helpers: Sequence[Rank], worth_s: float):
        self._spec, self._manifest, self._events, self._worth_s = spec, manifest, events, worth_s
        self._samples = manifest.samples
        self._device = devices.choose(spec.wanted_device)
        most = spec.profile.batch_size
        self._at_once = most if self._device.type == "cuda" else min(most, WINDOWS_AT_ONCE)
        one_each = {rank.host.address: rank for rank in reversed(helpers)}
        self._helpers, self._hosts = tuple(one_each.values()), None
        self._dealers: dict[str, Dealer] = {}
        self._final = Path(spec.run_dir) / "final"

    def __enter__(self) -> _Evaluations:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._hosts:
            self._hosts.close()

    def __iter__(self) -> Iterator[tuple[str, Evaluation]]:
        profile, texts = self._spec.profile, TextCache(FactStore(Path(self._spec.cache_dir)))
        decoding = Decoding(device=self._device.type, language=profile.language or None, task=profile.task)
        paths = {BEFORE: profile.base_model, AFTER: str(self._final)}
        keys = {when: texts.key(path, self._samples, decoding) for when, path in paths.items()}
        known = {when: result for when, key in keys.items() if (result := texts.read(key, self._samples))}
        self._dealers = {when: Dealer(self._groups()) for when in paths if when not in known}
        base = None
        for when, path in paths.items():
            if not (result := known.get(when)):
                model, processor = load_model(path, base)
                base = model  # what an adapter is added to
                result = self._evaluated(when, model.to(self._device), processor)
                if not self._hosts or self._hosts.devices <= {self._device.type}:
                    texts.write(keys[when], result)
            yield when, result

    def _groups(self) -> list[Sequence[int]]:
        """The longest first. For this machine alone one group is enough: it reads while it computes."""
        places = sorted(range(len(self._samples)), key=lambda place: -self._samples[place].duration_s)
        machines, is_cpu = 1 + len(self._helpers), self._device.type == "cpu"
        return list(in_groups(places, self._at_once, machines, one_by_one=is_cpu))

    def _evaluated(self, when: str, model, processor) -> Evaluation:
        began, dealer, profile = time.perf_counter(), self._dealers[when], self._spec.profile
        warn = lambda what: self._events({"type": "warning", "what": what})  # noqa: E731
        features = FeatureStore(Path(self._spec.cache_dir) / "features", processor.feature_extractor, warn=warn)
        about = {"language": profile.language or None, "task": profile.task, "temperatures": FALLBACK}
        while (group := dealer.take_here()) is not None:
            group_began = time.monotonic()
            with _out_of_memory_told():
                heard = transcribe(
                    model,
                    processor,
                    [self._samples[place].audio for place in group],
                    batch_size=self._at_once,
                    features=features,
                    progress=lambda done, _: self._tell(when, dealer.done + done),
                    **about,
                )
            dealer.heard_here(group, heard, self._spec.name, group_began)
            self._ask_for_help(when, time.perf_counter() - began)
        self._tell(when, len(self._samples))
        in_order = [dealer.transcripts[place] for place in range(len(self._samples))]
        _, written = generation_settings(whisper_of(model), about["language"], about["task"])
        return compared(self._samples, in_order, written, time.perf_counter() - began)

    def _tell(self, when: str, done: int) -> None:
        total = len(self._samples)
        self._events({"type": "evaluating", "model": when, "done": min(done, total), "total": total})

    def _ask_for_help(self, when: str, seconds: float) -> None:
        """Once it is known how long this machine would take by itself."""
        if self._hosts or not self._helpers:
            return
        to_do = sum(len(self._samples) - dealer.done for dealer in self._dealers.values())
        if seconds / self._dealers[when].done * to_do > self._worth_s:
            clips = audio_items("test", self._manifest)
            self._hosts = DecodingHosts([self._decoding(rank, clips) for rank in self._helpers], self._warn)
            for model, dealer in self._dealers.items():
                self._hosts.deal(model, dealer)

    def _decoding(self, rank: Rank, clips: Sequence[SyncItem]) -> HostDecoder:
        """It has the base model already. The trained one is removed afterwards."""
        spec, profile = rank.spec, rank.spec.profile
        tuned = f"{STORE}/evaluated/{spec.run_id}"
        asked = DecodeSpec(
            before=str(profile.base_model),
            after=tuned,
            cache_dir=spec.cache_dir,
            device=spec.wanted_device,
            language=profile.language or None,
            task=profile.task,
            batch_size=profile.batch_size,
            num_threads=profile.num_threads,
        )
        models = {AFTER: lambda: folder_items(self._final, tuned)}
        return HostDecoder(name=rank.label, host=rank.host, spec=asked, clips=clips, models=models, temporary=[tuned])

    def _warn(self, host: str, what: str) -> None:
        self._events({"type": "warning", "host": host, "what": what})

    def counts(self, when: str) -> dict[str, dict[str, int]]:
        """How many clips each machine has transcribed, if there were several."""
        dealer = self._dealers.get(when)
        return {"clips_of": dealer.counts} if dealer and len(dealer.counts) > 1 else {}


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
