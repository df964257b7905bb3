"""Transcribing with the help of hosts, see hearing.py: WER before and after a run, and the texts for a data check."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from distributed.hosts.paths import STORE, SyncItem, code_items, folder_items
from distributed.plan.forecast import WORTH_S
from distributed.plan.job import OtherSet
from distributed.plan.launch import Launch, Rank
from distributed.plan.on_hosts import audio_items, model_on_hosts
from distributed.plan.run_spec import AFTER, BEFORE, DecodeSpec, RunSpec
from distributed.run_dir.away import ASKED
from distributed.run_dir.folder import only_one
from distributed.run_dir.log import EventLog
from distributed.ssh.host import Host
from exogym import device as devices
from whisper_tuner.config import Profile
from whisper_tuner.data.check import check_manifest
from whisper_tuner.data.dataset import Manifest, load_manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import RunError, TunerError
from whisper_tuner.eval.evaluation import Evaluation, Transcript, compared, generation_settings
from whisper_tuner.eval.predictions import PREDICTIONS, difference, write_predictions
from whisper_tuner.eval.terms import TERMS, read_terms, shares, terms_in, write_terms
from whisper_tuner.eval.text_cache import Decoding, TextCache
from whisper_tuner.eval.wer import wer_difference
from whisper_tuner.export.final import load_model
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import write_atomically
from whisper_tuner.hub import base_of, is_adapter, model_folder
from whisper_tuner.model.base_model import whisper_of

from .hearing import Hearing, HostDecoder

# Each is padded to 30 s, also that of a short clip. Nobody measures what they take, and Apple's GPU ends the process
# for an array of 4 GiB, as attention of 24 with Whisper large would make (pytorch 149325). A CPU is no faster with more
# (8, 16 or 32: within 5 %); a card of NVIDIA's, which waits for its next small kernel at each token, is.
WINDOWS_AT_ONCE = 16
REMEDY = "The model is in final/. Close other programs; `multimac evaluate --batch-size 1` measures it."
NAMES = {BEFORE: "base", AFTER: "final"}  # of the folders with predictions
CHECK_BATCH_SIZE = 8
HERE = "this machine"


def evaluate_launch(
    launch: Launch,
    spec: RunSpec,
    events: Callable[[dict], None],
    helpers: Sequence[Rank] = (),
    asked_away: Callable[[], Collection[str]] = tuple,
) -> None:
    """Evaluate a run's model on its own test set, and then on each that it is to keep. spec: of rank 0."""
    if launch.test:
        evaluate_run(spec, Path(launch.test), events, helpers, asked_away=asked_away)
    for kept in launch.keeps:
        own, away = replace(spec, profile=kept.profile(spec.known_profile)), {*asked_away()}
        there = [rank for rank in helpers if rank.label not in away]
        evaluate_run(own, kept.clips, events, there, asked_away=asked_away, kept=kept)


def evaluate_run(
    spec: RunSpec,
    test: Path,
    events: Callable[[dict], None],
    helpers: Sequence[Rank] = (),
    *,
    worth_s: float = WORTH_S,
    asked_away: Callable[[], Collection[str]] = tuple,
    kept: OtherSet | None = None,
) -> None:
    """Tell `evaluating` as it goes, and `evaluation` with `when` = before | after; write run_dir/wer.json.

    helpers: ranks on other hosts, which transcribe too once more than worth_s is left to do. asked_away: which of them
    are to transcribe no more clips than they have in hand. kept: what `test` is if it is not the run's own: events name
    it, and wer.json is that of the run's own.
    """
    lock, profile, folder = threading.Lock(), spec.profile, Path(spec.run_dir)
    figures: dict[str, dict] = {}
    measured: dict[str, Evaluation] = {}
    assert profile

    def tell(event: dict) -> None:
        with lock:  # hosts are told of by threads of their own
            events(event | {"kept": kept.name} if kept else event)

    def leaves(host: str) -> bool:
        if host not in asked_away():
            return False
        tell({"type": "away", "host": host, "reason": ASKED})
        return True

    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    own = folder / "evaluation" / (kept.folder if kept else test.stem)
    no_speech, store = profile.no_speech == "train", Path(spec.cache_dir).parent
    reading = Reading.of(profile)
    manifest = check_manifest(test, profile.max_duration_s, store, no_speech=no_speech, reading=reading, kind="test")
    with closing(_evaluations(spec, profile, manifest, tell, helpers, worth_s, leaves)) as evaluations:
        for when, result, counts in evaluations:
            for problem in result.problems:
                tell({"type": "problem", "what": str(problem)})
            if when == BEFORE and not result.normalized.words:
                tell(
                    {"type": "warning", "what": "no test clip has a text: WER counts only words that a model makes up"}
                )
            write_predictions(own / NAMES[when] / PREDICTIONS, result.rows)
            measured[when] = result
            figures = figures_of(measured)
            by_machine = {"clips_of": counts} if len(counts) > 1 else {}
            tell({"type": "evaluation", "when": when, **figures[when], "cached": result.cached, **by_machine})
    if not kept:
        write_rates(folder, figures)
    if profile.terms and not kept:
        try:
            tell(terms_event(read_terms(profile.terms), measured, texts_of_training(folder), own))
        except TunerError as error:  # the list is gone: WER is known all the same
            tell({"type": "warning", "what": f"terms were not counted: {error}"})


