"""One rank of a user's own model: opens the bundle that was sent, trains, saves weights and result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_model

from distributed.control.channel import ControlChannel
from distributed.plan.run_spec import RESULT, WEIGHTS, Bundle, RunSpec
from whisper_tuner.errors import RunError
from whisper_tuner.files import atomic_folder

from .rank_trainer import RankTrainer


def run_bundle(spec: RunSpec, *, events: Callable[[dict], None], channel: ControlChannel) -> Callable[[Path], None]:
    """Be one rank of a user's own model, see train.run. Raises RunError if the file is not the one that was sent."""
    model, train, validation, settings = _unpickled(spec.bundle)
    if spec.device:
        settings = dataclasses.replace(settings, device=spec.wanted_device)
    trainer = RankTrainer(spec, channel, model, train, validation)
    events({"type": "ready"})
    result = trainer.run_rank(spec.rank, settings, events=events, should_stop=channel.stopping.is_set)
    events({"type": "done", "steps": result.steps, "seconds": result.seconds, "stopped": result.stopped})

    def save(run_dir: Path) -> None:
        with atomic_folder(run_dir / "final") as final:
            save_model(model.cpu(), str(final / WEIGHTS))
            (final / RESULT).write_text(json.dumps(dataclasses.asdict(result)))

    return save


def _unpickled(bundle: Bundle) -> tuple:
    data = Path(bundle.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != bundle.sha256:
        raise RunError(f"{bundle.path} is not the file that was sent", remedy="Start the run again.")
    return pickle.loads(data)
