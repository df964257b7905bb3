"""What a run needs on each host: the specs of all ranks, and the files that go with them."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path

from distributed.hosts.paths import PROJECT, STORE, SyncItem
from distributed.run_dir.folder import date_in
from distributed.ssh.host import Hosts
from whisper_tuner.config import Profile
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest, write_manifest
from whisper_tuner.data.labels import with_timestamps
from whisper_tuner.data.splitting import LOOKS_BETTER
from whisper_tuner.data.steps import assign_shards, steps_in_epoch
from whisper_tuner.errors import ConfigError, RunError
from whisper_tuner.hub import model_folder
from whisper_tuner.model.memory import DECODER, fastest, shape_of, trained_parameters, ways_of
from whisper_tuner.text import counted

from .automatic import CHECKPOINT_BYTES, Conditions, Measured, chosen, more_bytes
from .data_sets import checked_data
from .job import Job
from .launch import Launch, Rank, save_items
from .on_hosts import audio_items, for_host
from .run_spec import PIPELINE, RunSpec

ShowStatus = Callable[[str], AbstractContextManager]
STAGES = 2  # of a pipeline: encoder and decoder
RECORDED = ("torch", "transformers", "peft", "numpy", "safetensors")
FEW_STEPS = 25  # between checkpoints: to write one of whisper-tiny takes a core as long as two steps on short clips
COPIED = 0.5e9  # bytes of a checkpoint in a second, while training waits: what a slow core copies to new memory
UNBROKEN_S = 3600.0  # assumed until all hosts are gone at once: what one of them loses others have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before it starts. `items` are the files of each host but the master, by address.

    rounds: what its rounds are like, as `automatic.chosen` says it.
    """

    launch: Launch
    items: dict[str, list[SyncItem]]
    shards: list[list[Sample]]
    steps_per_epoch: int
    total_steps: int
    manifests: Mapping[str, Manifest]
    kept: Sequence[Manifest] = ()
    rounds: str = ""

    @property
    def clips(self) -> dict[str, int]:
        """Return how many clips there are of each kind."""
        counts = {kind: len(manifest.samples) for kind, manifest in self.manifests.items()}
        return counts | {"kept": sum(len(manifest.samples) for manifest in self.kept)}