def texts_of_training(run_dir: Path) -> list[str]:
    """Return the texts that a run trains. Raises DataError."""
    own_list = load_manifest(run_dir / "train.csv", check_audio=False, no_speech=True, repeats=True)
    return [text for _, text in dict.fromkeys((sample.audio, sample.text) for sample in own_list.samples)]


def terms_event(
    terms: Sequence[str], measured: Mapping[str, Evaluation], training: Sequence[str], folder: Path
) -> dict:
    """Write what became of each term beside the predictions, and return what is told of all. They are in per cent."""
    counts, missed = {}, {}
    for when, result in measured.items():
        counts[when], missed[when] = terms_in(terms, result, training)
        write_terms(folder / NAMES[when] / TERMS, counts[when])
    (before, _), (recall, precision) = shares(counts[BEFORE]), shares(counts[AFTER])
    event = {"type": "terms", "when": AFTER, "said": sum(one.said for one in counts[AFTER]), "before": before}
    before_ids, after_ids = ([row.sample.id for row in measured[when].rows] for when in (BEFORE, AFTER))
    # What is missed less is written more.
    if before_ids == after_ids and (found := wer_difference(missed[BEFORE], missed[AFTER])):
        event["difference"] = [round(found.low, 4), round(found.high, 4)]
    return event | {"recall": recall, "precision": precision}


def figures_of(measured: Mapping[str, Evaluation]) -> dict[str, dict]:
    """Return the figures of BEFORE and AFTER, as wer.json holds them; those of AFTER tell what has changed."""
    figures = {when: summary(result) for when, result in measured.items()}
    if len(figures) == len(NAMES):
        figures[AFTER]["before"] = figures[BEFORE]["wer"]
        if found := difference(measured[AFTER].rows, measured[BEFORE].rows):
            figures[AFTER]["wer_difference"] = [round(found.low, 4), round(found.high, 4)]
    return figures


def write_rates(run_dir: Path, figures: Mapping[str, dict]) -> None:
    write_atomically(run_dir / "wer.json", json.dumps(figures, indent=2) + "\n")


def record_in_run(run_dir: Path, measured: Mapping[str, Evaluation], *, kept: str = "", more: Sequence[dict]) -> None:
    """Add what was measured on a test set of a run that has ended to its events, and on its own one to wer.json.

    kept: the name of one to keep. more: other events. Raises RunError if it runs again.
    """
    figures = figures_of(measured)
    named = {"kept": kept} if kept else {}
    with only_one(run_dir), closing(EventLog(run_dir / "events.jsonl")) as tell:
        for when, of_model in figures.items():
            tell({"type": "evaluation", "when": when, **named, **of_model})
        for event in more:
            tell(event)
        if not kept:
            write_rates(run_dir, figures)


def _evaluations(
    spec: RunSpec,
    profile: Profile,
    manifest: Manifest,
    tell: Callable[[dict], None],
    helpers: Sequence[Rank],
    worth_s: float,
    leaves: Callable[[str], bool],
) -> Generator[tuple[str, Evaluation, dict[str, int]], None, None]:
    """Yield (when, Evaluation, how many clips each machine has transcribed) of each model."""

    def warn(what: str, **about: str) -> None:
        tell({"type": "warning", **about, "what": what})

    def tell_progress(when: str, done: int, total: int) -> None:
        tell({"type": "evaluating", "model": when, "done": done, "total": total})

    final, device, cache = Path(spec.run_dir) / "final", devices.choose(spec.wanted_device), Path(spec.cache_dir)
    texts, samples = TextCache(FactStore(cache)), manifest.samples
    decoding = Decoding(device=device.type, language=profile.language or None, task=profile.task)
    paths = {BEFORE: profile.base_model, AFTER: str(final)}
    keys = {when: texts.key(path, samples, decoding) for when, path in paths.items()}
    known = {when: result for when, key in keys.items() if (result := texts.read(key, samples))}
    here = DecodeSpec(
        before=profile.base_model,
        language=decoding.language,
        task=decoding.task,
        batch_size=profile.batch_size if device.type == "cuda" else min(profile.batch_size, WINDOWS_AT_ONCE),
    )
    with Hearing(
        samples,
        [when for when in paths if when not in known],
        here,
        _helping_ranks(helpers, here, audio_items("test", manifest), final),
        name=spec.name,
        is_cpu=device.type == "cpu",
        warn=lambda host, what: warn(what, host=host),
        worth_s=worth_s,
        leaves=leaves,
    ) as hearing:
        base: WhisperForConditionalGeneration | None = None
        for when, path in paths.items():
            if not (result := known.get(when)):
                tell_progress(when, 0, len(samples))
                model, processor = load_model(path, base)
                assert isinstance(model, WhisperForConditionalGeneration)  # an adapter has been added to the base
                model.to(device)  # type: ignore[arg-type]  # transformers wraps it in a type that takes no device
                base, began = model, time.perf_counter()
                with _out_of_memory_told():
                    progress = partial(tell_progress, when)
                    transcripts = hearing.transcripts(when, base, processor, progress)
                _, written = generation_settings(whisper_of(base), decoding.language, decoding.task)
                result = compared(samples, transcripts, written, time.perf_counter() - began)
                if hearing.devices <= {device.type}:
                    texts.write(keys[when], result)
            yield when, result, hearing.counts(when)


