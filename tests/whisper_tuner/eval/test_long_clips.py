"""Long clips become short ones, each with its part of the transcript: the texts of the clips it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from long_recordings import Long, joined

from whisper_tuner.data.audio import SAMPLE_RATE, load_audio
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.labels import TokenLimit
from whisper_tuner.eval.long_clips import HeardPieces, LongClips, NotCut
from whisper_tuner.fact_store import FactStore

PROJECT = Path(__file__).parents[3]


def name(number: int) -> str:
    return f"long-{number}"


def sample_of(long: Long, text: str | None = None) -> Sample:
    text = long.text if text is None else text
    return Sample(id="long", audio=long.path, text=text, duration_s=soundfile.info(long.path).duration, speaker="anna")


def knows(long: Long, change: Callable[[str], str] = lambda text: text) -> Callable:
    """Hears each piece word for word, by where its sound lies in the recording."""
    whole = load_audio(long.path)

    def hear(waveforms, language):
        texts = []
        for waveform in waveforms:
            probe = waveform[len(waveform) // 2 :][:400]
            middle = whole.tobytes().find(probe.tobytes()) // whole.itemsize
            begin = (middle - len(waveform) // 2) / SAMPLE_RATE
            texts.append(change(long.said(begin, begin + len(waveform) / SAMPLE_RATE)))
        return texts

    return hear


def cutting(folder: Path, hear: Callable, **about) -> LongClips:
    heard = HeardPieces(FactStore(folder / "cache"), "a model")
    return LongClips(folder / "clips", hear, heard, **({"longest_s": 30.0, "language": "en"} | about))


@pytest.mark.parametrize(
    ("seconds", "kind", "about"),
    [
        (40, "wav", {}),
        (95, "flac", {"rate": 44_100, "channels": 2}),
        (45, "wav", {"silence": (12, 14)}),
    ],
)
def test_the_texts_are_those_of_the_clips(tmp_path, seconds, kind, about):
    long = joined(tmp_path / f"long.{kind}", seconds, **about)
    before = long.path.read_bytes()
    found = cutting(tmp_path, knows(long)).cut(sample_of(long), name)
    assert " ".join(piece.text for piece in found) == long.text and len(found) >= 2
    assert all(piece.text.endswith((".", "?")) and piece.speaker == "anna" for piece in found)
    assert [piece.id for piece in found] == [f"long-{number}" for number in range(1, len(found) + 1)]
    for piece in found:
        header = soundfile.info(piece.audio)
        assert (header.format, header.samplerate, header.channels) == ("FLAC", SAMPLE_RATE, 1)
        assert header.duration <= 30 and header.duration == pytest.approx(piece.duration_s)
    assert long.path.read_bytes() == before


def test_again_nothing_is_heard_or_written_again(tmp_path):
    long = joined(tmp_path / "long.wav", 40)
    found = cutting(tmp_path, knows(long)).cut(sample_of(long), name)
    times = {piece.audio: piece.audio.stat().st_mtime_ns for piece in found}

    def deaf(waveforms, language):
        raise AssertionError("it is known")

    assert cutting(tmp_path, deaf).cut(sample_of(long), name) == found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "clips").iterdir()} == times


def test_a_ctrl_c_leaves_nothing_half_written(tmp_path, monkeypatch):
    long = joined(tmp_path / "long.wav", 40)
    written = soundfile.write

    def interrupted(file, *about, **more):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("whisper_tuner.data.cutting.soundfile.write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cutting(tmp_path, knows(long)).cut(sample_of(long), name)
    assert not list((tmp_path / "clips").iterdir())
    monkeypatch.setattr("whisper_tuner.data.cutting.soundfile.write", written)
    assert len(cutting(tmp_path, knows(long)).cut(sample_of(long), name)) == 2


def test_where_one_cut_is_unsure_another_is_tried(tmp_path):
    long = joined(tmp_path / "long.wav", 50)
    asked = []

    def hear(waveforms, language):
        asked.append(len(waveforms))
        texts = knows(long)(waveforms, language)
        return [" ".join(text.split()[:-5]) for text in texts] if len(asked) == 1 else texts

    found = cutting(tmp_path, hear).cut(sample_of(long), name)
    assert " ".join(piece.text for piece in found) == long.text and len(asked) == 2


@pytest.mark.parametrize(
    ("change", "text", "why"),
    [
        (lambda text: "Thank you for watching.", None, "from 0:0"),
        (lambda text: "", None, "the model hears nothing there"),
        (lambda text: text, "Of something else a book tells its reader. " * 8, "from 0:0"),
        (lambda text: text, "", "there is no text"),
        (lambda text: " ".join(text.split()[3:-3]), None, "may belong before or after the cut"),
    ],
)
def test_what_is_not_sure_is_not_cut(tmp_path, change, text, why):
    long = joined(tmp_path / "long.wav", 40)
    with pytest.raises(NotCut, match=why):
        cutting(tmp_path, knows(long, change)).cut(sample_of(long, text), name)
    assert not (tmp_path / "clips").exists()


def test_no_pause_no_sound_no_file(tmp_path):
    tone = np.sin(np.arange(40 * SAMPLE_RATE) / 20).astype(np.float32)
    for sound, why in ((tone, "no pause for 30 s from 0:00 on"), (0 * tone, "nothing can be heard")):
        path = tmp_path / "long.wav"
        soundfile.write(path, sound, SAMPLE_RATE)
        with pytest.raises(NotCut, match=why):
            cutting(tmp_path, knows(Long(path, [], []))).cut(sample_of(Long(path, ["Hello."], [40])), name)
    path.write_bytes(b"RIFF no audio")
    with pytest.raises(NotCut, match=r"long\.wav"):
        cutting(tmp_path, lambda *_: []).cut(Sample(id="a", audio=path, text="Hello.", duration_s=40), name)


def test_no_piece_has_more_tokens_than_the_decoder_takes(tmp_path):
    long = joined(tmp_path / "long.wav", 50)
    limit = TokenLimit(str(PROJECT / "bundled" / "model"), 60, language="", task="transcribe")
    found = cutting(tmp_path, knows(long), limit=limit).cut(sample_of(long), name)
    assert " ".join(piece.text for piece in found) == long.text and len(found) > 2
    assert not any(limit.excess(piece.text) for piece in found)
    with pytest.raises(NotCut, match="tokens"):
        cutting(tmp_path, knows(long), limit=TokenLimit(limit.base_model, 9, "", "transcribe")).cut(
            sample_of(long), name
        )
