"""What a run needs on each host: the specs of all ranks, and the files that go with them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from random import Random

from distributed.hosts.paths import PROJECT, STORE, SyncItem, code_items, folder_items
from distributed.run_dir.folder import date_in
from distributed.ssh.host import Host, Hosts
from whisper_tuner.config import Profile
from whisper_tuner.data.check import check_data, check_manifest, check_usable, described, trainable
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest, write_manifest
from whisper_tuner.data.labels import token_limit, with_timestamps
from whisper_tuner.data.splitting import repeated_note
from whisper_tuner.data.steps import assign_shards, steps_in_epoch
from whisper_tuner.errors import ConfigError, DataError, RunError
from whisper_tuner.hub import check_files, check_model, model_folder
from whisper_tuner.model.memory import DECODER, fastest, shape_of, trained_parameters, ways_of
from whisper_tuner.text import counted

from .automatic import CHECKPOINT_BYTES, Conditions, Measured, chosen, more_bytes
from .job import Job, OtherSet
from .launch import Launch, Rank, save_items
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
    (checked, kept), profile = _checked(job, profile, len(labels), run_dir, show_status), with_timestamps(profile)
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
        launch=_launch(job, ranks, checked, address, hosts),
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


def _checked(
    job: Job, profile: Profile, ranks: int, run_dir: Path, show_status: ShowStatus
) -> tuple[dict[str, Manifest], list[Manifest]]:
    """Return the manifests by kind, and those of the sets to keep, once model and data are known to be usable.

    Raises ConfigError, DataError, ModelError.
    """
    if profile.shards and ranks > 1:
        raise ConfigError("shards is for one machine that trains alone", remedy="Remove shards from the profile.")
    check_model(profile)
    if profile.terms:
        from whisper_tuner.eval.terms import read_terms

        read_terms(profile.terms)
    with show_status("reading the manifests, and the headers of the audio"):
        checked = check_data(profile, run_dir, PROJECT / STORE)
        for other in job.added:
            checked["train"] = _with_more(checked, other, profile)
        kept = [_checked_kept(one, profile, checked["train"]) for one in job.keeps]
    check_files(model_folder(profile.base_model, show=True))  # a download may take long: in sight, before any worker
    return checked, kept


def _with_more(checked: Mapping[str, Manifest], other: OtherSet, profile: Profile) -> Manifest:
    """Return the training clips with a share of another set's, drawn by the profile's seed. Raises DataError."""
    train = checked["train"]
    limit = token_limit(profile.base_model, language=other.language, task=profile.task)
    found = _usable(trainable(_read(other, profile, "train"), limit), profile)
    known = {sample.audio for sample in train.samples}
    new = [sample for sample in found.samples if sample.audio not in known]
    drawn = sorted(Random(profile.seed).sample(range(len(new)), math.ceil(other.share * len(new))))
    language = other.language if other.language != profile.language else ""
    more = tuple(
        dataclasses.replace(clip, id=f"{other.name}-{clip.id}", language=clip.language or language)
        for clip in (new[at] for at in drawn)
    )
    notes = [f"{other.name}: {counted(len(more), 'clip')} of {len(found.samples)} are trained as well (also_train)"]
    notes += [f"{found.path.name}: {described(found.problems)}"] if found.problems else []
    tested = [manifest for kind, manifest in checked.items() if kind != "train"]
    drawn_set = dataclasses.replace(found, samples=more)
    notes += [note for manifest in tested if (note := repeated_note(drawn_set, manifest))]
    return dataclasses.replace(train, samples=train.samples + more, notes=(*train.notes, *found.notes, *notes))


def _read(other: OtherSet, profile: Profile, kind: str) -> Manifest:
    """Return a set's clips, read by the rules of the profile. Raises DataError."""
    no_speech = profile.no_speech == "train"
    return check_manifest(
        other.clips, profile.max_duration_s, PROJECT / STORE, no_speech=no_speech, reading=other.reading, kind=kind
    )


