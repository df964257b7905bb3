"""A user's own model at a rank: opens the bundle that was sent, and saves weights and result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path

from safetensors.torch import save_model

from distributed.plan.run_spec import RESULT, WEIGHTS, RunSpec
from exogym.train_node import TrainResult
from whisper_tuner.errors import RunError
from whisper_tuner.files import atomic_folder

from .rank_trainer import RankWork


def load_bundle(spec: RunSpec) -> RankWork:
    """Open the bundle. Raises RunError if the file is not the one that was sent."""
    data = Path(spec.bundle.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != spec.bundle.sha256:
        raise RunError(f"{spec.bundle.path} is not the file that was sent", remedy="Start the run again.")
    model, train, validation, settings = pickle.loads(data)
    if spec.device:
        settings = dataclasses.replace(settings, device=spec.wanted_device)

    def save(folder: Path, result: TrainResult) -> None:
        with atomic_folder(folder) as final:
            save_model(model.cpu(), str(final / WEIGHTS))
            (final / RESULT).write_text(json.dumps(dataclasses.asdict(result)))

    return RankWork(model=model, train=train, validation=validation, settings=settings, save=save)
