"""What a rank trains: Whisper with the clips of a profile, or a user's own model from the bundle that was sent."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from distributed.plan.automatic import more_bytes
from distributed.plan.run_spec import CHECKPOINTS, RESULT, WEIGHTS, RunSpec
from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.rounds.progress import Score
from exogym.samplers.elastic import ElasticSampler
from exogym.settings import FitSettings
from exogym.strategy import strategy_of
from exogym.strategy.diloco_settings import DiLoCoConfig
from exogym.train_node import TrainResult
from exogym.trainer import DataSource
from whisper_tuner.config import Profile
from whisper_tuner.data.batches import Batch, ShardBatches
from whisper_tuner.data.dataset import Sample, load_manifest
from whisper_tuner.data.encoder_store import EncoderStore
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.labels import label_encoder
from whisper_tuner.data.steps import Cost
from whisper_tuner.errors import RunError
from whisper_tuner.eval.evaluation import GREEDY, evaluate
from whisper_tuner.export.final import save_final
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import atomic_folder
from whisper_tuner.model.base_model import load_base, prepare, set_language, skeleton, train_only
from whisper_tuner.model.layers import split_wide_layers
from whisper_tuner.model.memory import DECODER, ENCODER, PARTS, best_bytes, passes

from .micro_batch import fit_into_memory, share_of_memory
from .stages import STAGES, StagedSampler, WholeModel
from .whisper_wrapper import WhisperModelWrapper

Events = Callable[[dict], None]
POLL_S = 0.05
LOOK_S = 5.0  # between two `alive` events: without them the launcher takes a worker that makes no step for stuck
LONGEST_S = 600.0  # a clip is given up when nothing at all has arrived for so long


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of a rank: what it trains, and how; save(folder, result) writes the trained model.

    gather: brings the parts together of a model that ranks train in stages. score: see TrainNode.
    """

    model: nn.Module
    train: DataSource
    validation: DataSource | None
    settings: FitSettings
    save: Callable[[Path, TrainResult], object]
    gather: Callable[[Comm], None] | None = None
    score: Score | None = None