def _helping_ranks(
    ranks: Sequence[Rank], here: DecodeSpec, clips: Sequence[SyncItem], final: Path
) -> list[HostDecoder]:
    """Describe what each host of the run is to do, which has the base model; the trained one is removed afterwards."""
    decoders = {}
    for rank in reversed(ranks):  # of several on one host its first
        spec, profile, host = rank.spec, rank.spec.profile, rank.host
        assert profile and host
        tuned = f"{STORE}/evaluated/{spec.run_id}"
        asked = replace(
            here,
            before=str(profile.base_model),
            after=tuned,
            device=spec.wanted_device,
            batch_size=profile.batch_size,
            num_threads=profile.num_threads,
        )
        decoders[host.address] = HostDecoder(
            name=rank.label,
            host=host,
            spec=asked,
            clips=clips,
            models={AFTER: partial(folder_items, final, tuned)},
            temporary=[tuned],
        )
    return list(decoders.values())


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

    `wer` and `cer` are after `normalizer`, `wer_other` is after `normalizer_other`; `wer_greedy` is what WER was before
    any text was decoded again.
    """
    rates = {
        "wer": result.normalized.wer,
        "wer_other": result.other.wer,
        "wer_greedy": result.greedy.wer,
        "cer": result.normalized.cer,
        "wer_raw": result.raw.wer,
        "cer_raw": result.raw.cer,
    }
    return {name: round(100 * rate, 4) for name, rate in rates.items()} | {
        "normalizer": result.normalizers[0],
        "normalizer_other": result.normalizers[1],
        "clips": len(result.rows),
        "loops": result.loops,
        "decoded_again": len(result.again),
    }


@dataclass(frozen=True, kw_only=True)
class Listening:
    """name, model: the model's folder or hub id, and it as it is loaded here."""

    name: str
    model: nn.Module
    processor: WhisperProcessor
    language: str | None
    task: str | None


@dataclass(frozen=True, kw_only=True)
class HeardTogether:
    """transcripts: by kind, in the manifest's order. devices, counts: of hosts, and of all machines by name."""

    transcripts: dict[str, list[Transcript]]
    devices: set[str]
    counts: dict[str, int]


def hear_together(
    listening: Listening,
    manifests: Mapping[str, Manifest],
    hosts: Sequence[Host],
    *,
    progress: Callable[[int, int], None],
    warn: Callable[[str, str], None],
    worth_s: float = WORTH_S,
) -> HeardTogether:
    """Transcribe the clips of several manifests with one model, greedily. See Hearing."""
    which = AFTER if is_adapter(listening.name) else BEFORE
    spec = DecodeSpec(
        before=listening.name,
        language=listening.language,
        task=listening.task,
        greedy=True,
        batch_size=CHECK_BATCH_SIZE,
    )
    with Hearing(
        [sample for manifest in manifests.values() for sample in manifest.samples],
        [which],
        spec,
        _helping_hosts(listening.name, spec, manifests, hosts) if hosts else [],
        name=HERE,
        is_cpu=next(listening.model.parameters()).device.type == "cpu",
        warn=warn,
        worth_s=worth_s,
    ) as hearing:
        in_order = iter(hearing.transcripts(which, listening.model, listening.processor, progress))
        transcripts = {kind: [next(in_order) for _ in manifest.samples] for kind, manifest in manifests.items()}
    return HeardTogether(transcripts=transcripts, devices=hearing.devices, counts=dict(hearing.counts(which)))


def _helping_hosts(
    name: str, spec: DecodeSpec, manifests: Mapping[str, Manifest], hosts: Sequence[Host]
) -> list[HostDecoder]:
    """Describe what each host is to do. Base models stay there, as they do for training; an adapter is removed."""
    adapter = Path(name) if is_adapter(name) else None
    base = model_folder(str(base_of(adapter)) if adapter else name)
    spec = replace(spec, before=model_on_hosts(base))
    items = folder_items(base, spec.before)
    if adapter:
        spec = replace(spec, after=f"{STORE}/evaluated/{Path(model_on_hosts(adapter.absolute())).name}")
        items += folder_items(adapter, spec.after)
    clips = [item for kind, manifest in manifests.items() for item in audio_items(kind, manifest)]
    return [
        HostDecoder(
            name=host.address,
            host=host,
            spec=replace(spec, device=None if host.device == "auto" else host.device),
            clips=clips,
            code=code_items(),
            models={AFTER if adapter else BEFORE: lambda: items},
            temporary=[spec.after] if adapter else [],
        )
        for host in hosts
    ]
