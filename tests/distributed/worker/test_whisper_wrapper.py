import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, WhisperConfig, WhisperForConditionalGeneration

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym.strategy import AllReduceConfig
from exogym.strategy.optim import inner_optimizer
from whisper_tuner.config import Profile
from whisper_tuner.model.base_model import prepare

START, END = 60, 61


@pytest.fixture
def whisper():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=30,
        max_target_positions=16,
        init_std=0.2,
        **special,
    )
    return WhisperForConditionalGeneration(config).eval()


def batch_of(*texts, frames=60):
    labels = torch.full((len(texts), max(map(len, texts))), -100)
    for row, ids in zip(labels, texts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    features = torch.stack([torch.randn(8, frames, generator=torch.Generator().manual_seed(len(ids))) for ids in texts])
    return {"input_features": features, "labels": labels, "ids": [str(len(ids)) for ids in texts]}


def test_loss_is_the_models_own_and_tokens_are_counted(whisper):
    batch = batch_of([1, 2, 3, END], [4, END])
    loss, tokens = WhisperModelWrapper(whisper, None, "cpu")(batch)
    expected = whisper(input_features=batch["input_features"], labels=batch["labels"]).loss
    torch.testing.assert_close(loss, expected)
    assert tokens == 6 and loss.dtype == torch.float32


def test_dicts_and_tuples_are_the_same(whisper):
    batch = batch_of([1, 2, 3, END], [4, END])
    wrapper = WhisperModelWrapper(whisper, None, "cpu")
    for pair in ((batch["input_features"], batch["labels"]), [batch["input_features"], batch["labels"]]):
        assert wrapper(pair) == wrapper(batch)


@pytest.mark.parametrize("frames", [60, 24])
def test_token_weighted_parts_add_up_to_the_whole(whisper, frames):
    wrapper = WhisperModelWrapper(whisper, None, "cpu")
    texts = [[1, 2, 3, 4, 5, END], [6, END], [7, 8, END]]

    def gradients(*batches):
        whisper.zero_grad()
        for loss, tokens in map(wrapper, batches):
            (loss * tokens).backward()
        return {name: p.grad.clone() for name, p in whisper.named_parameters() if p.grad is not None}

    whole = gradients(batch_of(*texts, frames=frames))
    parts = gradients(batch_of(*texts[:2], frames=frames), batch_of(texts[2], frames=frames))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("settings", [{}, {"method": "lora", "lora_targets": ("q_proj", "proj_out"), "lora_r": 4}])
@pytest.mark.parametrize("at_once", [1, 3, 10])
def test_logits_in_parts_give_the_same_loss_and_gradients(whisper, monkeypatch, settings, at_once):
    model = prepare(whisper, Profile(base_model="", train=Path(), **settings))
    wrapper, batch = WhisperModelWrapper(model, None, "cpu"), batch_of([1, 2, 3, 4, 5, END], [6, END], [7, 8, END])

    def found():
        model.zero_grad()
        loss, tokens = wrapper(batch)
        (loss * tokens).backward()
        return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    loss, gradients = found()
    monkeypatch.setattr("distributed.worker.whisper_wrapper.LOGITS_AT_ONCE", at_once)
    again, parts = found()
    torch.testing.assert_close(again, loss)
    assert parts.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("at_once", [2, 100])
def test_gradients_of_tied_weights_are_transformers_own(whisper, monkeypatch, checkpointing, at_once):
    whisper.config.apply_spec_augment = False
    batches = [batch_of([1, 2, 3, 4, 5, END], [6, END]), batch_of([7, 8, 8, END])]
    for batch in batches:
        whisper(input_features=batch["input_features"], labels=batch["labels"], use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in whisper.named_parameters() if p.grad is not None}
    whisper.zero_grad()
    monkeypatch.setattr("distributed.worker.whisper_wrapper.LOGITS_AT_ONCE", at_once)
    wrapper = WhisperModelWrapper(whisper, None, "cpu").train()
    if checkpointing:
        assert wrapper.checkpoint_gradients() and not wrapper.checkpoint_gradients()
    for batch in batches:
        wrapper(batch)[0].backward()
    for name, gradient in expected.items():
        found = dict(whisper.named_parameters())[name].grad
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("settings", [{}, {"method": "lora", "lora_targets": ("q_proj", "proj_out"), "lora_r": 4}])
def test_what_is_computed_again_has_the_same_dropout(whisper, monkeypatch, settings):
    """Where torch's checkpoint keeps no generator, as on Apple's GPU. Logits are computed again, too."""
    profile = Profile(base_model="", train=Path(), dropout=0.3, lora_dropout=0.3, **settings)
    wrapper = WhisperModelWrapper(prepare(whisper, profile), None, "cpu").train()
    monkeypatch.setattr("distributed.worker.whisper_wrapper.LOGITS_AT_ONCE", 2)

    def found():
        wrapper.zero_grad()
        torch.manual_seed(4)
        wrapper(batch_of([1, 2, 3, 4, 5, END], [6, 7, END]))[0].backward()
        return {n: p.grad.clone() for n, p in wrapper.named_parameters() if p.grad is not None}, torch.rand(3)

    def forgetful(*args, **settings):
        return checkpoint(*args, **{**settings, "preserve_rng_state": False})

    monkeypatch.setattr("distributed.worker.whisper_wrapper.checkpoint", lambda compute, *args, **_: compute(*args))
    gradients, after = found()
    for user in ("transformers.modeling_utils", "distributed.worker.whisper_wrapper"):
        monkeypatch.setattr(f"{user}.checkpoint", forgetful)
    wrapper.checkpoint_gradients()
    again, after_again = found()
    assert gradients.keys() == again.keys() != set() and torch.equal(after, after_again)
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, msg=name)


