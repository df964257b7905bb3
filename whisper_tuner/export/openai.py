"""OpenAI's own checkpoint, `model.pt`, for openai-whisper; and its names of weights, which others use too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisper_tuner.export.formats import Format, Merged, Speech

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import WhisperForConditionalGeneration

FILE = "model.pt"
# From transformers' names to OpenAI's, applied one after the other.
NAMES = (
    (r"^(encoder|decoder)\.layers\.", r"\1.blocks."),
    (r"\bself_attn_layer_norm\b", "attn_ln"),
    (r"\bencoder_attn_layer_norm\b", "cross_attn_ln"),
    (r"\bself_attn\b", "attn"),
    (r"\bencoder_attn\b", "cross_attn"),
    (r"\bq_proj\b", "query"),
    (r"\bk_proj\b", "key"),
    (r"\bv_proj\b", "value"),
    (r"\bout_proj\b", "out"),
    (r"\bfc1\b", "mlp.0"),
    (r"\bfc2\b", "mlp.2"),
    (r"\bfinal_layer_norm\b", "mlp_ln"),
    (r"^encoder\.layer_norm\b", "encoder.ln_post"),
    (r"^decoder\.layer_norm\b", "decoder.ln"),
    (r"\bembed_positions\.weight$", "positional_embedding"),
    (r"\bembed_tokens\b", "token_embedding"),
)


def weights(model: WhisperForConditionalGeneration) -> dict[str, Tensor]:
    """Return all of them by OpenAI's names. The output layer has none: it is the token embedding."""
    found = {}
    for name, tensor in model.model.state_dict().items():
        for pattern, theirs in NAMES:
            name = re.sub(pattern, theirs, name)
        found[name] = tensor.detach()
    return found


def dimensions(model: WhisperForConditionalGeneration) -> dict[str, int]:
    """Return what OpenAI calls ModelDimensions."""
    config = model.config
    return {
        "n_mels": config.num_mel_bins,
        "n_audio_ctx": config.max_source_positions,
        "n_audio_state": config.d_model,
        "n_audio_head": config.encoder_attention_heads,
        "n_audio_layer": config.encoder_layers,
        "n_vocab": config.vocab_size,
        "n_text_ctx": config.max_target_positions,
        "n_text_state": config.d_model,
        "n_text_head": config.decoder_attention_heads,
        "n_text_layer": config.decoder_layers,
    }


def write(merged: Merged, folder: Path, precision: str) -> None:
    import torch

    dtype = torch.float16 if precision == "float16" else torch.float32
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in weights(merged.model).items()}
    with (folder / FILE).open("wb") as file:
        try:
            torch.save({"dims": dimensions(merged.model), "model_state_dict": stored}, file)
        except RuntimeError as error:  # of torch's writer, when the file has refused to be written
            raise error.__context__ or error from None


def listener(folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
    """Decode with openai-whisper itself."""
    import whisper

    model = whisper.load_model(str(folder / FILE), device="cpu")
    options = whisper.DecodingOptions(language=speech.language, task=speech.task, without_timestamps=True, fp16=False)

    def heard(waveform: np.ndarray) -> str:
        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(waveform), model.dims.n_mels)
        return whisper.decode(model, mel, options).text

    return heard


FORMAT = Format(
    name="openai",
    runtime="openai-whisper",
    precisions=("float16", "float32"),
    extra="openai",
    running=("whisper",),
    write_files=write,
    listener=listener,
    use="    whisper speech.wav --model {folder}/model.pt{languages}\n",
    languages=" --language {language} --task {task}",
)
