"""A file in whisper.cpp's ggml format, `ggml-model.bin`.

The layout is that of models/README.md and src/whisper.cpp in whisper.cpp: a magic number, sizes, mel filters, the
tokens as bytes, and then each weight with its name. whisper.cpp has a converter as a script of its repository only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from whisper_tuner.export.formats import Format, Merged, Speech
from whisper_tuner.export.openai import dimensions, weights

FILE = "ggml-model.bin"
MAGIC = 0x67676D6C  # "ggml"
QUANTIZATION_VERSION = 2 * 1000  # is added to the type of a file with quantised weights
# In this order, by OpenAI's names.
SIZES = (
    *("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
    *("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels"),
)
# Of a file, and of a weight in it.
# There is none of float32 alone: whisper.cpp's convolutions need 16 bits.
TYPES = {
    "float32": (0, 0),
    "float16": (1, 1),
    "q8_0": (7 + QUANTIZATION_VERSION, 8),
    "q5_0": (8 + QUANTIZATION_VERSION, 6),
}
# Kept in float32.
WHOLE = ("encoder.conv1.bias", "encoder.conv2.bias", "encoder.positional_embedding", "decoder.positional_embedding")


def write(merged: Merged, folder: Path, precision: str) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from whisper_tuner.export.final import vocabularies

    sizes = dimensions(merged.model)
    with (folder / FILE).open("wb") as file:
        _integers(file, MAGIC, *(sizes[name] for name in SIZES), TYPES[precision][0])
        filters = np.asarray(merged.processor.feature_extractor.mel_filters, dtype=np.float32).T  # [mels, 201]
        _integers(file, *filters.shape)
        file.write(np.ascontiguousarray(filters).tobytes())
        # The tokens of text; whisper.cpp knows the special ones by their numbers.
        tokenizer = merged.processor.tokenizer
        as_byte = {character: byte for byte, character in bytes_to_unicode().items()}
        tokens, _ = vocabularies(tokenizer)
        _integers(file, len(tokens))
        for token in tokens:
            content = token.encode() if token == tokenizer.eos_token else bytes(as_byte[letter] for letter in token)
            _integers(file, len(content))
            file.write(content)
        for name, tensor in weights(merged.model).items():
            values = tensor.float().numpy()
            if name in WHOLE[:2]:
                values = values[:, None]
            kind, content = _stored(name, values, precision)
            _integers(file, values.ndim, len(name), kind, *reversed(values.shape))
            file.write(name.encode())
            file.write(content)


def listener(folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
    """Decode with whisper.cpp, through pywhispercpp."""
    from pywhispercpp.model import Model

    model = Model(
        str(folder / FILE),
        redirect_whispercpp_logs_to=None,
        language=speech.language or "auto",
        translate=speech.task == "translate",
        no_timestamps=True,
        single_segment=True,
        print_progress=False,
        temperature_inc=0.0,  # plain greedy decoding, as of the others
    )

    def heard(waveform: np.ndarray) -> str:
        return "".join(segment.text for segment in model.transcribe(waveform))

    return heard


def _stored(name: str, values: np.ndarray, precision: str) -> tuple[int, bytes]:
    """Return a weight's type and bytes: vectors and positions stay whole, convolutions have 16 bits at least."""
    if values.ndim < 2 or name in WHOLE:
        return TYPES["float32"][1], values.astype(np.float32).tobytes()
    if precision == "float16" or values.ndim > 2:
        return TYPES["float16"][1], values.astype(np.float16).tobytes()
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    kind = TYPES[precision][1]
    return kind, quantize(values.astype(np.float32), GGMLQuantizationType(kind)).tobytes()


def _integers(file: BinaryIO, *values: int) -> None:
    file.write(struct.pack(f"<{len(values)}i", *values))


FORMAT = Format(
    name="whisper.cpp",
    runtime="whisper.cpp",
    precisions=("float16", "q8_0", "q5_0"),
    extra="whisper-cpp",
    quantizing=("gguf",),
    running=("pywhispercpp",),
    write_files=write,
    listener=listener,
    use="    whisper-cli -m {folder}/ggml-model.bin{languages} --no-timestamps -f speech.wav\n",
    languages=" -l {language}",
)
