"""A saved model's weights, as ranks hash them when they compare theirs."""

from __future__ import annotations

from pathlib import Path

from exogym.flat import FlatParameters, digest
from whisper_tuner.config import Profile
from whisper_tuner.export.final import load_model
from whisper_tuner.model.base_model import prepare


def saved_digest(run_dir: Path) -> int:
    """Of the weights in final/. The run must have trained all of them."""
    final = run_dir / "final"
    model, _ = load_model(final)
    return digest(FlatParameters(prepare(model, Profile(base_model=str(final), train=final))).read())
