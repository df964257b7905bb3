"""ONNX as optimum lays it out: `onnx/encoder_model.onnx` and `onnx/decoder_model_merged.onnx` beside the processor.

At each precision the files have the same names, and take and give float32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisper_tuner.export.formats import Format, Merged, Speech

if TYPE_CHECKING:
    from onnx import ModelProto
    from onnxruntime import InferenceSession

ENCODER, DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
LARGEST = 1_900_000_000  # bytes in one file: protobuf ends at 2 GiB. Above, weights lie in a file beside it
SMALLEST = 1024  # bytes of a weight that does


def write(merged: Merged, folder: Path, precision: str) -> None:
    import onnx
    import torch

    from whisper_tuner.export import graphs
    from whisper_tuner.export.final import save_processor

    dtype = torch.float16 if precision == "float16" else torch.float32
    encoder, *steps = graphs.encoder_graph(merged.model, dtype), *graphs.decoder_graphs(merged.model, dtype)
    if precision == "int8":
        encoder, *steps = map(_quantized, (encoder, *steps))
    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    graph_of = {ENCODER: encoder, DECODER: graphs.merged(*steps)}
    large = [name for name, graph in graph_of.items() if graph.ByteSize() > LARGEST]
    for name, graph in graph_of.items():
        location, path = f"{name}_data" if name in large else None, folder / "onnx" / name
        onnx.save_model(graph, path, save_as_external_data=name in large, location=location, size_threshold=SMALLEST)
    # transformers.js takes the files whose names tell no precision.
    for_javascript = {"dtype": "fp32"} | ({"use_external_data_format": dict.fromkeys(large, True)} if large else {})
    config = merged.model.config.to_dict() | {"transformers.js_config": for_javascript}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    merged.model.generation_config.save_pretrained(folder)
    save_processor(merged.processor, folder)


def listener(folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
    """Decode with onnxruntime, on the CPU. The loop around it is this project's; `generate` is not involved."""
    import onnxruntime
    from transformers import GenerationConfig, WhisperConfig, WhisperProcessor

    encoder, decoder = (
        onnxruntime.InferenceSession(folder / "onnx" / name, providers=["CPUExecutionProvider"])
        for name in (ENCODER, DECODER)
    )
    processor = WhisperProcessor.from_pretrained(folder)
    settings: Any = GenerationConfig.from_pretrained(folder)  # has what its file has
    longest = WhisperConfig.from_pretrained(folder).max_target_positions // 2  # as OpenAI's decoding
    rate = processor.feature_extractor.sampling_rate

    def heard(waveform: np.ndarray) -> str:
        features = processor.feature_extractor(waveform, sampling_rate=rate, return_tensors="np").input_features
        [audio] = encoder.run(None, {"input_features": features})
        step = _Steps(decoder, audio)
        prompt = [settings.decoder_start_token_id]
        if settings.is_multilingual:
            languages = settings.lang_to_id
            if speech.language:
                language = languages[f"<|{speech.language}|>"]
            else:
                after_start = _Steps(decoder, audio)(prompt)
                language = max(languages.values(), key=lambda token: after_start[token])
            prompt += [language, settings.task_to_id[speech.task]]
        logits = step([*prompt, settings.no_timestamps_token_id])
        tokens: list[int] = []
        logits[settings.begin_suppress_tokens or []] = -np.inf
        while len(tokens) < longest:
            logits[settings.suppress_tokens or []] = -np.inf
            if (token := int(logits.argmax())) == settings.eos_token_id:
                break
            tokens.append(token)
            logits = step([token])
        return processor.decode(tokens, skip_special_tokens=True)

    return heard


class _Steps:
    """The decoder with what it keeps: of tokens that follow those before, the logits [vocabulary] after the last."""

    def __init__(self, decoder: InferenceSession, audio: np.ndarray) -> None:
        self.decoder, self.audio = decoder, audio
        self.past = {
            each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32)
            for each in decoder.get_inputs()
            if each.name.startswith("past")
        }
        self.is_later = False

    def __call__(self, tokens: list[int]) -> np.ndarray:
        given = {"input_ids": np.array([tokens]), "encoder_hidden_states": self.audio}
        given |= self.past | {"use_cache_branch": np.array([self.is_later])}
        presents = [name.replace("past_key_values", "present") for name in self.past]
        logits, *present = self.decoder.run(["logits", *presents], given)
        kept = zip(self.past, present, strict=True)
        self.past |= {name: value for name, value in kept if not (self.is_later and ".encoder." in name)}
        self.is_later = True
        return logits[0, -1]


def _quantized(graph: ModelProto) -> ModelProto:
    """Matrices in 8 bits; what they are multiplied with is rounded while it runs."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from whisper_tuner.export.graphs import quiet

    with tempfile.TemporaryDirectory() as folder, quiet():
        out = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            graph,
            out,
            op_types_to_quantize=["MatMul", "Gather"],
            weight_type=QuantType.QUInt8,
            use_external_data_format=graph.ByteSize() > LARGEST,
        )
        return onnx.load(out)


FORMAT = Format(
    name="onnx",
    runtime="onnxruntime",
    precisions=("float32", "float16", "int8"),
    extra="onnx",
    writing=("onnx", "onnxscript"),
    quantizing=("onnxruntime",),
    running=("onnxruntime",),
    knows_all_tokens=True,
    takes_any_model=True,
    write_files=write,
    listener=listener,
    use="""\
    # optimum-onnx needs transformers 4, so in an environment of its own: pip install 'optimum-onnx[onnxruntime]'
    from optimum.onnxruntime import ORTModelForSpeechSeq2Seq
    from transformers import WhisperProcessor, pipeline

    processor = WhisperProcessor.from_pretrained("{folder}")
    transcribe = pipeline(
        "automatic-speech-recognition",
        model=ORTModelForSpeechSeq2Seq.from_pretrained("{folder}"),
        tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor,
    )
    print(transcribe("speech.wav"{languages})["text"])
""",
    languages=', generate_kwargs={{"language": "{language}", "task": "{task}"}}',
)
