"""`multimac transcribe`: what is said in audio files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whisper_tuner.errors import ExitStatus


def transcribe(audio: Sequence[Path], model_path: str, language: str) -> ExitStatus:
    from exogym import device as devices
    from whisper_tuner.evaluation import transcribe
    from whisper_tuner.export import load_model

    model, processor = load_model(model_path)
    failed = False
    for path in audio:
        [heard] = transcribe(model.to(devices.choose()), processor, [path], language=language or None)
        name = f"{path}: " if len(audio) > 1 else ""
        print(f"{name}{heard.problem or heard.text}")
        failed |= bool(heard.problem)
    return ExitStatus.DATA if failed else ExitStatus.OK
