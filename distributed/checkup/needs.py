"""Estimates what a job needs of each host: memory, disk, a device; and tries the job's own files on the master."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.hosts.agent_call import remedy_for
from distributed.hosts.paths import PROJECT, STORE
from distributed.hosts.sync import SPARE_BYTES
from distributed.plan.automatic import CHECKPOINT_BYTES, more_bytes
from distributed.plan.job import Job
from whisper_tuner.config import Profile
from whisper_tuner.data.check import check_manifest, check_usable
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import DataError, TunerError
from whisper_tuner.model.check import check_model
from whisper_tuner.model.memory import best_bytes, profile_memory, shape_of, trained_parameters

from .findings import Finding

CODE_BYTES = 2 << 20
FEATURE_BYTES_PER_S = 16_000  # fp16 log-mel of 80 bands, kept on disk
UNEVEN = 1.2  # the largest share over the mean one
OPENED = 4  # audio files, of each end of a manifest


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Counts bytes of one worker. What the host holds already of `sent` counts in its favour.

    memory: with whole batches; least: with one clip at a time. on_mps, on_cuda: both of them on a Mac's GPU, which
    takes more, and of a card's own memory.
    """

    memory: int | None = None
    least: int | None = None
    on_mps: tuple[int | None, int | None] = (None, None)
    on_cuda: tuple[int | None, int | None] = (None, None)
    sent: int = 0
    kept: int = SPARE_BYTES
    device: str = "auto"


def needs_of(job: Job | None, hosts: int, manifests: Sequence[Manifest] = ()) -> Needs:
    """Estimate the needs; the sync counts to the byte. Without manifests their part is left out."""
    if job is None:
        return Needs()
    profile = job.profile
    samples = [sample for manifest in manifests for sample in manifest.samples]
    data = sum(_size(sample.audio) + sample.duration_s * FEATURE_BYTES_PER_S for sample in samples)
    longest = max((sample.duration_s for sample in samples), default=None)
    trained = 0
    if shape := shape_of(profile.base_model):
        trained = trained_parameters(shape, profile)
    # `doctor` asks for one machine of several: so no less than for two ranks.
    more = more_bytes(job.strategy_config(total_steps=1), max(2, hosts))
    at_least = replace(profile, gradient_checkpointing=True)  # as the worker does where one clip would not fit
    (whole, least), on_mps, on_cuda = (
        [
            profile_memory(one, clips=clips, device=device, longest_s=longest, more_bytes=more)
            for one, clips in ((profile, None), (at_least, 1))
        ]
        for device in ("cpu", "mps", "cuda")
    )
    return Needs(
        memory=whole,
        least=least,
        on_mps=tuple(on_mps),
        on_cuda=tuple(on_cuda),
        sent=CODE_BYTES + _model_bytes(profile) + int(data / hosts * UNEVEN),
        kept=SPARE_BYTES + (profile.keep_checkpoints + 1) * (CHECKPOINT_BYTES + best_bytes(profile)) * trained,
        device=profile.device,
    )


def read_own_files(job: Job, host: str, stop: threading.Event) -> tuple[list[Manifest], list[Finding]]:
    """Open on the master what the run will open. On a Mac a folder may be there and yet be closed to us.

    Raises Stopped once `stop` is set.
    """
    profile, manifests, problems = job.profile, [], []

    def wrong(error: TunerError) -> None:
        what, status = error.args[0], error.exit_status
        problems.append(Finding(hosts=(host,), what=what, remedy=error.remedy, check="files", status=status))

    try:
        check_model(profile)
    except TunerError as error:
        wrong(error)
    paths = {kind: path for kind in ("train", "validation", "test") if (path := getattr(profile, kind))}
    for kind, path in paths.items():
        try:
            no_speech = profile.no_speech == "train"
            manifest = check_manifest(
                path,
                profile.max_duration_s,
                PROJECT / STORE,
                stop,
                no_speech=no_speech,
                reading=Reading.of(profile),
                kind=kind,
            )
            check_usable(manifest)
            audio = [sample.audio for sample in manifest.samples]
            _try_to_open(dict.fromkeys([*audio[:OPENED], *audio[-OPENED:]]))
        except TunerError as error:
            wrong(error)
            continue
        if kind != "test":
            manifests.append(manifest)
    return manifests, problems


def _try_to_open(paths: Iterable[Path]) -> None:
    """Raises DataError for the first one that cannot be opened."""
    for path in paths:
        try:
            with path.open("rb") as stream:
                stream.read(1)
        except OSError as error:
            remedy = remedy_for(error.errno) or "Check the path."
            raise DataError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from None


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