def prepare_run(
    job: Job,
    run_dir: Path,
    *,
    hosts: Hosts | None = None,
    local_ranks: int = 1,
    address: str = "127.0.0.1",
    show_status: ShowStatus = nullcontext,
    machine_workers: Sequence[int] = (),
    measured: Callable[[], Measured] | None = None,
) -> Prepared:
    """Read the manifests, share out the clips, write what every rank will be told. Raises DataError, ConfigError.

    `show_status` shows what takes its time. machine_workers: see RunSpec, for each of `hosts`. measured: asked once
    all has been checked; what the strategy's open settings go by, which keep their defaults without it.
    """
    profile = job.profile
    labels = tuple(host.address for host in hosts.all) if hosts else _local_labels(local_ranks)
    if is_pipeline := job.distribution.strategy == PIPELINE:
        check_pipeline(job, len(labels))
    if local_ranks > 1 and not profile.num_threads:  # ranks of one machine share its cores
        profile = dataclasses.replace(profile, num_threads=max(1, (os.cpu_count() or 1) // local_ranks))
    (checked, kept), profile = checked_data(job, profile, len(labels), run_dir, show_status), with_timestamps(profile)
    manifests = _written(checked, run_dir)
    shards = _shards(manifests, profile.shards or labels, whole=is_pipeline)
    clips, shard_count = len(manifests["train"].samples), 1 if is_pipeline else len(shards["train"])
    steps_per_epoch = steps_in_epoch(clips, shard_count, profile.batch_size, job.dealt_over)
    total_steps = min(steps_per_epoch * profile.epochs, profile.max_steps or sys.maxsize)
    conditions, rounds = None, ""
    if measured and (shape := shape_of(str(model_folder(profile.base_model)))):  # else the defaults stay
        parameters, known = trained_parameters(shape, profile), measured()
        profile = _fitting(job, profile, known, len(labels), manifests["train"])
        conditions = Conditions(parameters=parameters, hosts=len(labels), steps=total_steps, measured=known)
        job, rounds = chosen(job, conditions)
    interval = profile.checkpoint_interval or _checkpoint_interval(job, total_steps, conditions)
    spec = RunSpec(  # what all ranks are told alike; the files are still the user's own
        run_id=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(PROJECT / STORE / "cache"),
        world_size=len(labels),
        hosts=labels,
        profile=dataclasses.replace(profile, checkpoint_interval=interval),
        strategy=job.distribution.strategy,
        strategy_settings=job.strategy_config(total_steps),
        shares="fixed" if is_pipeline else job.distribution.shares,
        shares_open=not is_pipeline and "shares" not in job.origin and job.distribution.shares == "auto",
        yield_when=job.distribution.yield_when,
    )
    sharing = machine_workers or [1 if hosts else len(labels)] * len(labels)
    ranks, items = _ranks(_with_shares(spec, sharing if hosts else ()), hosts, sharing, manifests, shards, run_dir)
    return Prepared(
        launch=_launch(job, ranks, checked, kept, address, hosts),
        items=items,
        shards=shards["train"],
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        manifests=checked,
        kept=kept,
        rounds=_told_of_pipeline(labels, interval) if is_pipeline else rounds,
    )


def _written(checked: Mapping[str, Manifest], run_dir: Path) -> dict[str, Manifest]:
    """Write the lists of the clips to train on and to validate with, and return these manifests."""
    manifests = {kind: manifest for kind, manifest in checked.items() if kind != "test"}
    for kind, manifest in manifests.items():
        write_manifest(run_dir / f"{kind}.csv", manifest.samples)
    return manifests


def check_pipeline(job: Job, ranks: int) -> None:
    """Raise ConfigError for what a model in two stages does not go with."""
    profile, origin = job.profile, job.origin

    def refuse(what: str, remedy: str) -> None:
        raise ConfigError(f"{origin.get('strategy', job.name)}: strategy = {PIPELINE} {what}", remedy=remedy)

    if ranks != STAGES:
        what = f"has the encoder on one host and the decoder on another: it needs {STAGES} hosts, not {ranks}"
        refuse(what, "Choose two in the hosts file, or another strategy.")
    if not profile.trains_encoder:
        refuse("is for training both halves", "Remove it: a frozen encoder takes little memory on one host.")
    if job.distribution.yield_when:
        refuse("needs both hosts at every step, and yield_when lets one leave", "Remove yield_when.")


def _shards(manifests: Mapping[str, Manifest], names: Sequence[str], *, whole: bool) -> dict[str, list[list[Sample]]]:
    """Share the clips of each kind among the hosts. whole: each has all of them."""
    if whole:
        return {kind: [[*manifest.samples] for _ in names] for kind, manifest in manifests.items()}
    return {kind: assign_shards(manifest.samples, names) for kind, manifest in manifests.items()}


def _told_of_pipeline(labels: Sequence[str], interval: int) -> str:
    kept = f"`--resume` goes on from the last checkpoint, which is kept every {counted(interval, 'step')}"
    return f"the encoder is on {labels[0]}, the decoder on {labels[1]}; if one of them is lost the run ends, and {kept}"


def _local_labels(ranks: int) -> tuple[str, ...]:
    return ("localhost",) if ranks == 1 else tuple(f"rank{number}" for number in range(ranks))


def _fitting(job: Job, profile: Profile, known: Measured, ranks: int, train: Manifest) -> Profile:
    """Hold what is frozen in fewer bits where one machine has too little memory; of several it is known before."""
    if known.room_bytes is None:
        return profile
    longest = max(sample.duration_s for sample in train.samples)
    more = more_bytes(job.strategy_config(total_steps=1), ranks)
    part = DECODER if job.distribution.strategy == PIPELINE else ""  # the larger one
    ways = ways_of(profile, longest_s=longest, device=known.device, more_bytes=more, part=part)
    way = fastest(ways, known.room_bytes / ranks) if ways else None
    return dataclasses.replace(profile, frozen_precision=way.frozen_precision) if way else profile


def _launch(
    job: Job,
    ranks: tuple[Rank, ...],
    manifests: Mapping[str, Manifest],
    kept: Sequence[Manifest],
    address: str,
    hosts: Hosts | None,
) -> Launch:
    added: Counter[str] = Counter()
    for each in manifests["train"].added:  # two sets may name one list, each for a task
        added[str(each.path)] += len(each.samples)
    return Launch(
        run_id=ranks[0].spec.run_id,
        name=job.name,
        ranks=ranks,
        address=address,
        timeout_s=job.distribution.round_timeout_s,
        min_hosts=len(ranks) if ranks[0].spec.is_pipeline else min(job.distribution.min_hosts, len(ranks)),
        notify=job.distribution.notify,
        manifests={kind: str(manifest.path) for kind, manifest in manifests.items() if kind != "test"},
        test_clips=len(manifests["test"].samples) if "test" in manifests else 0,
        test=str(job.profile.test) if job.profile.test else None,
        keeps=job.keeps,
        master=hosts.master if hosts else None,
        created=date_in(ranks[0].spec.run_id) or time.time(),
        versions={name: metadata.version(name) for name in RECORDED},
        stated=tuple(sorted(job.origin)),
        leaks=tuple(note for one in (*manifests.values(), *kept) for note in one.notes if LOOKS_BETTER in note),
        added=dict(added),
    )


def _with_shares(spec: RunSpec, machine_workers: Sequence[int]) -> RunSpec:
    """Settle whether speeds count: where ranks share a machine, the speed of one is the others' doing.

    machine_workers: of each host; none without hosts.
    """
    if not spec.shares_open:
        return spec
    return dataclasses.replace(spec, shares="auto" if {*machine_workers} == {1} else "fixed")


def _checkpoint_interval(job: Job, total_steps: int, conditions: Conditions | None) -> int:
    """Return the rounds between checkpoints: an interruption of all hosts is to cost about a twentieth of a run, or a
    few steps; and with DiLoCo, where the time of a step is known, no more of them than they are worth.

    By Young's rule (1974) most is saved where they are sqrt(2 x the time of one x the time to an interruption) apart.
    """
    config = job.strategy_config(total_steps)
    rounds = max(round(total_steps / config.steps_in_round / 20), math.ceil(FEW_STEPS / config.steps_in_round), 1)
    if job.distribution.strategy != "diloco" or conditions is None or not conditions.measured.step_s:
        return rounds
    one_s = CHECKPOINT_BYTES * conditions.parameters / COPIED
    round_s = conditions.of_worked_steps(job).round_s(config)
    return max(rounds, round(math.sqrt(2 * one_s * UNBROKEN_S) / round_s))


def rehost(
    launch: Launch, hosts: Hosts, run_dir: Path, machine_workers: Sequence[int]
) -> tuple[Launch, dict[str, list[SyncItem]]]:
    """Return run.json and each host's files for the run on other hosts, or on the same ones with other settings.

    Nothing of the run is changed yet: see `change_hosts`. Raises RunError, DataError.
    """
    labels = tuple(host.address for host in hosts.all)
    manifests = {}
    for kind, users_own in launch.manifests.items():
        # The rows that the run began with, also where a clip is gone by now: all ranks must have the same list.
        own_list = run_dir / f"{kind}.csv"
        samples = load_manifest(own_list, check_audio=False, no_speech=True, repeats=True).samples
        manifests[kind] = Manifest(Path(users_own), samples, ())
    was = launch.ranks[0].spec
    if was.is_pipeline and len(labels) != STAGES:
        raise RunError(f"the run is a pipeline of {STAGES} hosts, not of {len(labels)}", remedy="Resume it on two.")
    shards = _shards(manifests, labels, whole=was.is_pipeline)
    spec = dataclasses.replace(was, world_size=len(labels), hosts=labels)
    ranks, items = _ranks(_with_shares(spec, machine_workers), hosts, machine_workers, manifests, shards, run_dir)
    min_hosts = len(labels) if was.is_pipeline else min(launch.min_hosts, len(labels))
    return dataclasses.replace(launch, ranks=ranks, master=hosts.master, min_hosts=min_hosts), items


def _ranks(
    spec: RunSpec,
    hosts: Hosts | None,
    machine_workers: Sequence[int],
    manifests: Mapping[str, Manifest],
    shards: Mapping[str, list[list[Sample]]],
    run_dir: Path,
) -> tuple[tuple[Rank, ...], dict[str, list[SyncItem]]]:
    """Return what each rank is told, and the files of each host but the master, which are remembered for later.

    shards: by kind, the shard that each rank begins with.
    """
    ranks, items = [], {}
    profile = spec.known_profile
    # This machine reads the run's own lists, which name the audio where the user has it.
    validation = run_dir / "validation.csv" if profile.validation else None
    here = dataclasses.replace(profile, train=run_dir / "train.csv", validation=validation, test=None)
    for number, label in enumerate(spec.hosts):
        own = dataclasses.replace(spec, rank=number, machine_workers=machine_workers[number])
        host = hosts.all[number] if hosts else None
        if number and host:
            shard = {kind: of_all[number] for kind, of_all in shards.items()}
            own, items[host.address] = for_host(own, host, manifests, shard, run_dir)
            ranks.append(Rank(label=label, spec=own, host=host))
        else:
            own = dataclasses.replace(own, profile=here)
            ranks.append(Rank(label=label, spec=own.on(host) if host else own))
    save_items(run_dir, items, [item for kind, manifest in manifests.items() for item in audio_items(kind, manifest)])
    return tuple(ranks), items
