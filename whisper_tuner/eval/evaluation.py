"""Transcribes clips with a model and compares the result with their transcripts.

Features are padded to 30 s and go through transformers' own `generate`, because every runtime will use the model in
this way. A shortcut of this program would report a quality that nobody else sees. `audio_context="cropped"` is there to
compare: the encoder then sees no more than it does in training.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.modeling_outputs import BaseModelOutput

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.checks.material import Heard
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.features import log_mel, pad_log_mel
from whisper_tuner.data.labels import added_words, is_multilingual
from whisper_tuner.errors import TunerError
from whisper_tuner.eval.decoder import Decoder
from whisper_tuner.eval.predictions import REPETITION, Prediction
from whisper_tuner.eval.wer import ErrorRates, error_rates, text_normalizers
from whisper_tuner.languages import UNSPACED, joined, language_code, text_language
from whisper_tuner.model.base_model import encode, full_frames, whisper_of
from whisper_tuner.problems import Problem

Progress = Callable[[int, int], None]
"""Called with (clips done, clips in all)."""

AUDIO_CONTEXTS = ("full", "cropped")
GREEDY = (0.0,)
# Temperatures at which a text is decoded until it is beyond doubt, as in OpenAI's decoding (see decoder.py). There they
# are six, which help no more: whisper-tiny.en on French, of which it knows none, has a WER of 224 when plainly decoded,
# 105 with these three in 1.2 times the time, and 111 with all six in three times.
FALLBACK = (0.0, 0.4, 0.8)
NO_SPEECH_TOKENS = ("<|nospeech|>", "<|nocaptions|>")  # OpenAI's name for it, and the one in transformers' checkpoints
UNKNOWN = -10.0  # log-probability of a text of which it is not known: it counts for next to nothing
_LONGEST_S = 600.0  # of a clip; no manifest has any over 30 s, but its header may lie
_SHORTEST_TAIL_S = 0.1  # a shorter last piece of a long recording holds no word
_CROP_FRAMES = 200  # cropped clips are padded to a multiple of it, 2 s: so there are few lengths, and large batches


@dataclass(frozen=True)
class Transcript:
    """A model's text for a clip; `problem` says why an unreadable file has none.

    temperature: at which it was decoded, the highest of a long recording's pieces. greedy: what it wrote at 0.
    logprob: the mean of the tokens of that, the lowest of the pieces; None if it is not known.
    """

    text: str
    problem: str = ""
    temperature: float = 0.0
    greedy: str | None = None  # as `text`, if None
    logprob: float | None = field(default=None, compare=False)

    @property
    def plain(self) -> str:
        return self.text if self.greedy is None else self.greedy


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rates over the clips in `rows`; unreadable clips are in `problems` and count in no rate.

    `greedy` are the rates, after the normaliser, of what was written before any text was decoded again. `other` are
    those after another normaliser; `normalizers` are the names of both.
    `written` is the code of the language of the texts, None if the model was told none. `seconds` are those that the
    transcription took; `cached` says that it was done in an earlier evaluation.
    """

    raw: ErrorRates
    normalized: ErrorRates
    greedy: ErrorRates
    other: ErrorRates
    normalizers: tuple[str, str]
    rows: tuple[Prediction, ...]
    problems: tuple[Problem, ...]
    seconds: float
    written: str | None
    cached: bool = False

    @property
    def speed(self) -> float:
        """Seconds of audio that were transcribed per second."""
        return sum(row.sample.duration_s for row in self.rows) / max(self.seconds, 1e-9)

    @property
    def again(self) -> list[Prediction]:
        """Clips whose first text was in doubt, so that it was decoded again, or left empty as of silence."""
        return [row for row in self.rows if row.was_in_doubt]

    @property
    def loops(self) -> int:
        """Clips in whose text a phrase repeats itself."""
        return sum(REPETITION in row.flags for row in self.rows)


