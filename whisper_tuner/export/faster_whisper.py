"""A CTranslate2 folder for faster-whisper, made by CTranslate2's own converter."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from whisper_tuner.export import folder as transformers_folder
from whisper_tuner.export.formats import Format, Merged, Speech

COPIED = ["tokenizer.json", "preprocessor_config.json"]
WINDOW = 480_000  # samples: 30 s


def write(merged: Merged, folder: Path, precision: str) -> None:
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as whole:
        transformers_folder.write(merged, Path(whole), "float32")
        TransformersConverter(whole, copy_files=COPIED).convert(str(folder), quantization=precision, force=True)


def listener(folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
    """Decode with faster-whisper itself; what is stored as float16 it computes in float32 where there is no GPU."""
    from faster_whisper import WhisperModel

    model = WhisperModel(str(folder), device="cpu")
    asked = {"language": speech.language, "task": speech.task, "beam_size": 1, "temperature": 0.0}
    asked |= {"without_timestamps": True, "condition_on_previous_text": False}
    # Plain greedy decoding, as of the others: what is thought improbable is neither left out nor tried again.
    asked |= {"log_prob_threshold": None, "no_speech_threshold": None, "compression_ratio_threshold": None}

    def heard(waveform: np.ndarray) -> str:
        # Other runtimes fill a short clip up with silence; this one would do it with log-mels of 0, which is noise.
        filled = np.pad(waveform, (0, max(0, WINDOW - len(waveform))))
        segments, _ = model.transcribe(filled, **asked)
        return "".join(segment.text for segment in segments)

    return heard


FORMAT = Format(
    name="faster-whisper",
    runtime="faster-whisper",
    precisions=("float16", "float32", "int8"),
    extra="faster-whisper",
    writing=("ctranslate2",),
    running=("faster_whisper",),
    knows_all_tokens=True,
    has_output_layer=True,
    write_files=write,
    listener=listener,
    use="""\
    from faster_whisper import WhisperModel

    model = WhisperModel("{folder}")
    segments, _ = model.transcribe("speech.wav"{languages}, without_timestamps=True)
    print("".join(segment.text for segment in segments))
""",
    languages=', language="{language}", task="{task}"',
)
