"""Which language a multilingual model hears in a few clips.

It listens in a process of its own: who asks must not keep gigabytes of a model, and must not wait for long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whisper_tuner.errors import TunerError


def languages_heard(model: Path, clips: Sequence[Path], limit_s: float) -> list[str]:
    """Return a code for each clip that the model of this folder has heard within limit_s; none where that fails."""
    command = [sys.executable, "-P", "-m", __name__, str(model), *map(str, clips)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=nothing, stdout=pipe, stderr=nothing, text=True) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    return said.split()


def heard(folder: str, clips: Sequence[str]) -> Iterator[str]:
    """Yield the code of each clip that can be read."""
    import torch

    from whisper_tuner.data.audio import CLIP_S, load_audio
    from whisper_tuner.data.features import log_mel, pad_log_mel
    from whisper_tuner.model.base_model import load_base

    model, processor = load_base(folder)
    settings: Any = model.generation_config  # has what its file has
    codes = {number: token.strip("<|>") for token, number in settings.lang_to_id.items()}
    extractor = processor.feature_extractor
    model.eval()
    for clip in clips:
        try:
            mel = log_mel(load_audio(clip, longest_s=CLIP_S), extractor)
        except TunerError:
            continue
        padded = torch.from_numpy(pad_log_mel(mel, extractor.nb_max_frames))[None]
        yield codes[model.detect_language(padded).item()]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what a library prints does not belong there
    os.dup2(2, 1)
    for code in heard(sys.argv[1], sys.argv[2:]):
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    main()
