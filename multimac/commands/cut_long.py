"""Cutting clips that are too long at pauses, for `multimac data check --fix --model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from multimac.view.progress import counting
from whisper_tuner.data.checks.fix import BLACKLIST, CLIPS, Corrections, Cuts
from whisper_tuner.data.checks.material import TEST, Material, Row
from whisper_tuner.data.checks.text import repaired
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.text import counted

if TYPE_CHECKING:
    from whisper_tuner.data.labels import TokenLimit
    from whisper_tuner.eval.long_clips import Hear, LongClips

TOLD = 5  # rows that were not cut, on the screen and in the report; changes.csv has all
IN_A_TEST_SET = "a test set is not cut, least of all by where a model is sure"
Load = Callable[[], tuple]  # gives the model and its processor


def long_clips(
    folder: Path,
    store: Path,
    model: str,
    load: Load,
    longest_s: float,
    language: str,
    task: str,
    limit: TokenLimit | None,
) -> LongClips:
    """Return what cuts clips into pieces below `folder`. load: loads `model`, once something is to be heard."""
    from exogym import device as devices
    from whisper_tuner.eval.long_clips import HeardPieces, LongClips
    from whisper_tuner.eval.text_cache import Decoding, TextCache

    facts = FactStore(store / CACHE)
    decoding = Decoding(device=devices.choose().type, language=None, task=task)
    heard = HeardPieces(facts, TextCache(facts).key(model, [], decoding))
    hear, pieces = _hearing(load, task), folder.absolute() / CLIPS
    return LongClips(pieces, hear, heard, longest_s=longest_s, language=language, task=task, limit=limit)


def cut_long(
    console: Console, long: Sequence[Row], material: Material, corrections: Corrections, clips: LongClips
) -> Cuts:
    """Cut all clips that are too long and that may be cut; the others get the reason."""
    from whisper_tuner.eval.long_clips import NotCut

    taken = {row.sample.id for row in (*material.rows, *long)}
    found: dict[tuple[str, int], tuple | str] = {}
    with counting(console, "cutting long clips", len(long)) as show:
        for number, row in enumerate(long, start=1):
            sample, place = row.sample, (row.part, row.sample.line)
            if row.part == TEST:
                found[place] = IN_A_TEST_SET
            elif sample.id in corrections.left_out:
                found[place] = f"it is in {BLACKLIST}"
            else:
                text = (corrections.texts or {}).get(sample.id) or repaired(sample.text)
                name = partial(_name, taken, sample.id)
                try:
                    found[place] = clips.cut(replace(sample, text=text, timed_text=""), name)
                except NotCut as reason:
                    found[place] = str(reason)
            show(number)
    return found


def told_of(long: Sequence[Row], cuts: Cuts) -> Iterator[str]:
    """Tell what became of the rows."""
    pieces = [found for found in cuts.values() if not isinstance(found, str)]
    made = sum(map(len, pieces))
    yield f"Too long: {counted(len(long), 'clip')}. Cut at pauses: {len(pieces)}, into {made}."
    refused = [(row, why) for row in long if isinstance(why := cuts[row.part, row.sample.line], str)]
    for row, why in refused[:TOLD]:
        yield f"{row.place} was not cut: {why}."
    if len(refused) > TOLD:
        yield f"{len(refused) - TOLD} more were not cut."


def _name(taken: set[str], own: str, number: int) -> str:
    name = f"{own}-{number}"
    return f"{own}-cut-{number}" if name in taken else name


def _hearing(load: Load, task: str) -> Hear:
    from whisper_tuner.data.features import log_mel
    from whisper_tuner.eval.evaluation import FALLBACK, transcribe

    def hear(waveforms: Sequence[np.ndarray], language: str | None) -> list[str]:
        model, processor = load()
        mels = [log_mel(waveform, processor.feature_extractor) for waveform in waveforms]
        found = transcribe(model, processor, mels, language=language, task=task, temperatures=FALLBACK)
        return [one.text for one in found]

    return hear
