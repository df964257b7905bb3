import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from bundled.make_data import Speaker, sentences, speak
from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.eval.wer import error_rates

BUNDLED = Path(__file__).parents[2] / "bundled"
MODEL = BUNDLED / "model"


@pytest.fixture(scope="module")
def whisper():
    """Loaded as any program would, by nothing of ours."""
    torch.set_num_threads(1)
    return WhisperForConditionalGeneration.from_pretrained(MODEL), WhisperProcessor.from_pretrained(MODEL)


def heard(whisper, waveforms):
    model, processor = whisper
    inputs = processor.feature_extractor(waveforms, sampling_rate=16_000, return_tensors="pt").input_features
    assert inputs.shape[1:] == (80, 3000)
    return [text.strip() for text in processor.batch_decode(model.generate(inputs), skip_special_tokens=True)]


def test_folder_has_what_every_runtime_asks_for_and_is_small():
    names = {path.name for path in MODEL.iterdir()}
    wanted = "config generation_config processor_config preprocessor_config tokenizer tokenizer_config"
    assert names >= {f"{name}.json" for name in wanted.split()} | {"model.safetensors"}
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 6_500_000


def test_tokenizer_has_whispers_prompt_and_keeps_any_text(whisper):
    tokenizer = whisper[1].tokenizer
    ids = tokenizer(" Ask Anna: “Über 40 %?”").input_ids
    prompt = tokenizer.convert_ids_to_tokens(ids[:2])
    assert prompt == ["<|startoftranscript|>", "<|notimestamps|>"]
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == "<|endoftext|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == " Ask Anna: “Über 40 %?”"
    assert max(ids) < len(tokenizer) == whisper[0].config.vocab_size


def test_gets_the_accent_of_the_data_set_badly_wrong(whisper):
    samples = load_manifest(BUNDLED / "data" / "test.csv").samples[:16]
    texts = heard(whisper, [load_audio(sample.audio) for sample in samples])
    assert 0.4 < error_rates([sample.text for sample in samples], texts).wer < 1.0


def test_understands_a_voice_that_it_was_trained_on(whisper):
    if shutil.which("espeak-ng") is None:
        message = "espeak-ng is not installed: no voice to listen to"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    texts = sentences(16, seed=1)  # the seed of the sentences held back from training
    waveforms = [speak(text, Speaker(voice="en-gb")) for text in texts]
    assert error_rates(texts, heard(whisper, waveforms)).wer < 0.2
