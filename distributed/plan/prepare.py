"""What a run needs on each host: the specs of all ranks, and the files that go with them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from distributed.hosts.code import SyncItem, code_items, folder_items
from distributed.hosts.paths import PROJECT, STORE
from distributed.ssh.host import Host, Hosts
from whisper_tuner.config import Profile
from whisper_tuner.data.check import check_data
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest, write_manifest
from whisper_tuner.data.shards import assign_shards
from whisper_tuner.errors import ConfigError
from whisper_tuner.hub import model_folder
from whisper_tuner.model.check import check_model

from .files import save_items
from .job import Job
from .launch import Launch, Rank
from .run_spec import CHECKPOINTS, RunSpec, profile_from_json, profile_to_json

Busy = Callable[[str], AbstractContextManager]
RECORDED = ("torch", "transformers", "peft", "numpy", "safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before it starts. `items` are the files of each host but the master, by address."""

    launch: Launch
    items: dict[str, list[SyncItem]]
    shards: list[list[Sample]]
    steps_per_epoch: int
    total_steps: int
    manifests: tuple[Manifest, ...]


def prepare_run(
    job: Job,
    run_dir: Path,
    *,
    hosts: Hosts | None = None,
    local_ranks: int = 1,
    address: str = "127.0.0.1",
    busy: Busy = nullcontext,
    machine_workers: Sequence[int] = (),
) -> Prepared:
    """Read the manifests, deal out the shards, write what every rank will be told. Raises DataError, ConfigError.

    `busy` shows what takes its time. machine_workers: see RunSpec, for each of `hosts`.
    """
    profile = job.profile
    labels = [host.address for host in hosts.all] if hosts else _local_labels(local_ranks)
    if local_ranks > 1 and not profile.num_threads:
        profile = dataclasses.replace(profile, num_threads=max(1, (os.cpu_count() or 1) // local_ranks))
    if profile.shards and len(labels) > 1:
        raise ConfigError("shards is for one machine that trains alone", remedy="Remove shards from the profile.")
    check_model(profile)
    with busy("reading the manifests, and the headers of the audio"):
        checked = check_data(profile, run_dir, PROJECT / STORE)
    model_folder(profile.base_model, show=True)  # a download may take long: in sight, before any worker waits for it
    manifests = {kind: manifest for kind, manifest in checked.items() if kind != "test"}
    shards = {kind: assign_shards(manifest.samples, profile.shards or labels) for kind, manifest in manifests.items()}
    for kind, manifest in manifests.items():
        write_manifest(run_dir / f"{kind}.csv", manifest.samples)
    steps_per_epoch = max(math.ceil(len(shard) / profile.batch_size) for shard in shards["train"])
    total_steps = min(steps_per_epoch * profile.epochs, profile.max_steps or math.inf)
    base = RunSpec(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        cache_dir=str(PROJECT / STORE / "cache"),
        world_size=len(labels),
        hosts=tuple(labels),
        strategy=job.distribution.strategy,
        strategy_settings=_settings(job, total_steps),
        shares=job.distribution.shares,
        checkpoint_interval=profile.checkpoint_interval or _twentieth(job, total_steps),
        keep_checkpoints=profile.keep_checkpoints,
    )
    sharing = machine_workers or [1 if hosts else len(labels)] * len(labels)
    ranks, items = _ranks(profile, base, hosts, sharing, manifests, shards, run_dir)
    launch = Launch(
        run_id=run_dir.name,
        name=job.name,
        ranks=ranks,
        address=address,
        timeout_s=job.distribution.round_timeout_s,
        min_hosts=min(job.distribution.min_hosts, len(labels)),
        manifests={kind: str(manifest.path) for kind, manifest in manifests.items()},
        test=str(profile.test) if profile.test else None,
        master=hosts.master if hosts else None,
        created=time.time(),
        versions={name: metadata.version(name) for name in RECORDED},
    )
    save_items(run_dir, items, [item for manifest in manifests.items() for item in _audio(*manifest)] if hosts else [])
    return Prepared(
        launch=launch,
        items=items,
        shards=shards["train"],
        steps_per_epoch=steps_per_epoch,
        total_steps=int(total_steps),
        manifests=tuple(checked.values()),
    )


def rehost(
    launch: Launch, hosts: Hosts, run_dir: Path, machine_workers: Sequence[int]
) -> tuple[Launch, dict[str, list[SyncItem]]]:
    """The same run on other hosts: their specs, and their files. Raises RunError, DataError."""
    labels = tuple(host.address for host in hosts.all)
    first = launch.ranks[0]
    profile = profile_from_json(first.spec.profile)
    manifests = {
        kind: Manifest(Path(path), load_manifest(run_dir / f"{kind}.csv").samples, ())
        for kind, path in launch.manifests.items()
    }
    shards = {kind: assign_shards(manifest.samples, labels) for kind, manifest in manifests.items()}
    base = dataclasses.replace(first.spec, world_size=len(labels), hosts=labels)
    ranks, items = _ranks(profile, base, hosts, machine_workers, manifests, shards, run_dir)
    save_items(run_dir, items, [item for manifest in manifests.items() for item in _audio(*manifest)])
    for old in (run_dir / CHECKPOINTS).glob(f"*/{quote(first.label, safe='')}.*"):  # this machine has another address
        old.rename(old.with_name(old.name.replace(quote(first.label, safe=""), quote(labels[0], safe=""))))
    min_hosts = min(launch.min_hosts, len(labels))
    return dataclasses.replace(launch, ranks=ranks, master=hosts.master, min_hosts=min_hosts), items


def _ranks(
    profile: Profile,
    base: RunSpec,
    hosts: Hosts | None,
    machine_workers: Sequence[int],
    manifests: dict[str, Manifest],
    shards: dict[str, list[list[Sample]]],
    run_dir: Path,
) -> tuple[tuple[Rank, ...], dict[str, list[SyncItem]]]:
    """What each rank is told, and the files of each host but the master."""
    ranks, items = [], {}
    for number, label in enumerate(base.hosts):
        host = hosts.all[number] if hosts else None
        base = dataclasses.replace(base, machine_workers=machine_workers[number])
        if host is None or number == 0:
            here = _on_master(profile, run_dir, host)
            spec = dataclasses.replace(base, rank=number, profile=here, interface=(host and host.interface) or "")
            ranks.append(Rank(label=label, spec=spec))
        else:
            own = {kind: lists[number] for kind, lists in shards.items()}
            spec, items[host.address] = for_host(profile, base, number, host, manifests, own, run_dir)
            ranks.append(Rank(label=label, spec=spec, host=host))
    return tuple(ranks), items


def _twentieth(job: Job, total_steps: int) -> int:
    """Rounds between checkpoints, so that an interruption costs at most about a twentieth of a run."""
    round_steps = job.distribution.communication_interval if job.distribution.strategy == "diloco" else 1
    return max(1, round(total_steps / round_steps / 20))


def _settings(job: Job, total_steps: int) -> dict:
    config = dataclasses.asdict(job.strategy_config(total_steps))
    return {key: value for key, value in config.items() if value is not None}


def _local_labels(ranks: int) -> list[str]:
    return ["localhost"] if ranks == 1 else [f"rank{number}" for number in range(ranks)]


def _on_master(profile: Profile, run_dir: Path, host: Host | None) -> dict:
    values = profile_to_json(profile) | {"train": str(run_dir / "train.csv"), "test": None}
    values["validation"] = str(run_dir / "validation.csv") if profile.validation else None
    if host and host.device:
        values["device"] = host.device
    return values


def for_host(
    profile: Profile,
    base: RunSpec,
    rank: int,
    host: Host,
    manifests: dict[str, Manifest],
    shards: dict[str, Sequence[Sample]],
    run_dir: Path,
) -> tuple[RunSpec, list[SyncItem]]:
    """One host's spec and files. Paths in the spec are relative to its project folder, where its worker runs."""
    model = model_folder(profile.base_model)
    model_name = f"{STORE}/models/{model.name}-{_short_hash(str(model))}"
    items = [*code_items(), *folder_items(model, model_name)]
    values = profile_to_json(profile) | {"base_model": model_name, "test": None, "validation": None}
    values |= {"runs_dir": "runs", "device": host.device or profile.device}
    for kind, manifest in manifests.items():
        folder = _folder_on_hosts(kind, manifest)
        listing = run_dir / f"{kind}-on-hosts.csv"
        there = {sample.id: _name_on_host(sample, manifest) for sample in manifest.samples}
        # The same list for every host: relative names, so that it can stand beside any host's audio.
        write_manifest(listing, [dataclasses.replace(s, audio=run_dir / there[s.id]) for s in manifest.samples])
        items.append(SyncItem(local=listing, remote=f"{folder}/{kind}.csv"))
        own = {sample.audio for sample in shards[kind]}
        items += [item for item in _audio(kind, manifest) if item.local in own]
        values[kind] = f"{folder}/{kind}.csv"
    spec = dataclasses.replace(
        base,
        rank=rank,
        run_dir=f"runs/{base.run_id}",
        cache_dir=f"{STORE}/cache",
        profile=values,
        interface=host.interface or "",
    )
    return spec, items


def _folder_on_hosts(kind: str, manifest: Manifest) -> str:
    return f"{STORE}/data/{kind}-{_short_hash(str(manifest.path.absolute()))}"


def _audio(kind: str, manifest: Manifest) -> list[SyncItem]:
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
