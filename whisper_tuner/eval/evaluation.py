"""Transcribes clips with a model and compares the result with their transcripts.

Features are padded to 30 s and go through transformers' own `generate`, because every runtime will use the model in
this way. A shortcut of this program would report a quality that nobody else sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.features import log_mel, pad_log_mel
from whisper_tuner.data.labels import is_multilingual
from whisper_tuner.data.problems import Problem
from whisper_tuner.errors import TunerError
from whisper_tuner.eval.predictions import Prediction
from whisper_tuner.eval.wer import ErrorRates, error_rates, text_normalizer
from whisper_tuner.languages import joined, language_code, text_language
from whisper_tuner.model.base_model import whisper_of

Progress = Callable[[int, int], None]
"""Called with (clips done, clips in all)."""

_SHORTEST_TAIL_S = 0.1  # a shorter last piece of a long recording holds no word


@dataclass(frozen=True)
class Transcript:
    """What the model wrote; `problem` says why an unreadable file has no text."""

    text: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rates over the clips in `rows`; unreadable clips are in `problems` and count in no rate."""

    raw: ErrorRates
    normalized: ErrorRates
    rows: tuple[Prediction, ...]
    problems: tuple[Problem, ...]
    seconds: float  # that the transcription took

    @property
    def speed(self) -> float:
        """Seconds of audio that were transcribed per second."""
        return sum(row.sample.duration_s for row in self.rows) / max(self.seconds, 1e-9)


def evaluate(
    model: nn.Module,
    processor: WhisperProcessor,
    samples: Sequence[Sample],
    *,
    language: str | None = None,
    task: str | None = None,
    batch_size: int = 8,
    features: FeatureStore | None = None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Transcribe every sample and compare; an unreadable file becomes a Problem. Arguments are as in `transcribe`."""
    began = time.perf_counter()
    heard = transcribe(
        model,
        processor,
        [sample.audio for sample in samples],
        language=language,
        task=task,
        batch_size=batch_size,
        features=features,
        progress=progress,
    )
    seconds = time.perf_counter() - began
    _, written = generation_settings(whisper_of(model), language, task)
    normalize = text_normalizer(written)
    pairs = list(zip(samples, heard, strict=True))
    rows = tuple(Prediction(s, t.text, (normalize(s.text), normalize(t.text))) for s, t in pairs if not t.problem)
    return Evaluation(
        raw=error_rates([row.sample.text for row in rows], [row.hypothesis for row in rows]),
        normalized=error_rates([row.normalized[0] for row in rows], [row.normalized[1] for row in rows]),
        rows=rows,
        problems=tuple(Problem(s.line, f"{s.id}: {t.problem}") for s, t in pairs if t.problem),
        seconds=seconds,
    )


def transcribe(
    model: nn.Module,
    processor: WhisperProcessor,
    audio: Sequence[str | Path | np.ndarray],
    *,
    language: str | None = None,
    task: str | None = None,
    batch_size: int = 8,
    features: FeatureStore | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Transcript]:
    """One Transcript for each audio file or log-mel [80|128, frames], in order.

    Recordings longer than the model's input (30 s) are cut into pieces and their texts joined.
    language: of the speech. Without it or a task, a multilingual model assumes what it was trained for; if it was
    trained for no language, it detects one. English-only models ignore both.
    Takes plain and peft models on any device, and leaves their training mode as it was.
    """
    texts: list[list[str]] = [[] for _ in audio]
    problems: dict[int, str] = {}
    whisper = whisper_of(model)
    arguments, written = generation_settings(whisper, language, task)
    # Half the context, as in OpenAI's decoding: a model that does not know the language repeats itself to the end.
    arguments |= {"num_beams": 1, "max_new_tokens": whisper.config.max_target_positions // 2}
    windows = _windows(audio, processor, features, problems)
    with evaluating(model), torch.inference_mode():
        while batch := list(islice(windows, batch_size)):
            ids = whisper.generate(**model_inputs(whisper, [window for _, window in batch]), **arguments)
            heard = processor.batch_decode(ids, skip_special_tokens=True)
            for (index, _), text in zip(batch, heard, strict=True):
                texts[index].append(text.strip())
            progress(batch[-1][0] + 1, len(audio))
    progress(len(audio), len(audio))
    return [Transcript(joined(text, written), problems.get(index, "")) for index, text in enumerate(texts)]


def _windows(
    audio: Sequence[str | Path | np.ndarray],
    processor: WhisperProcessor,
    features: FeatureStore | None,
    problems: dict[int, str],
) -> Iterator[tuple[int, np.ndarray]]:
    """(index, log-mel padded to the model's full length); fills `problems` with what cannot be read."""
    full = processor.feature_extractor.nb_max_frames
    for index, item in enumerate(audio):
        try:
            for mel in [item] if isinstance(item, np.ndarray) else _log_mels(Path(item), processor, features):
                yield index, pad_log_mel(mel, full)
        except TunerError as error:
            problems[index] = " - ".join(str(error).split("\n  "))


def _log_mels(path: Path, processor: WhisperProcessor, features: FeatureStore | None) -> Iterator[np.ndarray]:
    extractor = processor.feature_extractor
    if features is not None and (mel := features.log_mel(path)).shape[1] < extractor.nb_max_frames:
        yield mel  # a stored one of full length may be cut, so that clip is read again
        return
    waveform = load_audio(path, extractor.sampling_rate)
    for start in range(0, len(waveform), extractor.n_samples):
        piece = waveform[start : start + extractor.n_samples]
        if start == 0 or len(piece) >= _SHORTEST_TAIL_S * extractor.sampling_rate:
            yield log_mel(piece, extractor)


def model_inputs(whisper: WhisperForConditionalGeneration, mels: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """What `generate` takes of log-mels [80|128, frames] of one length."""
    features = torch.from_numpy(np.stack(mels)).to(whisper.device, whisper.dtype)  # [B, n_mels, frames]
    # Whisper masks nothing, but without a mask transformers warns that pad equals end-of-text.
    mask = torch.ones(len(mels), features.shape[-1], dtype=torch.long, device=features.device)
    return {"input_features": features, "attention_mask": mask}


def generation_settings(
    whisper: WhisperForConditionalGeneration, language: str | None, task: str | None
) -> tuple[dict[str, object], str | None]:
    """(arguments for `generate`, code of the language that is written: None if the model writes whatever it hears).

    A language or task that is not given is the one that the model was trained for.
    """
    multilingual, trained_for = is_multilingual(whisper), whisper.generation_config
    language = language or (getattr(trained_for, "language", None) if multilingual else "en")
    spoken = language_code(language) if language else None
    task = task or getattr(trained_for, "task", None) or "transcribe"
    arguments = {"task": task} | ({"language": spoken} if spoken else {})
    return arguments if multilingual else {}, text_language(spoken, task)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