def test_a_copy_computes_again_on_its_own_device(whisper):
    wrapper = WhisperModelWrapper(whisper, None, "cpu")
    wrapper.checkpoint_gradients()
    again = copy.deepcopy(wrapper).to("meta").model.model.encoder.layers[0]._gradient_checkpointing_func
    assert again.keywords["context_fn"].__self__.device.type == "meta"
    pickle.dumps(wrapper)


def test_label_smoothing_acts_in_training_alone(whisper):
    batch = batch_of([1, 2, 3, END], [4, END])
    plain, smooth = (WhisperModelWrapper(whisper, None, "cpu", label_smoothing=share) for share in (0.0, 0.2))
    assert smooth.eval()(batch)[0] == plain.eval()(batch)[0]
    logits = whisper(input_features=batch["input_features"], labels=batch["labels"]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), label_smoothing=0.2)
    torch.testing.assert_close(smooth.train()(batch)[0], expected)


def test_more_padding_changes_nothing(whisper):
    wrapper = WhisperModelWrapper(whisper, None, "cpu")
    batch = batch_of([1, 2, END])
    padded = {**batch, "labels": torch.cat([batch["labels"], torch.full((1, 5), -100)], dim=1)}
    (loss, tokens), (again, still) = wrapper(batch), wrapper(padded)
    torch.testing.assert_close(loss, again)
    assert tokens == still == 3


def test_a_batch_without_targets_weighs_nothing(whisper):
    batch = batch_of([1, END])
    batch["labels"][:] = -100
    loss, tokens = WhisperModelWrapper(whisper, None, "cpu")(batch)
    assert (loss.item(), tokens) == (0.0, 0)


def test_loss_is_float32_under_autocast(whisper):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = WhisperModelWrapper(whisper, None, "cpu")(batch_of([1, 2, END], frames=24))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("method", ["full", "lora", "decoder"])
@pytest.mark.parametrize("frames", [60, 24])
def test_it_trains_what_the_model_trains_and_learns(whisper, method, frames):
    model = prepare(whisper, Profile(base_model="", train=Path(), method=method, lora_r=8))
    wrapper = WhisperModelWrapper(model, None, "cpu").train()
    trained = [p for p in wrapper.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters() if p.requires_grad}
    frozen = {name: p.clone() for name, p in wrapper.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batch = batch_of([1, 2, 3, END], [4, 5, END], frames=frames)
    losses = []
    for _ in range(30):
        loss, _ = wrapper(batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in trained)
    assert losses[-1] < 0.7 * losses[0]
    for name, parameter in wrapper.named_parameters():
        if name in frozen:
            torch.testing.assert_close(parameter, frozen[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_weight_decay_is_for_what_transformers_trainer_decays(whisper, method):
    wrapper = WhisperModelWrapper(prepare(whisper, Profile(base_model="", train=Path(), method=method)), None, "cpu")
    names = {parameter: name for name, parameter in wrapper.named_parameters() if parameter.requires_grad}
    groups = inner_optimizer(AllReduceConfig(weight_decay=0.1), list(names)).param_groups
    decaying = {names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decaying == set(Trainer.get_decay_parameter_names(None, wrapper)) & set(names.values())
    assert len(groups) == (2 if method == "full" else 1)
