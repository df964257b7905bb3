"""The language that a model hears in clips, found out by a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from whisper_tuner.data.dataset import Sample
from whisper_tuner.eval.spoken_language import heard, languages_heard


@pytest.fixture
def files(clips: list[Sample]) -> list[Path]:
    return [sample.audio for sample in clips[:3]]


def test_each_clip_has_one_of_whispers_languages(multilingual_folder, files):
    found = languages_heard(multilingual_folder, files, limit_s=120)
    assert len(found) == 3
    assert found == list(heard(str(multilingual_folder), [str(path) for path in files]))


def test_a_clip_that_cannot_be_read_is_left_out(multilingual_folder, files, tmp_path):
    (tmp_path / "none.wav").write_text("no audio")
    assert len(list(heard(str(multilingual_folder), [str(tmp_path / "none.wav"), str(files[0])]))) == 1


def test_who_asks_does_not_wait_for_longer(multilingual_folder, files):
    assert languages_heard(multilingual_folder, files, limit_s=0.1) == []


@pytest.mark.slow
def test_a_model_that_does_not_load_hears_nothing(tmp_path, files):
    assert languages_heard(tmp_path, files, limit_s=120) == []
