"""Recordings of any length -> segments with times.

For a checkpoint that writes timestamps, this is Whisper's own sequential decoding, as in transformers: each window
begins where the last whole segment ended. For others the audio is cut where it is quietest, one segment a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor

from whisper_tuner.data.audio import blocks
from whisper_tuner.data.features import extracted, log_mel, pad_log_mel
from whisper_tuner.data.labels import added_words
from whisper_tuner.errors import ModelError
from whisper_tuner.eval.decoder import LEAST_PROBABLE, NO_SPEECH
from whisper_tuner.eval.evaluation import FALLBACK, evaluating, generation_settings, model_inputs, transcribe
from whisper_tuner.languages import joined
from whisper_tuner.model.base_model import whisper_of

BLOCK_S = 600.0  # decoded in one call, so that hours of audio do not have to fit into memory
SHORTEST_S = 0.02  # the resolution of Whisper's timestamps
SHORTEST_WORD_S = 0.1  # what begins later before the end was heard in the padding
# transformers' own fallback, by zlib's ratio over tokens, where theirs is by that over text in the evaluation of clips.
# French announcements reach 1.53; phrases that repeat until their text is above 2.4 are all above 1.8.
MOST_COMPRESSED_TOKENS = 1.8
THRESHOLDS: dict[str, Any] = {
    "temperature": FALLBACK,
    "compression_ratio_threshold": MOST_COMPRESSED_TOKENS,
    "logprob_threshold": LEAST_PROBABLE,
    "no_speech_threshold": NO_SPEECH,
}
# Thai and Lao, Burmese, Khmer, Japanese and Chinese.
UNSPACED_SCRIPTS = (("\u0e00", "\u0eff"), ("\u1000", "\u109f"), ("\u1780", "\u17ff"), ("\u3040", "\u9fff"))
LONGEST_LETTER = 4  # tokens: as many as UTF-8 has bytes. After them it was none
_QUIET_FRAME_S = 0.02
_QUIET_FRAMES = 10  # the length of the pause that a cut looks for

Progress = Callable[[float], None]
"""Called with the seconds of the recording that are done."""


@dataclass(frozen=True)
class Word:
    """Seconds from the beginning of the recording. text: with the space before it, if there is one."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Segment:
    """Seconds from the beginning of the recording. words: of the text, if they were asked for."""

    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recording:
    """`language` is the code of the text's language, None if it is not known."""

    duration_s: float
    segments: tuple[Segment, ...]
    language: str | None = None

    @property
    def text(self) -> str:
        return joined((segment.text for segment in self.segments), self.language)


def transcribe_recording(
    model: nn.Module,
    processor: WhisperProcessor,
    path: str | Path,
    *,
    language: str | None = None,
    task: str | None = None,
    words: bool = False,
    progress: Progress = lambda seconds: None,
) -> Recording:
    """Transcribe a file, with times. language and task: as in `transcribe`. words: also when each word is said.

    Raises DataError or MissingProgram for a file that cannot be read, ModelError if the model cannot tell of words.
    """
    whisper, extractor = whisper_of(model), processor.feature_extractor
    if words:
        require_alignment(whisper, processor)
    rate = extractor.sampling_rate
    arguments, written = generation_settings(whisper, language, task)
    timed = writes_timestamps(whisper, processor)
    segments: list[Segment] = []
    longest, duration_s = round(BLOCK_S * rate) if timed else extractor.n_samples, 0.0
    with evaluating(model), torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)  # the fallback draws random numbers
        for start, piece in cuts(blocks(path, rate), longest, rate):
            offset, duration_s = start / rate, (start + len(piece)) / rate
            if timed:
                asked = arguments | {"return_token_timestamps": words}
                segments += _by_timestamps(whisper, processor, piece, asked, offset, duration_s, progress)
            else:
                mels = [log_mel(piece, extractor)]
                [heard] = transcribe(model, processor, mels, language=language, task=task, temperatures=FALLBACK)
                segments.append(Segment(offset, min(len(piece) / rate + offset, duration_s), heard.text))
            progress(duration_s)
    return Recording(duration_s=duration_s, segments=tuple(tidy(segments, duration_s, written)), language=written)


def writes_timestamps(whisper: WhisperForConditionalGeneration, processor: WhisperProcessor) -> bool:
    """Tell if the vocabulary has a timestamp for each position, and no added words: those would be taken for some."""
    last = getattr(whisper.generation_config, "no_timestamps_token_id", None)
    has_all = last is not None and whisper.config.vocab_size - (last + 1) > whisper.config.max_source_positions
    return has_all and not added_words(processor.tokenizer)


def require_alignment(whisper: WhisperForConditionalGeneration, processor: WhisperProcessor) -> None:
    """Raises ModelError unless the model can tell when each word is said."""
    if not writes_timestamps(whisper, processor) or not getattr(whisper.generation_config, "alignment_heads", None):
        what = "the model cannot tell when a word is said: it lacks timestamps or alignment heads, or has added words"
        raise ModelError(what, remedy="Leave out --words, or use one of OpenAI's models, or one that was made of it.")


