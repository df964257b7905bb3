"""run(spec): one rank of a run, from its RunSpec to trained weights; alone, or as one of N processes or machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import torch

from distributed.control.channel import ControlChannel
from distributed.plan.automatic import more_bytes
from distributed.plan.run_spec import CHECKPOINTS, SPEC, RunSpec
from exogym import device as devices
from exogym.samplers.elastic import ElasticSampler
from exogym.settings import FitSettings
from exogym.strategy import strategy_of
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.data.cost import Cost
from whisper_tuner.data.dataset import Sample, load_manifest
from whisper_tuner.data.encoder_store import EncoderStore
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.labels import label_encoder
from whisper_tuner.export.final import save_final
from whisper_tuner.files import write_atomically
from whisper_tuner.model.base_model import load_base, prepare, set_language
from whisper_tuner.model.memory import best_bytes
from whisper_tuner.model.wide_layers import split_wide_layers

from .audio_pull import AudioPull
from .micro_batch import RAN_OUT_REMEDY, REMEDY, fit_into_memory, out_of_memory_told, share_of_memory
from .rank_trainer import RankTrainer, RankWork
from .user_model import load_bundle
from .whisper_wrapper import WhisperModelWrapper

Events = Callable[[dict], None]
SMALLER_BATCHES = "Train with smaller batches or a smaller model; close other programs there."


def run(spec: RunSpec, *, events: Events, channel: ControlChannel) -> Callable[[], None]:
    """Be one rank from beginning to end. Returns how to save the trained model, which one rank has to do."""
    device = devices.choose(spec.wanted_device, local_rank=spec.rank)
    if device.type == "cpu":
        devices.keep_freed_memory()
    if spec.bundle:
        work = load_bundle(spec)
    else:
        events({"type": "phase", "phase": "load"})
        devices.repeat_bits(device)  # not with a model of the user's own: it may have operations that cannot
        with out_of_memory_told(REMEDY, loading=True):
            work = load_whisper(spec, events, channel.unsent, stopped=channel.stopping.is_set)
        if spec.rendezvous:
            keep_spec(spec)
    trainer = RankTrainer(spec, channel, work.model, work.train, work.validation)
    channel.rescue = trainer.rescue
    events({"type": "ready"})
    with out_of_memory_told(SMALLER_BATCHES if spec.bundle else RAN_OUT_REMEDY):
        result = trainer.run_rank(spec.rank, work.settings, events=events, should_stop=channel.stopping.is_set)
    events(
        {
            "type": "done",
            "steps": result.steps,
            "seconds": result.seconds,
            "stopped": result.stopped,
            "digest": result.digest,
        }
    )
    return lambda: work.save(Path(spec.run_dir) / spec.final, result)


def load_whisper(
    spec: RunSpec, events: Events, unsent: Container[str], *, stopped: Callable[[], bool] = lambda: False
) -> RankWork:
    """Load model and data of a profile, in parts that fit into this worker's memory. Raises TooLittleMemory.

    Log-mels are computed here, so that no step waits for them; not all of them once stopped() is true.
    """
    profile = spec.profile
    if profile.num_threads:
        torch.set_num_threads(profile.num_threads)
    torch.manual_seed(profile.seed)
    model, processor = load_base(profile.base_model)
    set_language(model, profile.language or None, profile.task)
    trained, settings = prepare(model, profile), _fit_settings(spec)
    data = _Data(spec, model, processor, events, unsent)
    share = share_of_memory(spec, settings.device)
    if share.device.type == "cpu" and profile.precision == "float32":
        devices.keep_few_primitives()
    if most := devices.most_terms(share.device):
        split_wide_layers(trained, most)
    work = RankWork(
        model=WhisperModelWrapper(
            trained,
            processor,
            "cpu",  # TrainNode moves it to the device
            label_smoothing=profile.label_smoothing,
            encoder_store=data.encoder_store,
        ),
        train=data.sampler(profile.train, shuffle=True),
        validation=data.sampler(profile.validation, shuffle=False) if profile.validation else None,
        settings=settings,
        save=lambda final, _: save_final(trained.cpu(), processor, final, profile.base_model),
    )
    if profile.gradient_checkpointing:
        work.model.checkpoint_gradients()
    fit_into_memory(
        work.model,
        work.train.samples,
        work.validation and work.validation.samples,
        share=share,
        precision=profile.precision,
        events=events,
        more_bytes=more_bytes(spec.strategy_settings, spec.world_size) + 2 * best_bytes(profile),
    )
    data.make_room(work)
    data.prepare(work, stopped)
    return work


def keep_spec(spec: RunSpec) -> None:
    """Write the spec beside the checkpoints: `runs recover` needs it to make a model of them without the master.

    Without the run's key, which is in no file.
    """
    folder = Path(spec.run_dir) / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / f"{quote(spec.name, safe='')}{SPEC}", replace(spec, rendezvous=None).to_json())


def _fit_settings(spec: RunSpec) -> FitSettings:
    profile = spec.profile
    return FitSettings(
        strategy=strategy_of(spec.strategy_settings),
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
        keep_best=profile.keep_best,
    )


class _Data:
    """The clips of all ranks. All ranks read the same lists, so all come to the same plans without asking."""

    def __init__(self, spec: RunSpec, model, processor, events: Events, unsent: Container[str]):
        self._spec, self._events = spec, events
        profile = spec.profile
        self._encoder = label_encoder(model, processor.tokenizer, language=profile.language or None, task=profile.task)
        warn = lambda what: events({"type": "warning", "what": what})  # noqa: E731
        self._features = FeatureStore(Path(spec.cache_dir) / "features", processor.feature_extractor, warn=warn)
        self._audio_pull = AudioPull(events, unsent)
        self._cost = Cost.of_model(model.config, encoder_is_stored=profile.caches_encoder)
        self.encoder_store: EncoderStore | None = None
        if profile.caches_encoder:
            folder = Path(spec.cache_dir) / "encoder"
            self.encoder_store = EncoderStore(folder, model.model.encoder, precision=profile.precision, warn=warn)

    def sampler(self, manifest: Path, *, shuffle: bool) -> ElasticSampler:
        spec, profile = self._spec, self._spec.profile
        # Audio of other hosts' shards is not on this machine, at first.
        known = load_manifest(
            manifest,
            check_audio=False,
            max_duration_s=profile.max_duration_s,
            no_speech=profile.no_speech == "train",
        )
        batches = ShardBatches(
            known.samples,
            profile,
            features=self._features,
            labels=self._encoder,
            encoder_store=self.encoder_store,
            shuffle=shuffle,
            missing_audio=self._audio_pull,
            steps_in_round=spec.strategy_settings.H if spec.strategy == "diloco" and shuffle else 1,
            cost=self._cost,
            on_problem=self._report,
        )
        return ElasticSampler(batches, spec.hosts, spec.name)

    def make_room(self, work: RankWork) -> None:
        """Make room for the outputs of the encoder, if they are kept. Raises RunError."""
        if self.encoder_store:
            samplers = filter(None, (work.train, work.validation))
            needed = sum(sampler.samples.stored_bytes(sampler.next_numbers()) for sampler in samplers)
            all_of_machine = needed * self._spec.machine_workers  # they have about equal shares
            self.encoder_store.make_room(all_of_machine, int(self._spec.profile.encoder_cache_gb * 1e9))

    def prepare(self, work: RankWork, stopped: Callable[[], bool]) -> None:
        """Compute the log-mels of the clips that this rank is going to read; the audio of some may not be here."""
        spec, profile = self._spec, self._spec.profile
        threads = profile.num_threads or max(1, (os.cpu_count() or 1) // spec.machine_workers)
        read = [(_samples(work.train, profile.max_steps or None), work.train.samples.speeds)]
        read += [(_samples(work.validation), (1.0,))] if work.validation else []
        for samples, speeds in read:
            self._features.prepare(
                [sample.audio for sample in samples],
                lambda done, total: self._events({"type": "preparing", "done": done, "total": total}),
                speeds=speeds,
                threads=threads,
                stopped=stopped,
            )

    def _report(self, problem: object) -> None:
        self._events({"type": "problem", "what": str(problem)})


def _samples(sampler: ElasticSampler, steps: int | None = None) -> list[Sample]:
    """List what this rank reads in its next epoch, or in so many steps of it."""
    return [sampler.samples.samples[number] for number in sampler.next_numbers(steps)]