def evaluate(
    model: nn.Module,
    processor: WhisperProcessor,
    samples: Sequence[Sample],
    *,
    language: str | None = None,
    task: str | None = None,
    audio_context: str = "full",
    temperatures: Sequence[float] = FALLBACK,
    batch_size: int = 8,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Transcribe every sample and compare; an unreadable file becomes a Problem. Arguments are as in `transcribe`."""
    began = time.perf_counter()
    longest_first = sorted(range(len(samples)), key=lambda place: -samples[place].duration_s)
    heard = transcribe(
        model,
        processor,
        [samples[place].audio for place in longest_first],
        language=language,
        task=task,
        audio_context=audio_context,
        temperatures=temperatures,
        batch_size=batch_size,
        progress=progress,
    )
    seconds = time.perf_counter() - began
    _, written = generation_settings(whisper_of(model), language, task)
    by_place = dict(zip(longest_first, heard, strict=True))
    return compared(samples, [by_place[place] for place in range(len(samples))], written, seconds)


def compared(
    samples: Sequence[Sample], heard: Sequence[Transcript], written: str | None, seconds: float, *, cached: bool = False
) -> Evaluation:
    """Compute the rates of what was heard in these samples; see Evaluation."""
    (name, normalize), (other_name, other) = text_normalizers(written)
    spaced = written not in UNSPACED
    pairs = list(zip(samples, heard, strict=True))
    rows = tuple(
        Prediction(
            *(s, t.text, (normalize(s.text), normalize(t.text)), t.temperature, t.plain, t.logprob),
            normalizer=name,
            spaced=spaced,
        )
        for s, t in pairs
        if not t.problem
    )
    said = [row.normalized[0] for row in rows]
    return Evaluation(
        raw=error_rates([row.sample.text for row in rows], [row.hypothesis for row in rows]),
        normalized=error_rates(said, [row.normalized[1] for row in rows], spaced=spaced),
        greedy=error_rates(said, [normalize(row.greedy) for row in rows], spaced=spaced),
        other=error_rates([other(row.sample.text) for row in rows], [other(row.hypothesis) for row in rows]),
        normalizers=(name, other_name),
        rows=rows,
        problems=tuple(Problem(s.line, f"{s.id}: {t.problem}") for s, t in pairs if t.problem),
        seconds=seconds,
        written=written,
        cached=cached,
    )


def heard_in(part: str, found: Evaluation) -> dict[tuple[str, int], Heard]:
    """Sort texts by part and line, for the check that compares them with the transcripts.

    Clips without a transcript are left out: silence contradicts nothing.
    """
    heard = {}
    for row in found.rows:
        if row.normalized[0].strip():
            logprob = UNKNOWN if row.logprob is None else round(row.logprob, 3)
            heard[part, row.sample.line] = Heard(row.hypothesis, row.rates.cer, logprob)
    return heard


def transcribe(
    model: nn.Module,
    processor: WhisperProcessor,
    audio: Sequence[str | Path | np.ndarray],
    *,
    language: str | None = None,
    task: str | None = None,
    audio_context: str = "full",
    temperatures: Sequence[float] = GREEDY,
    batch_size: int = 8,
    progress: Progress = lambda done, total: None,
) -> list[Transcript]:
    """Write a Transcript of each audio file or log-mel [80|128, frames], in order.

    Recordings longer than the model's input (30 s) are cut into pieces and their texts joined, up to _LONGEST_S.
    language: of the speech. Without it or a task, a multilingual model assumes what it was trained for; if it was
    trained for no language, it detects one. English-only models ignore both.
    audio_context: "full" pads to the model's input, "cropped" to a little more than the clip's own length.
    temperatures: a text that is in doubt is decoded at the next one, with the same random numbers in every run.
    Takes plain and peft models on any device, and leaves their training mode as it was.
    """
    if audio_context not in AUDIO_CONTEXTS:
        raise ValueError(f"audio_context {audio_context!r} is none of {', '.join(AUDIO_CONTEXTS)}")
    heard: list[dict[int, Transcript]] = [{} for _ in audio]  # of each clip, by the number of the piece
    problems: dict[int, str] = {}
    whisper = whisper_of(model)
    arguments, written = generation_settings(whisper, language, task)
    # Half the context, as in OpenAI's decoding: a model that does not know the language repeats itself to the end.
    arguments |= {"num_beams": 1, "max_new_tokens": whisper.config.max_target_positions // 2}
    words = tuple(added_words(processor.tokenizer))
    decoder = partial(Decoder, no_speech=no_speech_token(whisper, processor), words=words)
    batches = _batches(_windows(audio, processor, problems, audio_context), batch_size)
    with evaluating(model), torch.inference_mode(), ThreadPoolExecutor(1, "log-mels") as reader:
        coming = reader.submit(next, batches, None)
        while batch := coming.result():
            coming = reader.submit(next, batches, None)
            found = _heard(whisper, processor, [window.mel for window in batch], arguments, temperatures, decoder)
            for window, transcript in zip(batch, found, strict=True):
                heard[window.clip][window.piece] = transcript
            progress(sum(map(bool, heard)), len(audio))
    progress(len(audio), len(audio))
    whole = []
    for clip, by_number in enumerate(heard):
        pieces = [piece for _, piece in sorted(by_number.items())]
        whole.append(
            Transcript(
                joined([piece.text for piece in pieces], written),
                problems.get(clip, ""),
                max((piece.temperature for piece in pieces), default=0.0),
                joined([piece.plain for piece in pieces], written),
                min((piece.logprob for piece in pieces if piece.logprob is not None), default=None),
            )
        )
    return whole


@dataclass(frozen=True)
class _Window:
    """A stretch that the model hears at once: a clip, or a piece of a long one. `mel` is [80|128, frames], padded."""

    clip: int
    piece: int
    mel: np.ndarray


def _windows(
    audio: Sequence[str | Path | np.ndarray],
    processor: WhisperProcessor,
    problems: dict[int, str],
    audio_context: str,
) -> Iterator[_Window]:
    """Cut what is long, and pad all; `problems` is filled with what cannot be read."""
    full = processor.feature_extractor.nb_max_frames
    for clip, item in enumerate(audio):
        try:
            mels = [item] if isinstance(item, np.ndarray) else _log_mels(Path(item), processor)
            for piece, mel in enumerate(mels):
                near = _CROP_FRAMES * math.ceil(mel.shape[1] / _CROP_FRAMES)
                yield _Window(clip, piece, pad_log_mel(mel, min(near, full) if audio_context == "cropped" else full))
        except TunerError as error:
            problems[clip] = " - ".join(str(error).split("\n  "))


def _batches(windows: Iterable[_Window], size: int) -> Iterator[list[_Window]]:
    """Put windows of one length together."""
    waiting: defaultdict[int, list[_Window]] = defaultdict(list)
    for window in windows:
        frames = window.mel.shape[1]
        waiting[frames].append(window)
        if len(waiting[frames]) == size:
            yield waiting.pop(frames)
    yield from waiting.values()


def _heard(
    whisper: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    mels: Sequence[np.ndarray],
    arguments: dict[str, Any],
    temperatures: Sequence[float],
    decoder_of: Callable[..., Decoder],
) -> list[Transcript]:
    """Transcribe log-mels of one length; a text that is in doubt is decoded again, as OpenAI does it."""
    inputs, frames, full = model_inputs(whisper, mels), mels[0].shape[1], full_frames(whisper)
    states = None  # [B, frames / 2, d_model]
    if frames < full or not getattr(whisper.generation_config, "return_timestamps", False):
        # Encoded here, because `generate` encodes twice if it has to detect the language, and nothing that is cropped.
        # On a CPU one clip of 30 s at a time: 16 take a quarter longer each, since nothing stays in the CPU's caches.
        at_once = full // frames if whisper.device.type == "cpu" else len(mels)
        parts = inputs.pop("input_features").split(at_once)
        states = torch.cat([encode(whisper, part)[0] for part in parts])
    found: list[Transcript] = []
    again = list(range(len(mels)))  # rows
    for temperature in temperatures:
        # Others at each temperature, and for each clip the same: of its log-mel another machine may round the last bit.
        decoder = decoder_of(temperature, round(1000 * temperature))
        given: dict[str, Any] = {name: value[again] for name, value in inputs.items()}
        if states is not None:
            given |= {"encoder_outputs": BaseModelOutput(states[again]), "return_timestamps": False}
        ids = whisper.generate(**given, **arguments, custom_generate=decoder)
        texts = [text.strip() for text in processor.batch_decode(ids, skip_special_tokens=True)]
        has_parts = len(decoder.certainties) != len(again)  # several of each, by timestamps
        if not found:
            logprobs = [None] * len(texts) if has_parts else [one.logprob for one in decoder.certainties]
            found = [Transcript(text, logprob=logprob) for text, logprob in zip(texts, logprobs, strict=True)]
        else:
            for row, text in zip(again, texts, strict=True):
                found[row] = replace(found[row], text=text, temperature=temperature, greedy=found[row].plain)
        if len(temperatures) == 1 or has_parts:
            break
        certain = list(zip(again, decoder.certainties, strict=True))
        for row, certainty in certain:
            if certainty.is_silence():
                found[row] = replace(found[row], text="", greedy=found[row].plain)
        again = [row for row, certainty in certain if certainty.is_doubtful(found[row].text)]
        if not again:
            break
    return found


def no_speech_token(whisper: WhisperForConditionalGeneration, processor: WhisperProcessor) -> int | None:
    """Find the token for silence; None if the vocabulary has none."""
    vocabulary = processor.tokenizer.get_vocab()
    found = next((vocabulary[name] for name in NO_SPEECH_TOKENS if name in vocabulary), None)
    return found if found is not None and found < whisper.config.vocab_size else None


def _log_mels(path: Path, processor: WhisperProcessor) -> Iterator[np.ndarray]:
    """Compute them anew: those that training stores are rounded, and other programs' are not."""
    extractor = processor.feature_extractor
    waveform = load_audio(path, extractor.sampling_rate, _LONGEST_S)
    for start in range(0, len(waveform), extractor.n_samples):
        piece = waveform[start : start + extractor.n_samples]
        if start == 0 or len(piece) >= _SHORTEST_TAIL_S * extractor.sampling_rate:
            yield log_mel(piece, extractor)


def model_inputs(whisper: WhisperForConditionalGeneration, mels: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Make the arguments of `generate` for log-mels [80|128, frames] of one length."""
    features = torch.from_numpy(np.stack(mels)).to(whisper.device, whisper.dtype)  # [B, n_mels, frames]
    # Whisper masks nothing, but without a mask transformers warns that pad equals end-of-text.
    mask = torch.ones(len(mels), features.shape[-1], dtype=torch.long, device=features.device)
    return {"input_features": features, "attention_mask": mask}


def generation_settings(
    whisper: WhisperForConditionalGeneration, language: str | None, task: str | None
) -> tuple[dict[str, Any], str | None]:
    """Return (arguments for `generate`, code of the language that is written: None if it writes whatever it hears).

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