def cuts(waveform: Iterable[np.ndarray], longest: int, rate: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield pieces of at most `longest` samples, and where they start; all but the last end where it is quietest.

    waveform: block after block, float32 [n].
    """
    start, held = 0, np.empty(0, np.float32)
    for block in waveform:
        held = np.concatenate([held, block])
        while len(held) > longest:
            end = longest * 3 // 4 + _quietest(held[longest * 3 // 4 : longest], rate)
            yield start, held[:end]
            start, held = start + end, held[end:]
    yield start, held


def tidy(segments: list[Segment], duration_s: float, language: str | None = None) -> list[Segment]:
    """Put segments in order, without overlap, inside the recording; one that is too short joins the one before."""
    kept: list[Segment] = []
    for segment in segments:
        text = " ".join(segment.text.split())
        start = max(segment.start, kept[-1].end if kept else 0.0)
        end = min(max(segment.end, start), duration_s)
        if not text or segment.start > max(duration_s - SHORTEST_WORD_S, 0.0):
            continue  # heard in the padding
        if end - start >= SHORTEST_S:
            kept.append(replace(segment, start=start, end=end, text=text))
        elif kept:
            whole = joined((kept[-1].text, text), language)
            kept[-1] = replace(kept[-1], text=whole, words=kept[-1].words + segment.words)
        elif duration_s > 0:
            kept.append(replace(segment, start=start, end=min(start + SHORTEST_S, duration_s), text=text))
    return kept


def _by_timestamps(
    whisper: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    waveform: np.ndarray,
    arguments: dict[str, Any],
    begin: float,
    end: float,
    progress: Progress,
) -> list[Segment]:
    """Decode what lies between two times of the recording; nothing that is heard there ends later."""
    extractor = processor.feature_extractor

    def moved(seconds: float) -> float:
        return min(seconds + begin, end)

    generated: Any = whisper.generate(
        **model_inputs(whisper, [_whole_log_mel(waveform, extractor)]),
        return_timestamps=True,
        return_segments=True,
        condition_on_prev_tokens=False,
        max_new_tokens=whisper.config.max_target_positions // 2,  # as in evaluation
        monitor_progress=lambda at: progress(begin + at[0, 0].item() * extractor.hop_length / extractor.sampling_rate),
        **THRESHOLDS,
        **arguments,
    )
    settings: Any = whisper.generation_config  # has what its file has
    first_timestamp = settings.no_timestamps_token_id + 1
    found = []
    for segment in generated["segments"][0]:
        if segment["start"] >= len(waveform) / extractor.sampling_rate:
            break
        ids = [token for token in segment["tokens"].tolist() if token < first_timestamp]
        text = processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
        start, words = float(segment["start"]), []
        if "token_timestamps" in segment:
            times = zip(segment["tokens"].tolist(), segment["token_timestamps"].tolist(), strict=True)
            words = _words(processor, list(times), start)
        placed = tuple(Word(moved(word.start), moved(word.end), word.text) for word in words)
        found.append(Segment(moved(start), moved(float(segment["end"])), text, placed))
    return found


def _words(processor: WhisperProcessor, tokens: Sequence[tuple[int, float]], start: float) -> list[Word]:
    """Make words of tokens and the times at which each ends; they may pass the segment's end, which is less exact.

    In scripts without spaces a token is a word.
    """
    special = set(processor.tokenizer.all_special_ids)
    found: list[Word] = []
    pending: list[int] = []  # of a letter that several tokens make
    since = last = start
    for token, time in tokens:
        last, before = max(time, last), last
        if token in special or processor.tokenizer.decode([token], skip_special_tokens=True) == "":
            continue
        since = since if pending else before
        pending.append(token)
        text = processor.tokenizer.decode(pending, skip_special_tokens=True)
        if "\ufffd" in text and len(pending) < LONGEST_LETTER:
            continue
        pending = []
        has_no_spaces = text[0].isalnum() and any(low <= text[0] <= high for low, high in UNSPACED_SCRIPTS)
        if found and not text.startswith(" ") and not has_no_spaces:
            found[-1] = Word(found[-1].start, last, found[-1].text + text)
        else:
            found.append(Word(since, last, text))
    return found


def _whole_log_mel(waveform: np.ndarray, extractor: WhisperFeatureExtractor) -> np.ndarray:
    """Return float32 [80|128, frames] of the whole waveform, padded to the model's 30 s, or by 30 s if it is longer.

    transformers fills the last window of a long recording with zeros, which are no silence: models mishear its end.
    """
    if len(waveform) <= extractor.n_samples:
        return extracted(waveform, extractor, padding="max_length")
    mel = extracted(waveform, extractor, padding="longest", truncation=False)
    return pad_log_mel(mel, mel.shape[1] + extractor.nb_max_frames)


def _quietest(waveform: np.ndarray, rate: int) -> int:
    """Find the middle of the pause with the least energy."""
    size = round(_QUIET_FRAME_S * rate)
    count = len(waveform) // size
    if count <= _QUIET_FRAMES:
        return len(waveform)
    energy = np.square(waveform[: count * size]).reshape(count, size).sum(axis=1, dtype=np.float64)
    pauses = np.convolve(energy, np.ones(_QUIET_FRAMES), mode="valid")
    return (int(pauses.argmin()) + _QUIET_FRAMES // 2) * size
