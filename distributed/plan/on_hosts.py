"""What one host is given: its spec, with paths as they are there, and its files."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.hosts.paths import STORE, SyncItem, code_items, folder_items
from distributed.ssh.host import Host
from whisper_tuner.data.dataset import Manifest, Sample, write_manifest
from whisper_tuner.hub import model_folder

from .run_spec import RunSpec


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


def audio_items(kind: str, manifest: Manifest) -> list[SyncItem]:
    """Return the recordings of a manifest, in its order, with their names on hosts."""
    folder = _folder_on_hosts(kind, manifest)
    names = {sample.audio: _name_on_host(sample, manifest) for sample in manifest.samples}  # a clip may be there twice
    return [SyncItem(local=audio, remote=f"{folder}/{name}") for audio, name in names.items()]


def _folder_on_hosts(kind: str, manifest: Manifest) -> str:
    return f"{STORE}/data/{kind}-{_short_hash(str(manifest.path.absolute()))}"


def _name_on_host(sample: Sample, manifest: Manifest) -> str:
    folder = manifest.path.absolute().parent
    audio = sample.audio.absolute()
    if audio.is_relative_to(folder) and ".." not in audio.parts:
        return audio.relative_to(folder).as_posix()
    return f"elsewhere/{_short_hash(str(audio))}{audio.suffix}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
