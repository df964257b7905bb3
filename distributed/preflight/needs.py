"""What a job needs of each host: memory, disk, a device; and whether the master can read the job's own files."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.hosts.agent_call import remedy_for
from distributed.hosts.paths import PROJECT, STORE
from distributed.hosts.sync import SPARE_BYTES
from distributed.plan.job import Job
from whisper_tuner.config import Profile
from whisper_tuner.data.check import check_manifest, check_usable
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.errors import ExitStatus, TunerError
from whisper_tuner.model.memory import profile_memory, shape_of, trained_parameters

from .report import Problem

CODE_BYTES = 2 << 20
FEATURE_BYTES_PER_S = 32_000  # float32 log-mel of 80 bands, kept on disk
CHECKPOINT_BYTES = 24  # of a trained parameter: its value, AdamW's moments, the strategy's own
UNEVEN = 1.2  # the largest share over the mean one
OPENED = 4  # audio files, of each end of a manifest


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes of one worker. What the host holds already of `sent` counts in its favour.

    memory: with whole batches; least: with one clip at a time.
    """

    memory: int | None = None
    least: int | None = None
    sent: int = 0
    kept: int = SPARE_BYTES
    device: str = "auto"


def needs_of(job: Job | None, hosts: int, manifests: Sequence[Manifest] = ()) -> Needs:
    """An estimate; the sync counts to the byte. Without manifests their part is left out."""
    if job is None:
        return Needs()
    profile = job.profile
    samples = [sample for manifest in manifests for sample in manifest.samples]
    seconds = sum(sample.duration_s for sample in samples)
    data = sum(_size(sample.audio) for sample in samples) + seconds * FEATURE_BYTES_PER_S
    shape = shape_of(profile.base_model)
    trained = trained_parameters(shape, profile) if shape else 0
    longest = max((sample.duration_s for sample in samples), default=None)
    checkpoints = (profile.keep_checkpoints + 1) * CHECKPOINT_BYTES * trained
    return Needs(
        memory=profile_memory(profile, longest_s=longest),
        least=profile_memory(profile, longest_s=longest, clips=1),
        sent=CODE_BYTES + _model_bytes(profile) + int(data / hosts * UNEVEN),
        kept=SPARE_BYTES + checkpoints,
        device=profile.device,
    )


def read_own_files(job: Job, host: str, stop: threading.Event) -> tuple[list[Manifest], list[Problem]]:
    """Open on the master what the run will open. On a Mac a folder may be there and yet be closed to us.

    Raises Stopped once `stop` is set.
    """
    profile, manifests, problems = job.profile, [], []

    def wrong(what: str, remedy: str) -> None:
        problems.append(Problem(hosts=(host,), what=what, remedy=remedy, check="files", status=ExitStatus.DATA))

    if (folder := Path(profile.base_model)).is_dir():
        for path in _unreadable(sorted(folder.iterdir()) if os.access(folder, os.R_OK | os.X_OK) else [folder]):
            wrong(*path)
    for path in dict.fromkeys(filter(None, (profile.train, profile.validation, profile.test))):
        try:
            manifest = check_manifest(path, profile.max_duration_s, PROJECT / STORE, stop)
            check_usable(manifest)
        except TunerError as error:
            wrong(error.args[0], error.remedy)
            continue
        audio = [sample.audio for sample in manifest.samples]
        for found in _unreadable(dict.fromkeys([*audio[:OPENED], *audio[-OPENED:]])):
            wrong(*found)
        if path != profile.test:
            manifests.append(manifest)
    return manifests, problems


def _unreadable(paths) -> list[tuple[str, str]]:
    """(what, remedy) of the first path that cannot be opened."""
    for path in paths:
        try:
            if path.is_dir():
                next(path.iterdir(), None)
            else:
                with path.open("rb") as stream:
                    stream.read(1)
        except OSError as error:
            return [(f"{path} cannot be read: {error.strerror}", remedy_for(error.errno) or "Check the path.")]
    return []


def _model_bytes(profile: Profile) -> int:
    folder = Path(profile.base_model)
    if folder.is_dir():
        return sum(_size(path) for path in folder.rglob("*"))
    shape = shape_of(profile.base_model)
    return 4 * shape.parameters if shape else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
