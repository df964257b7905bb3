"""A folder for mlx-whisper, on Apple's MLX: `config.json` and `weights.safetensors`. To write it needs no MLX.

mlx-audio reads it too. It takes transformers' processor for the tokenizer, and its generation config for word times.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from whisper_tuner.export.formats import Format, Merged, Speech
from whisper_tuner.export.openai import dimensions, weights

COMPUTED = "encoder.positional_embedding"  # sinusoids, which MLX's Whisper makes itself


def write(merged: Merged, folder: Path, precision: str) -> None:
    import torch
    from safetensors.torch import save_file

    from whisper_tuner.export.final import save_processor

    dtype = torch.float16 if precision == "float16" else torch.float32
    stored = {}
    for name, tensor in weights(merged.model).items():
        if ".conv" in name and tensor.ndim == 3:
            tensor = tensor.transpose(1, 2)  # channels last: [out, in, width] -> [out, width, in]
        if name != COMPUTED:
            name = name.replace(".mlp.0.", ".mlp1.").replace(".mlp.2.", ".mlp2.")
            stored[name] = tensor.to(dtype).contiguous()
    save_file(stored, folder / "weights.safetensors")
    config = {**dimensions(merged.model), "model_type": "whisper"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_processor(merged.processor, folder)
    merged.model.generation_config.save_pretrained(folder)


def listener(folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
    """Decode with mlx-whisper itself: on the GPU of a Mac, else on the CPU."""
    import mlx.core as mx
    from mlx_whisper.audio import log_mel_spectrogram, pad_or_trim
    from mlx_whisper.decoding import DecodingOptions, decode
    from mlx_whisper.load_models import load_model

    model = load_model(str(folder), dtype=mx.float32)
    options = DecodingOptions(language=speech.language, task=speech.task, without_timestamps=True, fp16=False)

    def heard(waveform: np.ndarray) -> str:
        mel = log_mel_spectrogram(pad_or_trim(mx.array(waveform)), n_mels=model.dims.n_mels)
        return decode(model, mel, options).text

    return heard


FORMAT = Format(
    name="mlx",
    runtime="mlx-whisper",
    precisions=("float16", "float32"),
    extra="mlx",
    running=("mlx_whisper",),
    write_files=write,
    listener=listener,
    use="    mlx_whisper speech.wav --model {folder} --fp16 {is_half}{languages}\n",
    languages=" --language {language} --task {task}",
)
