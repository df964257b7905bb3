"""A folder that plain transformers loads, adapters merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from whisper_tuner.export.formats import Format, Merged, Speech


def write(merged: Merged, folder: Path, precision: str) -> None:
    from whisper_tuner.export.final import save_processor

    model = merged.model
    if precision == "float16":
        halves = {tensor.data_ptr(): tensor.half() for tensor in model.state_dict().values()}  # tied ones stay tied
        stored = {name: halves[tensor.data_ptr()] for name, tensor in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=stored)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"dtype": "float16"}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        model.save_pretrained(folder)
    save_processor(merged.processor, folder)


def listener(folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
    """Decode with transformers' `generate`, in float32: on a CPU half precision is slow."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = WhisperProcessor.from_pretrained(folder)
    asked = {}
    if model.generation_config.is_multilingual:
        asked = {"language": speech.language, "task": speech.task}

    def heard(waveform: np.ndarray) -> str:
        inputs = processor(
            waveform,
            sampling_rate=processor.feature_extractor.sampling_rate,
            return_tensors="pt",
            return_attention_mask=True,
        )
        ids = model.generate(**inputs, **asked, return_timestamps=False, num_beams=1, do_sample=False)
        return processor.batch_decode(ids, skip_special_tokens=True)[0]

    return heard


FORMAT = Format(
    name="transformers",
    runtime="transformers",
    precisions=("float32", "float16"),
    knows_all_tokens=True,
    takes_any_model=True,
    write_files=write,
    listener=listener,
    use="""\
    from transformers import pipeline

    transcribe = pipeline("automatic-speech-recognition", model="{folder}")
    print(transcribe("speech.wav"{languages})["text"])  # longer than 30 s: with return_timestamps=True
""",
    languages=', generate_kwargs={{"language": "{language}", "task": "{task}"}}',
)