def load_bundle(spec: RunSpec) -> RankWork:
    """Open the bundle. Raises RunError if the file is not the one that was sent."""
    assert spec.bundle
    data = Path(spec.bundle.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != spec.bundle.sha256:
        raise RunError(f"{spec.bundle.path} is not the file that was sent", remedy="Start the run again.")
    model, train, validation, settings = pickle.loads(data)
    if spec.device:
        settings = replace(settings, device=spec.wanted_device)

    def save(folder: Path, result: TrainResult) -> None:
        with atomic_folder(folder) as final:
            save_model(model.cpu(), str(final / WEIGHTS))
            (final / RESULT).write_text(json.dumps(asdict(result)))

    return RankWork(model=model, train=train, validation=validation, settings=settings, save=save)


def load_whisper(
    spec: RunSpec, events: Events, unsent: Container[str], *, stopped: Callable[[], bool] = lambda: False
) -> RankWork:
    """Load model and data of a profile, in parts that fit into this worker's memory. Raises TooLittleMemory, RunError.

    Log-mels are computed here, so that no step waits for them; not all of them once stopped() is true.
    """
    profile, strategy = spec.profile, spec.strategy_settings
    assert profile and strategy
    part = PARTS[spec.rank] if spec.is_pipeline else ""
    if part:  # so that one stage has something to do while the other is at the next part
        spec = replace(spec, profile=(profile := replace(profile, accumulation=passes(profile))))
    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    torch.manual_seed(profile.seed)
    model, trained, processor = _load_model(profile, part)
    clips, settings = _Clips(spec, model, processor, events, unsent), _fit_settings(spec)
    share = share_of_memory(spec, settings.device)
    if share.device.type == "cpu" and profile.precision == "float32":
        devices.keep_few_primitives()
    if most := devices.most_terms(share.device):
        split_wide_layers(trained, most)
    if part:
        train_only(trained, part)
    wrapper = (STAGES[part] if part else WhisperModelWrapper)(
        trained,
        processor,
        "cpu",  # TrainNode moves it to the device
        label_smoothing=profile.label_smoothing,
        encoder_store=clips.encoder_store,
    )
    train = clips.batches(profile.train, shuffle=True)
    validation = clips.batches(profile.validation, shuffle=False) if profile.validation else None
    if profile.gradient_checkpointing:
        wrapper.checkpoint_gradients()
    fit_into_memory(
        wrapper,
        train,
        validation,
        share=share,
        precision=profile.precision,
        events=events,
        more_bytes=more_bytes(strategy, spec.world_size) + 2 * best_bytes(profile),
        facts=FactStore(Path(spec.cache_dir)),
    )
    sampler, validator = _samplers(spec, train, validation)
    clips.make_room([(train, sampler), *([(validation, validator)] if validation is not None and validator else [])])
    clips.prepare(train, sampler.next_numbers(profile.max_steps or None), train.speeds, stopped)
    if validation is not None and validator:
        clips.prepare(validation, validator.next_numbers(), (1.0,), stopped)
    work = RankWork(
        model=wrapper,
        train=sampler,
        validation=validator,
        settings=settings,
        save=lambda final, _: save_final(trained.cpu(), processor, final, profile.base_model, blend=profile.blend),
        score=_word_errors(trained, processor, validation, profile),
    )
    whole = WholeModel(trained, profile)
    return replace(work, save=lambda final, _: whole.save(final, processor), gather=whole.gather) if part else work


def _word_errors(model: nn.Module, processor: Any, validation: ShardBatches | None, profile: Profile) -> Score | None:
    """Return what counts the (errors, words) in what the model writes of a batch's clips, as `evaluate` does."""
    if profile.keep_best != "wer" or validation is None:
        return None
    known = {sample.id: sample for sample in validation.samples}

    def count(batch: Batch) -> tuple[float, float]:
        clips = [known[name] for name in batch["ids"]]
        found = evaluate(
            model, processor, clips, language=profile.language or None, task=profile.task, temperatures=GREEDY
        )
        return found.normalized.errors, found.normalized.words

    return count


def _load_model(profile: Profile, part: str) -> tuple[Any, Any, Any]:
    """Return the model as it was published, as it is trained (with adapters), and the processor."""
    model, processor = load_base(profile.base_model, profile, part=part)
    set_language(model, profile.language or None, profile.task)
    if part == DECODER:
        skeleton(model, profile, part=ENCODER)  # the adapters of the encoder are drawn first, as on one rank
    return model, prepare(model, profile), processor


def _samplers(
    spec: RunSpec, train: ShardBatches, validation: ShardBatches | None
) -> tuple[ElasticSampler, ElasticSampler | None]:
    kind = StagedSampler if spec.is_pipeline else ElasticSampler
    sampler = kind(train, spec.hosts, spec.name)
    validator = kind(validation, spec.hosts, spec.name) if validation is not None else None
    if isinstance(sampler, StagedSampler) and isinstance(validator, StagedSampler):
        sampler.validation = validator
    return sampler, validator


def _fit_settings(spec: RunSpec) -> FitSettings:
    profile, strategy = spec.profile, spec.strategy_settings
    assert profile and strategy
    return FitSettings(
        strategy=strategy_of(strategy),
        num_epochs=profile.epochs,
        max_steps=profile.max_steps or None,
        num_nodes=spec.world_size,
        device=spec.wanted_device,
        precision=profile.precision,
        seed=profile.seed,
        save_dir=str(Path(spec.run_dir) / CHECKPOINTS),
        checkpoint_interval=profile.checkpoint_interval,
        keep_checkpoints=profile.keep_checkpoints,
        resume=spec.resume,
        auto_shares=spec.shares == "auto",
        early_stopping=profile.early_stopping,
        keep_best=bool(profile.keep_best),
    )


class _Clips:
    """The clips of all ranks. All ranks read the same lists, so all come to the same plans without asking."""

    def __init__(self, spec: RunSpec, model, processor, events: Events, unsent: Container[str]):
        assert spec.profile and spec.strategy_settings
        self._spec, self._profile, self._strategy, self._events = spec, spec.profile, spec.strategy_settings, events
        profile = spec.profile
        self._encoder = label_encoder(model, processor.tokenizer, language=profile.language or None, task=profile.task)

        def warn(what: str) -> None:
            events({"type": "warning", "what": what})

        self._features = FeatureStore(Path(spec.cache_dir) / "features", processor.feature_extractor, warn=warn)
        self._audio_pull = AudioPull(events, unsent)
        self._cost = Cost.of_model(model.config, encoder_is_stored=profile.caches_encoder)
        self.encoder_store: EncoderStore | None = None
        if profile.caches_encoder:
            folder = Path(spec.cache_dir) / "encoder"
            self.encoder_store = EncoderStore(folder, model.model.encoder, precision=profile.precision, warn=warn)

    def batches(self, manifest: Path, *, shuffle: bool) -> ShardBatches:
        profile, strategy = self._profile, self._strategy
        # Audio of other hosts' shards is not on this machine, at first.
        known = load_manifest(
            manifest,
            check_audio=False,
            max_duration_s=profile.max_duration_s,
            no_speech=profile.no_speech == "train",
            repeats=True,
        )
        return ShardBatches(
            known.samples,
            profile,
            features=self._features,
            labels=self._encoder,
            encoder_store=self.encoder_store,
            shuffle=shuffle,
            missing_audio=self._audio_pull,
            steps_in_round=strategy.H if type(strategy) is DiLoCoConfig and shuffle else 1,
            cost=self._cost,
            on_problem=lambda problem: self._events({"type": "problem", "what": str(problem)}),
        )

    def make_room(self, sets: Sequence[tuple[ShardBatches, ElasticSampler]]) -> None:
        """Keep room for what the encoder makes of the clips of the next epoch, if that is stored."""
        if self.encoder_store:
            needed = sum(batches.stored_bytes(sampler.next_numbers()) for batches, sampler in sets)
            all_of_machine = needed * self._spec.machine_workers  # they have about equal shares
            self.encoder_store.make_room(all_of_machine, int(self._profile.encoder_cache_gb * 1e9))

    def prepare(
        self, batches: ShardBatches, numbers: Sequence[int], speeds: Sequence[float], stopped: Callable[[], bool]
    ) -> None:
        """Compute the log-mels of the clips that this rank is going to read; the audio of some may not be here."""
        self._features.prepare(
            [batches.samples[number].audio for number in numbers],
            lambda done, total: self._events({"type": "preparing", "done": done, "total": total}),
            speeds=speeds,
            threads=self._profile.num_threads or max(1, (os.cpu_count() or 1) // self._spec.machine_workers),
            stopped=stopped,
        )


class AudioPull:
    """Asks the launcher for audio that this host lacks: when a host is lost, the others train its clips.

    The launcher puts it into place over SSH; whoever reads a clip waits for it here.
    """

    def __init__(self, events: Events, unsent: Container[str]):
        """unsent: what the launcher has said that it cannot send."""
        self._events, self._unsent = events, unsent
        self._wanted: set[str] = set()
        self._next_look = 0.0
        self._last_arrival = 0.0

    def order(self, samples: Sequence[Sample]) -> None:
        """Ask for clips in the order in which they are needed; not again for those that are here or on their way."""
        new = [_name(s) for s in samples if _name(s) not in self._wanted and not s.audio.exists()]
        self._wanted.update(new)
        if new:
            self._events({"type": "want", "files": new})

    def wait(self, sample: Sample, given_up: Callable[[], bool] = lambda: False) -> None:
        """Return once the file is here, nobody needs it, or it will not come: opening it fails then."""
        name, began = _name(sample), time.monotonic()
        while name in self._wanted and not sample.audio.exists() and not given_up():
            now = time.monotonic()
            if now >= self._next_look:  # for what has arrived; and the launcher is told that this worker waits
                self._next_look = now + LOOK_S
                if arrived := {name for name in list(self._wanted) if Path(name).exists()}:
                    self._wanted -= arrived
                    self._last_arrival = now
                self._events({"type": "alive"})
            quiet_since = max(began, self._last_arrival)
            if name in self._unsent or time.monotonic() - quiet_since > LONGEST_S:
                return
            time.sleep(POLL_S)


def _name(sample: Sample) -> str:
    """The name by which the launcher knows it: relative to the project folder, in which a worker runs."""
    return os.path.relpath(sample.audio)
