"""What decides whether a kept text is used: everything that could change it, and nothing else."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from peft import LoraConfig, get_peft_model

from whisper_tuner.eval import text_cache
from whisper_tuner.eval.evaluation import evaluate
from whisper_tuner.eval.text_cache import Decoding, TextCache
from whisper_tuner.export.final import load_model, save_final
from whisper_tuner.fact_store import FactStore
from whisper_tuner.model.base_model import load_base

FRENCH = Decoding(device="cpu", language="fr", task="transcribe")


@pytest.fixture
def model(multilingual_folder, tmp_path):
    return shutil.copytree(multilingual_folder, tmp_path / "model")


@pytest.fixture
def samples(clips, tmp_path):
    """Clips of their own, which a test may change."""
    return [replace(clip, audio=shutil.copy(clip.audio, tmp_path)) for clip in clips[:3]]


@pytest.fixture
def texts(tmp_path) -> TextCache:
    return TextCache(FactStore(tmp_path / "cache"))


@pytest.fixture
def filled(texts, model, samples):
    """(key, evaluation) of something that is kept."""
    key, result = texts.key(str(model), samples, FRENCH), evaluated(model, samples)
    texts.write(key, result)
    return key, result


def evaluated(model, samples):
    return evaluate(*load_model(model), samples, language="fr", task="transcribe")


def test_what_is_kept_comes_back_as_it_was(texts, filled, model, samples, tmp_path):
    key, result = filled
    assert TextCache(FactStore(tmp_path / "cache")).key(str(model), samples, FRENCH) == key
    assert texts.read(key, samples) == replace(result, cached=True)


def test_rates_are_those_of_the_transcripts_as_they_are_now(texts, filled, model, samples):
    _, result = filled
    perfect = [replace(sample, text=row.hypothesis) for sample, row in zip(samples, result.rows, strict=True)]
    found = texts.read(texts.key(str(model), perfect, FRENCH), perfect)
    assert found.raw.wer == 0 < result.raw.wer and [row.sample for row in found.rows] == perfect


def test_nothing_is_kept_for_another_model_test_set_or_decoding(texts, filled, model, samples, clips):
    key, _ = filled

    def now(samples=samples, **changed):
        return texts.key(str(model), samples, replace(FRENCH, **changed))

    assert now() == key
    others = [now(samples[:2]), now(samples[::-1]), now([*samples, clips[5]])]
    others += [now(device="mps"), now(language=None), now(task="translate"), now(audio_context="cropped")]
    others += [now(temperatures=(0.0,))]
    shutil.copy(clips[7].audio, samples[0].audio)
    others.append(now())
    weights = model / "model.safetensors"
    content, stat = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as big and as old as before
    others.append(now())
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"suppress_tokens": [70]}))
    others.append(now())
    assert len({key, *others}) == 1 + len(others) and None not in others
    assert not any(texts.read(other, samples) for other in others)


@pytest.mark.parametrize("part", ["libraries", "program"])
def test_nothing_is_kept_for_other_libraries_or_another_program(texts, filled, model, samples, monkeypatch, part):
    if part == "libraries":
        monkeypatch.setattr(text_cache, "version", lambda name: "99")
    else:
        monkeypatch.setattr(text_cache, "_program", lambda: "changed")
    assert texts.key(str(model), samples, FRENCH) != filled[0]


def test_files_are_read_once(texts, filled, model, samples, monkeypatch):
    monkeypatch.setattr(text_cache, "content_hash", lambda _: pytest.fail("read again"))
    assert texts.key(str(model), samples, FRENCH) == filled[0]


def test_the_same_content_elsewhere_is_the_same_model(texts, filled, model, samples, tmp_path):
    assert texts.key(str(model.rename(tmp_path / "moved")), samples, FRENCH) == filled[0]


def test_an_adapter_is_another_model_with_another_base(texts, model, samples, tmp_path):
    base, processor = load_base(model)
    adapter = get_peft_model(base, LoraConfig(task_type=None, r=2, target_modules=["q_proj"]))
    folder = str(save_final(adapter, processor, tmp_path / "adapter", model))
    keys = {texts.key(str(model), samples, FRENCH), texts.key(folder, samples, FRENCH)}
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert len(keys | {texts.key(folder, samples, FRENCH)}) == 3


def test_what_is_kept_of_another_number_of_clips_counts_as_nothing(texts, filled, samples):
    key, result = filled
    assert texts.read(key, samples[1:]) is None
    texts.write(key, replace(result, rows=result.rows[1:]))
    assert texts.read(key, samples) is None


def test_a_test_set_with_unreadable_clips_is_not_kept(texts, model, samples, tmp_path):
    gone = [*samples, replace(samples[0], audio=tmp_path / "gone.wav")]
    assert texts.key(str(model), gone, FRENCH) is None and texts.read(None, gone) is None
    (tmp_path / "noise.wav").write_bytes(b"no audio")
    damaged = [replace(samples[0], audio=tmp_path / "noise.wav")]
    key = texts.key(str(model), damaged, FRENCH)
    texts.write(key, evaluated(model, damaged))
    assert key and texts.read(key, damaged) is None
    texts.write(None, evaluated(model, samples))


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_time(model, samples, tmp_path):
    (tmp_path / "cache").write_text("a file is in the way")
    texts = TextCache(FactStore(tmp_path / "cache"))
    key = texts.key(str(model), samples, FRENCH)
    texts.write(key, evaluated(model, samples))
    assert key and texts.read(key, samples) is None


def test_an_empty_test_set(texts, model):
    key = texts.key(str(model), [], FRENCH)
    texts.write(key, evaluated(model, []))
    assert texts.read(key, []).rows == ()
