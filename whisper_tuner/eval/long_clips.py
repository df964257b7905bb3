"""Clips that are longer than Whisper hears at once, cut at pauses: each piece with its part of the transcript."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from whisper_tuner.data.audio import SAMPLE_RATE, load_audio
from whisper_tuner.data.checks.dividing import NoPause, Span, Unsure, divided, pieces, spoken
from whisper_tuner.data.cutting import flac_of, write_flac
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.labels import TokenLimit
from whisper_tuner.errors import TunerError
from whisper_tuner.eval.wer import text_normalizer
from whisper_tuner.fact_store import FactStore, file_stamp
from whisper_tuner.files import hash_of
from whisper_tuner.languages import text_language

SHARES = (1.0, 0.8, 0.6)  # of the longest piece, tried in turn: another cut may be certain where the first was not
FACT = "heard pieces 1"

Hear = Callable[[Sequence[np.ndarray], str | None], list[str]]
"""What a model writes for waveforms, float32 [n] at SAMPLE_RATE, of speech in a language (a code)."""


class NotCut(Exception):
    """Says why, for the user."""


class LongClips:
    """Cuts clips into files below `folder`. Those that are there stay, and so does what was heard: see `HeardPieces`.

    hear: is asked for what is not known yet. limit: of the model that is to be trained, if it is known.
    """

    def __init__(
        self,
        folder: Path,
        hear: Hear,
        heard: HeardPieces,
        *,
        longest_s: float,
        language: str = "",
        task: str = "transcribe",
        limit: TokenLimit | None = None,
    ):
        self._folder, self._hear, self._heard = folder, hear, heard
        self._normalizer = cache(text_normalizer)
        self._longest_s, self._language, self._task, self._limit = longest_s, language, task, limit

    def cut(self, sample: Sample, name: Callable[[int], str]) -> tuple[Sample, ...]:
        """Cut a clip. name: the id of a piece, of its number, from 1. Raises NotCut."""
        try:
            waveform = load_audio(sample.audio)
        except TunerError as error:
            raise NotCut(" ".join(str(error).split())) from None
        spans, texts = self._divided(sample, waveform)
        made = []
        for number, (span, text) in enumerate(zip(spans, texts, strict=True), 1):
            clip, piece = flac_of(self._folder, sample.audio, span[0], span[1] - span[0]), _within(waveform, span)
            if not clip.is_file():
                write_flac(clip, piece)
            duration_s = len(piece) / SAMPLE_RATE
            made.append(replace(sample, id=name(number), audio=clip, text=text, duration_s=duration_s))
        return tuple(made)

    def _divided(self, sample: Sample, waveform: np.ndarray) -> tuple[list[Span], list[str]]:
        """Find pieces, and the text of each. Raises NotCut."""
        said, reason = spoken(waveform, SAMPLE_RATE), ""
        tried: set[tuple[Span, ...]] = set()
        for share in SHARES:
            try:
                spans = pieces(said, share * self._longest_s)
            except NoPause as error:
                if error.at is None:
                    why = "nothing can be heard in it"
                else:
                    why = f"there is no pause for {self._longest_s:g} s from {_clock(error.at)} on"
                reason = reason or why
                break  # shorter pieces need more pauses
            if tuple(spans) in tried:
                continue
            tried.add(tuple(spans))
            try:
                return spans, self._texts(sample, waveform, spans)
            except Unsure as error:
                begins, ends = spans[error.piece]
                reason = reason or f"from {_clock(begins)} to {_clock(ends)}: {error}"
        raise NotCut(reason)

    def _texts(self, sample: Sample, waveform: np.ndarray, spans: Sequence[Span]) -> list[str]:
        """Divide the text by what is heard in the pieces. Raises Unsure."""
        spoken_in = sample.language or self._language or None
        written = text_language(spoken_in, self._task)
        heard = self._heard.texts(sample.audio, spans, spoken_in)
        if heard is None:
            heard = self._hear([_within(waveform, span) for span in spans], spoken_in)
            self._heard.keep(sample.audio, spans, spoken_in, heard)
        texts = divided(sample.text, heard, language=written, normalize=self._normalizer(written))
        for number, text in enumerate(texts):
            if self._limit and (excess := self._limit.excess(text, sample.language)):
                raise Unsure(number, excess)
        return texts


class HeardPieces:
    """Keeps what was heard in the pieces of a clip, so that after a Ctrl-C it is not heard again.

    model: a hash of all that decides on the texts but the audio; None if it is not known, and nothing is kept.
    """

    def __init__(self, store: FactStore, model: str | None):
        self._store, self._model = store, model

    def texts(self, audio: Path, spans: Sequence[Span], language: str | None) -> list[str] | None:
        if not self._model:
            return None
        name = self._name(audio, spans, language)
        return self._store.known(FACT, {name: file_stamp(audio.stat())}).get(name)

    def keep(self, audio: Path, spans: Sequence[Span], language: str | None, texts: Sequence[str]) -> None:
        if self._model:
            name = self._name(audio, spans, language)
            self._store.keep(FACT, {name: file_stamp(audio.stat())}, {name: list(texts)})

    def _name(self, audio: Path, spans: Sequence[Span], language: str | None) -> str:
        decides = json.dumps([self._model, str(audio.absolute()), list(spans), language])
        return hash_of(decides.encode()).hex()


def _within(waveform: np.ndarray, span: Span) -> np.ndarray:
    return waveform[math.ceil(span[0] * SAMPLE_RATE) : int(min(span[1] * SAMPLE_RATE, len(waveform)))]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
