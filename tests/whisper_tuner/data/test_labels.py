import pytest
import torch
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from whisper_tuner.data.batches import pad_labels
from whisper_tuner.data.labels import label_encoder
from whisper_tuner.errors import ConfigError, DataError


def names(processor, ids):
    return processor.tokenizer.convert_ids_to_tokens(ids)


def test_multilingual_labels_carry_language_and_task(multilingual):
    model, processor = multilingual
    ids = label_encoder(model, processor.tokenizer, language="French", task="translate").encode("ab")
    assert names(processor, ids) == ["<|fr|>", "<|translate|>", "<|notimestamps|>", "Ġ", "a", "b", "<|endoftext|>"]


def test_english_only_labels_carry_no_language(english):
    model, processor = english
    ids = label_encoder(model, processor.tokenizer, language="fr").encode("ab")
    assert names(processor, ids) == ["<|notimestamps|>", "Ġ", "a", "b", "<|endoftext|>"]


def test_decoder_sees_the_start_token_exactly_once(multilingual):
    model, processor = multilingual
    labels = pad_labels([label_encoder(model, processor.tokenizer, language="fr").encode("ab")])
    inputs = shift_tokens_right(labels, model.config.pad_token_id, model.config.decoder_start_token_id)
    start = model.config.decoder_start_token_id
    assert inputs[0, 0] == start and (inputs == start).sum() == 1 and not (labels == start).any()


def test_labels_are_what_the_tokenizer_makes_without_the_start_token(multilingual):
    model, processor = multilingual
    processor.tokenizer.set_prefix_tokens(language="fr", task="transcribe")
    ours = label_encoder(model, processor.tokenizer, language="fr").encode("déjà vu")
    assert [model.config.decoder_start_token_id, *ours] == processor.tokenizer(" déjà vu").input_ids


def test_padding_is_masked_and_end_of_text_is_learnt(multilingual):
    model, _ = multilingual
    end = model.config.eos_token_id
    assert model.config.pad_token_id == end
    padded = pad_labels([[1, 2, end], [1, end]])
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[1, 2, end], [1, end, -100]]


def test_text_in_unspaced_scripts_gets_no_leading_space(multilingual):
    model, processor = multilingual
    ids = label_encoder(model, processor.tokenizer, language="ja").encode("a")
    assert names(processor, ids)[3:] == ["a", "<|endoftext|>"]


@pytest.mark.parametrize("language", ["ja", "Japanese", "<|ja|>", " JA "])
def test_a_translation_is_english_text_of_foreign_speech(multilingual, language):
    model, processor = multilingual
    ids = label_encoder(model, processor.tokenizer, language=language, task="translate").encode("a")
    assert names(processor, ids) == ["<|ja|>", "<|translate|>", "<|notimestamps|>", "Ġ", "a", "<|endoftext|>"]
    ids = label_encoder(model, processor.tokenizer, language=language).encode("a")
    assert names(processor, ids) == ["<|ja|>", "<|transcribe|>", "<|notimestamps|>", "a", "<|endoftext|>"]


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_english_only_models_write_a_leading_space_whatever_is_asked(english, task):
    model, processor = english
    ids = label_encoder(model, processor.tokenizer, language="Japanese", task=task).encode("a")
    assert names(processor, ids) == ["<|notimestamps|>", "Ġ", "a", "<|endoftext|>"]


def test_text_that_the_decoder_cannot_hold_is_refused(multilingual):
    model, processor = multilingual
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    room = model.config.max_target_positions - 5  # three prompt tokens, the space, end-of-text
    assert len(encoder.encode("a" * room)) == model.config.max_target_positions
    with pytest.raises(DataError, match="makes 65 tokens, but the decoder takes 64"):
        encoder.encode("a" * (room + 1))


def test_a_multilingual_model_must_be_told_the_language(multilingual):
    model, processor = multilingual
    for task in ("transcribe", "translate"):
        with pytest.raises(ConfigError, match="needs a language"):
            label_encoder(model, processor.tokenizer, task=task)
