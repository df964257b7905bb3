import numpy as np
import pytest
import torch
from transformers import WhisperProcessor

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.features import log_mel
from whisper_tuner.eval.evaluation import AUDIO_CONTEXTS, GREEDY, evaluate, transcribe
from whisper_tuner.model.base_model import prepare, set_language


def plain_transformers(model, processor, path, **arguments):
    arguments = {"max_new_tokens": model.config.max_target_positions // 2} | arguments
    waveform = load_audio(path)
    features = processor(waveform, sampling_rate=16_000, return_tensors="pt").input_features
    with torch.no_grad():
        return processor.batch_decode(model.generate(features, **arguments), skip_special_tokens=True)[0].strip()


def test_english_only_models_are_given_no_language(english, clips):
    model, processor = english
    heard = transcribe(model, processor, [clips[3].audio], language="en", task="transcribe")
    assert heard[0].text == plain_transformers(model, processor, clips[3].audio)


def test_log_mels_give_the_same_text_as_files(multilingual, clips):
    model, processor = multilingual
    paths = [c.audio for c in clips[:3]]
    expected = transcribe(model, processor, paths, language="fr")
    mels = [log_mel(load_audio(path), processor.feature_extractor) for path in paths]
    assert transcribe(model, processor, mels, language="fr") == expected


@pytest.mark.parametrize(
    ("asked", "joint"),
    [
        ({"language": "Japanese"}, ""),
        ({"language": "JA", "task": "translate"}, " "),
        ({}, " "),
    ],
)
def test_pieces_are_joined_as_their_text_is_written(multilingual, audio_file, tmp_path, asked, joint):
    model, processor = multilingual
    path = audio_file(tmp_path / "long.wav", seconds=10)
    waveform = load_audio(path)
    pieces = [log_mel(waveform[at : at + 80_000], processor.feature_extractor) for at in (0, 80_000)]
    expected = [transcript.text for transcript in transcribe(model, processor, pieces, **asked)]
    assert all(expected)
    (whole,) = transcribe(model, processor, [path], **asked)
    assert whole.text == joint.join(expected)


ENGLISH, SPLIT, PLAIN = "mister smith is color", "m r s m i t h s c o l o u r", "mr smith s colour"


@pytest.mark.parametrize(
    ("name", "asked", "normalized"),
    [
        ("multilingual", {"language": "fr"}, PLAIN),
        ("multilingual", {"language": "ja"}, SPLIT),
        ("multilingual", {"language": "Japanese", "task": "translate"}, ENGLISH),
        ("multilingual", {}, PLAIN),
        ("multilingual", {"task": "translate"}, ENGLISH),
        ("english", {}, ENGLISH),
        ("english", {"language": "French"}, PLAIN),
        ("english", {"language": "ja", "task": "translate"}, ENGLISH),
    ],
)
def test_texts_are_normalised_in_the_language_that_they_are_written_in(request, clips, name, asked, normalized):
    model, processor = request.getfixturevalue(name)
    said = Sample(id="x", audio=clips[0].audio, text="Mr. Smith's colour!", duration_s=clips[0].duration_s)
    (row,) = evaluate(model, processor, [said], **asked).rows
    assert row.normalized[0].split() == normalized.split()


def test_what_a_model_was_trained_for_is_assumed(multilingual, clips):
    """As by every runtime, which reads it from the model's folder."""
    model, processor = multilingual
    paths = [c.audio for c in clips]
    expected = transcribe(model, processor, paths, language="ja", task="translate")
    other = transcribe(model, processor, paths, language="ja", task="transcribe")
    set_language(model, "ja", "translate")
    assert transcribe(model, processor, paths) == expected != other
    assert transcribe(model, processor, paths, task="transcribe") == other
    said = Sample(id="x", audio=paths[0], text="Mr. Smith's colour!", duration_s=clips[0].duration_s)
    (row,) = evaluate(model, processor, [said]).rows
    assert row.normalized[0].split() == ENGLISH.split()


def test_one_bad_file_is_reported_and_counts_in_no_rate(multilingual, clips, tmp_path):
    model, processor = multilingual
    bad = Sample(id="bad", audio=tmp_path / "gone.wav", text="mots perdus", duration_s=1, line=9)
    done = []
    whole = evaluate(model, processor, clips[:4], language="fr")
    result = evaluate(
        model, processor, [bad, *clips[:4], bad], language="fr", batch_size=3, progress=lambda *at: done.append(at)
    )
    assert [row.sample.id for row in result.rows] == [clip.id for clip in clips[:4]]
    assert (result.raw, result.normalized) == (whole.raw, whole.normalized)
    assert [problem.line for problem in result.problems] == [9, 9] and "gone.wav" in str(result.problems[0])
    assert done[-1] == (6, 6) and done == sorted(done)


def test_rates_are_of_what_was_heard(multilingual, clips):
    model, processor = multilingual
    heard = transcribe(model, processor, [c.audio for c in clips[:3]], language="fr")
    perfect = [
        Sample(id=c.id, audio=c.audio, text=t.text, duration_s=c.duration_s)
        for c, t in zip(clips[:3], heard, strict=True)
    ]
    result = evaluate(model, processor, perfect, language="fr", temperatures=GREEDY)
    assert result.raw.wer == result.raw.cer == result.normalized.wer == 0 and result.raw.words > 0
    assert evaluate(model, processor, [], language="fr").raw.wer == 0


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_left_as_it_was(multilingual, profile_of, clips, training):
    model = prepare(multilingual[0], profile_of(method="lora")).train(training)
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    model.get_base_model().model.decoder.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    transcribe(model, multilingual[1], [clips[0].audio], language="fr")
    assert modes and not any(modes) and model.training is training


def test_half_precision_models_can_be_evaluated(multilingual, clips):
    model, processor = multilingual
    assert transcribe(model.to(torch.bfloat16), processor, [clips[0].audio], language="fr")[0].problem == ""


def test_silence_is_no_problem(multilingual):
    model, processor = multilingual
    mel = log_mel(np.zeros(16_000, np.float32), processor.feature_extractor)
    assert transcribe(model, processor, [mel], language="fr")[0].problem == ""


def test_cropped_clips_of_full_length_are_decoded_as_full_ones(multilingual, audio_file, tmp_path):
    model, processor = multilingual
    paths = [audio_file(tmp_path / f"{n}.wav", seconds=5, seed=n) for n in range(3)]
    paths.append(audio_file(tmp_path / "long.wav", seconds=10))
    full, cropped = (transcribe(model, processor, paths, language="fr", audio_context=c) for c in AUDIO_CONTEXTS)
    assert full == cropped and all(transcript.text for transcript in full)


def test_cropped_clips_are_encoded_at_few_lengths_near_their_own(multilingual, clips):
    model, processor = multilingual
    shapes = []
    model.model.encoder.conv1.register_forward_pre_hook(lambda _module, given: shapes.append(tuple(given[0].shape)))
    paths = [clip.audio for clip in clips]  # 0.3 to 4.1 s; the model hears 5 s at once
    together = transcribe(model, processor, paths, language="fr", audio_context="cropped", batch_size=6)
    assert sorted(shapes) == [(1, 80, 200), *[(1, 80, 400)] * 10, (1, 80, 500), *[(2, 80, 200)] * 4]
    alone = [transcribe(model, processor, [path], language="fr", audio_context="cropped")[0] for path in paths]
    assert together == alone != transcribe(model, processor, paths, language="fr")


@pytest.mark.parametrize("audio_context", AUDIO_CONTEXTS)
def test_pieces_of_long_recordings_stay_in_order(multilingual, audio_file, clips, tmp_path, audio_context):
    """The last piece, which is short, may be decoded before the others."""
    model, processor = multilingual
    long = audio_file(tmp_path / "long.wav", seconds=10.5)
    waveform = load_audio(long)
    pieces = [log_mel(waveform[at : at + 80_000], processor.feature_extractor) for at in (0, 80_000, 160_000)]
    arguments = {"language": "fr", "audio_context": audio_context}
    alone = [transcribe(model, processor, [mel], **arguments)[0].text for mel in pieces]
    heard = transcribe(model, processor, [clips[0].audio, long], batch_size=2, **arguments)
    assert heard[1].text == " ".join(filter(None, alone)) and alone[-1] not in alone[:-1]


def test_a_model_that_writes_timestamps_by_itself(multilingual, clips):
    """Then transformers may decode a clip in several turns, and encodes in each of them."""
    model, processor = multilingual
    model.generation_config.return_timestamps = True
    paths = [clip.audio for clip in clips[:5]]
    expected = [plain_transformers(model, processor, path, language="fr", task="transcribe") for path in paths]
    heard = transcribe(model, processor, paths, language="fr", task="transcribe", batch_size=3)
    assert [transcript.text for transcript in heard] == expected


def test_loops_are_counted(multilingual, clips, monkeypatch):
    heard = iter([["on and on and on and on and on"], ["one two three"], ["no no no no no no"]])
    monkeypatch.setattr(WhisperProcessor, "batch_decode", lambda *_args, **_more: next(heard))
    assert evaluate(*multilingual, clips[:3], language="fr", batch_size=1, temperatures=GREEDY).loops == 2


def test_what_cannot_be_transcribed_for_another_reason_ends_it(multilingual, clips):
    """Also while the next clips are being read."""
    model, processor = multilingual
    with pytest.raises(TypeError):
        transcribe(model, processor, [clips[0].audio, None, clips[1].audio], language="fr", batch_size=1)
    model.model.decoder.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transcribe(model, processor, [clip.audio for clip in clips], language="fr", batch_size=1)


def test_nothing_to_transcribe(multilingual):
    assert transcribe(*multilingual, [], language="fr") == []
