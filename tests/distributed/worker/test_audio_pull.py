"""A worker that waits for its clips: what the launcher hears meanwhile, and for how long it does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from distributed.worker import load
from distributed.worker.load import AudioPull
from whisper_tuner.data.dataset import Sample


@pytest.fixture
def said(monkeypatch, tmp_path) -> list[dict]:
    for name, value in {"POLL_S": 0.01, "LOOK_S": 0.1, "LONGEST_S": 1.0}.items():
        monkeypatch.setattr(load, name, value)
    monkeypatch.chdir(tmp_path)
    return []


@pytest.fixture
def unsent() -> set[str]:
    return set()


@pytest.fixture
def pull(said, unsent) -> AudioPull:
    return AudioPull(said.append, unsent)


def clips(*names: str) -> list[Sample]:
    return [Sample(id=name, audio=Path(name).absolute(), text="x", duration_s=1.0, line=1) for name in names]


def waited(pull: AudioPull, clip: Sample) -> float:
    began = time.monotonic()
    pull.wait(clip)
    return time.monotonic() - began


def test_what_is_not_there_is_asked_for_once_and_in_order(pull, said):
    Path("a.wav").touch()
    pull.order(clips("c.wav", "a.wav", "b.wav"))
    pull.order(clips("b.wav", "d.wav", "c.wav"))
    assert said == [{"type": "want", "files": ["c.wav", "b.wav"]}, {"type": "want", "files": ["d.wav"]}]


def test_nobody_waits_for_a_clip_that_is_there_or_was_not_asked_for_or_will_not_come(pull, unsent):
    Path("a.wav").touch()
    [*known, never] = clips("a.wav", "other.wav", "b.wav")
    pull.order([known[0], never])
    unsent.add("b.wav")
    assert sum(waited(pull, clip) for clip in (*known, never)) < 0.5


def test_whoever_waits_says_that_it_is_alive(pull, said):
    [clip] = clips("a.wav")
    pull.order([clip])
    threading.Timer(0.35, clip.audio.touch).start()
    assert waited(pull, clip) > 0.3
    assert len(said) > 2 and said[1:] == [{"type": "alive"}] * (len(said) - 1)


def test_a_slow_link_is_waited_for_as_long_as_anything_arrives(pull):
    [*others, last] = clips("a.wav", "b.wav", "c.wav")
    pull.order([*others, last])
    for when, clip in ((0.6, others[0]), (1.2, others[1]), (1.8, last)):
        threading.Timer(when, clip.audio.touch).start()
    pull.wait(last)
    assert last.audio.exists()


def test_nobody_waits_for_ever(pull):
    [clip] = clips("a.wav")
    pull.order([clip])
    assert 1 < waited(pull, clip) < 3