def _usable(manifest: Manifest, profile: Profile) -> Manifest:
    """Return a set's clips. Raises DataError if there are none, or some cannot be used and must be."""
    check_usable(manifest)
    if manifest.problems and profile.bad_rows == "refuse":
        remedy = "Fix or remove them, or set bad_rows = skip."
        raise DataError(f"{manifest.path}: {described(manifest.problems)}\n  and bad_rows = refuse", remedy=remedy)
    return manifest


def _checked_kept(kept: OtherSet, profile: Profile, train: Manifest) -> Manifest:
    """Return the test clips of a set to keep. Raises DataError."""
    manifest = _usable(_read(kept, profile, "test"), profile)
    note = repeated_note(train, manifest)
    return dataclasses.replace(manifest, notes=(*manifest.notes, note)) if note else manifest


def _launch(
    job: Job, ranks: tuple[Rank, ...], manifests: Mapping[str, Manifest], address: str, hosts: Hosts | None
) -> Launch:
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
        samples = load_manifest(run_dir / f"{kind}.csv", check_audio=False, no_speech=True).samples
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


def for_host(
    spec: RunSpec,
    host: Host,
    manifests: Mapping[str, Manifest],
    shard: Mapping[str, Sequence[Sample]],
    run_dir: Path,
) -> tuple[RunSpec, list[SyncItem]]:
    """Return one host's spec and files. Paths in the spec are relative to its project folder, where its worker runs.

    manifests, shard: by kind, all clips of the run, and those that are sent to this host before it starts.
    """
    model = model_folder(spec.known_profile.base_model)
    model_name = model_on_hosts(model)
    items, lists = [*code_items(), *folder_items(model, model_name)], {}
    for kind, manifest in manifests.items():
        # The same list for every host: its names are relative, so that it can stand beside any host's audio.
        listing = run_dir / f"{kind}-on-hosts.csv"
        samples = [dataclasses.replace(s, audio=run_dir / _name_on_host(s, manifest)) for s in manifest.samples]
        write_manifest(listing, samples)
        lists[kind] = Path(_folder_on_hosts(kind, manifest)) / f"{kind}.csv"
        items.append(SyncItem(local=listing, remote=str(lists[kind])))
        audio = {sample.audio for sample in shard[kind]}
        items += [item for item in audio_items(kind, manifest) if item.local in audio]
    profile = dataclasses.replace(
        spec.known_profile,
        base_model=model_name,
        train=lists["train"],
        validation=lists.get("validation"),
        test=None,
        terms=None,
        runs_dir=Path("runs"),
    )
    run_dir_there, cache_dir = f"runs/{spec.run_id}", f"{STORE}/cache"
    return dataclasses.replace(spec, profile=profile, run_dir=run_dir_there, cache_dir=cache_dir).on(host), items


def model_on_hosts(folder: Path) -> str:
    """Name where a host keeps a model, from its project folder."""
    return f"{STORE}/models/{folder.name}-{_short_hash(str(folder))}"


def _folder_on_hosts(kind: str, manifest: Manifest) -> str:
    return f"{STORE}/data/{kind}-{_short_hash(str(manifest.path.absolute()))}"


def audio_items(kind: str, manifest: Manifest) -> list[SyncItem]:
    """Return the clips of a manifest, in its order, with their names on hosts."""
    folder = _folder_on_hosts(kind, manifest)
    return [SyncItem(local=s.audio, remote=f"{folder}/{_name_on_host(s, manifest)}") for s in manifest.samples]


def _name_on_host(sample: Sample, manifest: Manifest) -> str:
    folder = manifest.path.absolute().parent
    audio = sample.audio.absolute()
    if audio.is_relative_to(folder) and ".." not in audio.parts:
        return audio.relative_to(folder).as_posix()
    return f"elsewhere/{_short_hash(str(audio))}{audio.suffix}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
