"""run(spec): the one way in. The same job as one process, as one of N processes, or on one of N machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from exogym.config import build_strategy
from exogym.train_node import TrainResult
from exogym.trainer import FitSettings
from whisper_tuner.batches import BatchShape, ShardBatches
from whisper_tuner.config import Profile
from whisper_tuner.dataset import Sample, load_manifest
from whisper_tuner.errors import ConfigError
from whisper_tuner.export import save_final
from whisper_tuner.features import FeatureCache
from whisper_tuner.labels import label_encoder, split_encodable
from whisper_tuner.models import LoraSettings, load_base, prepare, set_language
from whisper_tuner.shards import assign_shards

from .bundle import run_bundle
from .lifeline import Lifeline
from .network_trainer import NetworkTrainer
from .spec import CHECKPOINTS, RunSpec, profile_from_json
from .whisper_wrapper import WhisperModelWrapper

Events = Callable[[dict], None]


def run(spec: RunSpec, *, events: Events, lifeline: Lifeline) -> TrainResult:
    """Be one rank from beginning to end. Rank 0 leaves the trained model in run_dir/final."""
    if spec.bundle:
        return run_bundle(spec, events=events, lifeline=lifeline)
    if spec.profile is None:
        raise ConfigError("run spec: neither a profile nor a bundle")
    profile = profile_from_json(spec.profile)
    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    torch.manual_seed(profile.seed)
    events({"type": "phase", "phase": "load"})
    model, processor = load_base(profile.base_model)
    set_language(model, profile.language or None, profile.task)
    data = _Data(spec, profile, model, processor, events)
    model = prepare(
        model,
        method=profile.method,
        lora=LoraSettings(
            rank=profile.lora_r,
            alpha=profile.lora_alpha,
            dropout=profile.lora_dropout,
            target_modules=profile.lora_targets,
        ),
        dropout=profile.dropout,
        gradient_checkpointing=profile.gradient_checkpointing,
    )
    wrapper = WhisperModelWrapper(model, processor, "cpu")  # TrainNode moves it to the device
    trainer = NetworkTrainer.for_rank(spec, wrapper, data.train, data.validation)
    lifeline.rescue = lambda: _rescue(trainer, spec)
    result = trainer.run_rank(
        spec.rank, _fit_settings(spec, profile), events=events, should_stop=lifeline.stopping.is_set
    )
    if spec.rank == 0:
        save_final(model.cpu(), processor, Path(spec.run_dir) / "final", profile.base_model)
    events({"type": "done", "steps": result.steps, "seconds": result.seconds, "stopped": result.stopped})
    return result


def _fit_settings(spec: RunSpec, profile: Profile) -> FitSettings:
    return FitSettings(
        strategy=build_strategy(spec.strategy, spec.strategy_settings),
        num_epochs=profile.epochs,
        max_steps=profile.max_steps or None,
        num_nodes=spec.world_size,
        device=None if profile.device == "auto" else profile.device,
        precision=profile.precision,
        seed=profile.seed,
        checkpoint_dir=str(Path(spec.run_dir) / CHECKPOINTS),
        checkpoint_interval=spec.checkpoint_interval,
        keep_checkpoints=spec.keep_checkpoints,
        resume=spec.resume,
    )


class _Data:
    """This rank's batches. Every rank reads the same lists of samples and so comes to the same plan."""

    def __init__(self, spec: RunSpec, profile: Profile, model, processor, events: Events):
        self._profile, self._events = profile, events
        self._encoder = label_encoder(model, processor.tokenizer, language=profile.language or None, task=profile.task)
        self._features = FeatureCache(Path(spec.cache_dir) / "features", processor.feature_extractor)
        self._names = profile.shards or spec.hosts
        self._serves = range(spec.rank, len(self._names), spec.world_size)
        self.train = self._batches(profile.train, shuffle=True)
        self.validation = self._batches(profile.validation, shuffle=False) if profile.validation else None

    def _batches(self, manifest: Path, *, shuffle: bool) -> ShardBatches:
        profile = self._profile
        per_step = profile.batch_size * len(self._serves)
        return ShardBatches(
            assign_shards(self._samples(manifest), self._names),
            serves=self._serves,
            features=self._features,
            labels=self._encoder,
            shape=BatchShape(
                batch_size=profile.batch_size,
                micro_batch=-(-per_step // profile.accumulation) if profile.accumulation > 1 else None,
                audio_context=profile.audio_context,
            ),
            seed=profile.seed,
            shuffle=shuffle,
            on_problem=lambda problem: self._events({"type": "problem", "what": str(problem)}),
        )

    def _samples(self, manifest: Path) -> list[Sample]:
        # Audio of other hosts' shards is not on this machine.
        samples = load_manifest(manifest, max_duration_s=self._profile.max_duration_s, check_audio=False).samples
        kept, problems = split_encodable(samples, self._encoder)
        for problem in problems:
            self._events({"type": "problem", "what": f"{manifest.name}: {problem}"})
        return kept


def _rescue(trainer: NetworkTrainer, spec: RunSpec) -> None:
    """Keep the last agreed weights where the launcher can no longer fetch them."""
    agreed = trainer.agreed()
    if agreed is not None:
        folder = Path(spec.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "agreed.safetensors.part"
        save_file({"agreed": agreed}, part)
        part.replace(folder / "agreed.safetensors")
