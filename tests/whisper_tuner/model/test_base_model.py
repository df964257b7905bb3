import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import WhisperForConditionalGeneration

from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError, ModelError
from whisper_tuner.hub import check_model
from whisper_tuner.model.base_model import (
    encode,
    full_frames,
    load_base,
    prepare,
    set_language,
)


def trainable_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def mel(model, frames, batch=2):
    return torch.randn(batch, model.config.num_mel_bins, frames, generator=torch.Generator().manual_seed(1))


def test_half_precision_checkpoints_load_as_float32(multilingual, tmp_path):
    model, processor = multilingual
    model.half().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert {p.dtype for p in load_base(tmp_path)[0].parameters()} == {torch.float32}


def test_forced_ids_and_derived_marks_do_not_survive(multilingual_folder, tmp_path):
    for path in multilingual_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    stored |= {"_from_model_config": True, "forced_decoder_ids": [[1, None]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    model, _ = load_base(tmp_path)
    model.generate(mel(model, full_frames(model)), language="fr", task="transcribe", max_new_tokens=2)
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert "_from_model_config" not in again and again.get("forced_decoder_ids") is None
    assert again["lang_to_id"] == stored["lang_to_id"]


def test_settings_that_do_not_name_their_kind_load(multilingual_folder, tmp_path):
    folder = shutil.copytree(multilingual_folder, tmp_path / "model")
    stored = json.loads((folder / "config.json").read_text())
    del stored["model_type"]
    (folder / "config.json").write_text(json.dumps(stored))
    load_base(folder)
    with pytest.raises(ModelError, match="model_type"):
        check_model(Profile(base_model=str(folder), train=tmp_path))


def test_a_processor_of_another_model_is_refused(multilingual_folder, english, tmp_path):
    for path in multilingual_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    english[1].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"takes log-mels \(80, 500\), its feature extractor makes \(80, 3000\)"):
        load_base(tmp_path)


def test_full_trains_all_but_the_encoders_sinusoids(multilingual, profile_of):
    model, _ = multilingual
    every = {name for name, _ in model.named_parameters()}
    assert trainable_names(prepare(model, profile_of())) == every - {"model.encoder.embed_positions.weight"}


def test_decoder_trains_nothing_of_the_encoder(multilingual, profile_of):
    model, _ = multilingual
    names = trainable_names(prepare(model, profile_of(method="decoder")))
    assert names and all(name.startswith("model.decoder.") for name in names)


def test_lora_trains_adapters_alone(multilingual, profile_of):
    model, _ = multilingual
    adapted = prepare(model, profile_of(method="lora", lora_r=4, lora_targets=("q_proj", "v_proj")))
    assert isinstance(adapted, PeftModel)
    assert all("lora_" in name for name in trainable_names(adapted))
    attentions = 2 + 2 * 2  # one in each encoder layer, two in each decoder layer
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == attentions * 2 * 4 * (16 + 16)


def test_adapters_that_fit_no_model_are_refused(multilingual, profile_of):
    model, _ = multilingual
    with pytest.raises(ConfigError, match=r"(?s)LoRA cannot be added.*fc1"):
        prepare(model, profile_of(method="lora", lora_targets=("query",)))


def test_dropout_is_set_in_all_feed_forward_layers_and_there_alone(multilingual, profile_of):
    model, _ = multilingual
    prepare(model, profile_of(dropout=0.5)).train()
    first, second = (encode(model, mel(model, 100)).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)
    parts = (model.model.encoder, model.model.decoder)
    assert all(layer.activation_dropout == 0.5 and layer.dropout == 0.0 for part in parts for layer in part.layers)
    assert (model.config.activation_dropout, model.config.dropout) == (0.5, 0.0)
    assert not any(part.dropout for part in parts)


def test_encoder_at_full_length_equals_stock(multilingual):
    model, _ = multilingual
    features = mel(model.eval(), full_frames(model))
    torch.testing.assert_close(
        encode(model, features).last_hidden_state, model.model.encoder(features).last_hidden_state
    )


@pytest.mark.parametrize("frames", [50, 120])
@pytest.mark.parametrize("adapted", [False, True])
def test_encoder_on_short_inputs_equals_a_stock_encoder_made_for_that_length(multilingual, profile_of, frames, adapted):
    model = multilingual[0].eval()
    short_config = type(model.config).from_dict(model.config.to_dict() | {"max_source_positions": frames // 2})
    short = WhisperForConditionalGeneration(short_config).eval()
    weights = model.state_dict()
    weights["model.encoder.embed_positions.weight"] = weights["model.encoder.embed_positions.weight"][: frames // 2]
    short.load_state_dict(weights)
    features = mel(model, frames)
    tested = (
        prepare(model, profile_of(method="lora")).eval() if adapted else model
    )  # a fresh adapter changes nothing yet
    got = encode(tested, features).last_hidden_state
    assert got.shape == (2, frames // 2, 16)
    torch.testing.assert_close(got, short.model.encoder(features).last_hidden_state)


def test_adapters_in_the_encoder_learn_from_short_inputs(multilingual, profile_of):
    model = prepare(multilingual[0], profile_of(method="lora")).train()
    encode(model, mel(multilingual[0], 60)).last_hidden_state.square().sum().backward()
    grads = [p.grad for n, p in model.named_parameters() if "encoder" in n and "lora_B" in n and "decoder" not in n]
    assert grads and all(grad.abs().sum() > 0 for grad in grads)


def test_spec_augment_masks_only_in_training_and_leaves_the_batch_alone(multilingual):
    model, _ = multilingual
    model.config.apply_spec_augment = True
    features = mel(model, 100)
    before = features.clone()
    plain = encode(model.eval(), features).last_hidden_state
    masked = encode(model.train(), features).last_hidden_state
    torch.testing.assert_close(features, before, rtol=0, atol=0)
    assert not torch.allclose(plain, masked)


def test_the_language_is_remembered_by_multilingual_models_only(multilingual, english):
    for (model, _), expected in ((multilingual, "fr"), (english, None)):
        set_language(model, "French")
        assert getattr(model.generation_config, "language", None) == expected


def test_a_model_that_is_trained_on_silence_may_write_nothing(english, profile_of, tmp_path):
    """Published models forbid a blank and end-of-text as the first token."""
    model, _ = english
    end = model.config.eos_token_id
    model.generation_config.begin_suppress_tokens = [220, end]
    prepare(model, profile_of())
    assert model.generation_config.begin_suppress_tokens == [220, end]
    prepare(model, profile_of(no_speech="train"))
    model.save_pretrained(tmp_path)
    saved = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert saved.generation_config.begin_suppress_tokens == [220]
    saved.generate(mel(saved, full_frames(saved)), max_new_tokens=2)


def test_masks_of_the_checkpoints_own_that_are_longer_than_a_clip_are_left_out(multilingual):
    model, _ = multilingual
    model.config.apply_spec_augment, model.config.mask_time_length = True, 60
    encode(model.train(), mel(model, 50))
