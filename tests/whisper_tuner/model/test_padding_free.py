"""Clips in one sequence: each has the states, the loss and the gradients that it would have alone."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperConfig, WhisperForConditionalGeneration

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from whisper_tuner.config import Profile
from whisper_tuner.data.batch_shapes import Lengths
from whisper_tuner.model.base_model import encode, prepare
from whisper_tuner.model.layers import ATTENTION, encode_joined

START, END, MELS, FULL = 60, 61, 8, 60
SPECIAL = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
SHAPE = {"vocab_size": 64, "num_mel_bins": MELS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
LARGEST = {"max_source_positions": FULL // 2, "max_target_positions": 16}
CLIPS = [(24, 5), (FULL, 1), (2, 16), (24, 3)]  # mel frames and tokens of each; the third has a single position


@pytest.fixture
def whisper():
    return small_whisper()


def small_whisper(**changes):
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(
        WhisperConfig(**SPECIAL, **SHAPE, **HEADS, **LARGEST, init_std=0.2, **changes)
    ).eval()


def clips_of(sizes):
    """[(log-mel [8, frames], inputs, labels)]; the first token of each clip is given, and not learnt."""
    chance = torch.Generator().manual_seed(len(sizes))
    found = []
    for frames, tokens in sizes:
        ids = torch.randint(START, (tokens + 1,), generator=chance)
        labels = ids[1:].clone()
        labels[: min(1, tokens - 1)] = -100
        found.append((torch.randn(MELS, frames, generator=chance), ids[:-1], labels))
    return found


def joined(clips):
    mels, inputs, labels = zip(*clips, strict=True)
    lengths = Lengths([mel.shape[1] for mel in mels], [len(ids) for ids in inputs])
    ids = {"decoder_input_ids": torch.cat(inputs), "labels": torch.cat(labels)}
    return {"input_features": torch.cat(mels, dim=1), "lengths": lengths, **ids}


def alone(clips):
    names = ("input_features", "decoder_input_ids", "labels")
    return [dict(zip(names, (value.unsqueeze(0) for value in clip), strict=True)) for clip in clips]


def results(model, batches):
    """Sum of the losses, target tokens, gradients by name."""
    model.zero_grad()
    total = count = 0
    for loss, tokens in map(model, batches):
        (loss * tokens).backward()
        total, count = total + loss.item() * tokens, count + tokens
    return total, count, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, clips, **tolerance):
    loss, tokens, gradients = results(model, alone(clips))
    found, count, others = results(model, [joined(clips)])
    assert found == pytest.approx(loss, rel=tolerance["rtol"]) and count == tokens
    assert gradients.keys() == others.keys() and gradients
    torch.testing.assert_close(others, gradients, **tolerance)


def test_states_are_those_of_each_clip_alone(whisper):
    clips = clips_of(CLIPS)
    batch = joined(clips)
    states = encode_joined(whisper, batch["input_features"], batch["lengths"])[0].split(batch["lengths"].positions)
    for own, (mel, *_) in zip(states, clips, strict=True):
        torch.testing.assert_close(own, encode(whisper, mel.unsqueeze(0)).last_hidden_state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", ["full", "decoder", "lora"])
def test_losses_and_gradients_are_those_of_each_clip_alone(whisper, method, checkpointed):
    model = prepare(whisper, Profile(base_model="", train="", method=method, lora_r=2, lora_dropout=0.0))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    wrapper = WhisperModelWrapper(model, None, "cpu").double()  # float32's last digits depend on the CPU
    if checkpointed:
        wrapper.checkpoint_gradients()
    assert_same(wrapper.train(checkpointed), doubled(clips_of(CLIPS)), rtol=1e-5, atol=1e-6)  # it acts in training only


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, FULL // 2).map(lambda n: 2 * n), st.integers(1, 16)), min_size=1, max_size=6))
def test_clips_of_any_lengths_do_not_hear_each_other(sizes):
    assert_same(
        WhisperModelWrapper(small_whisper(), None, "cpu").double(), doubled(clips_of(sizes)), rtol=1e-5, atol=1e-6
    )


def doubled(clips):
    return [(mel.double(), inputs, labels) for mel, inputs, labels in clips]


def test_states_that_are_stored_may_stand_for_the_features(whisper):
    wrapper, batch = WhisperModelWrapper(whisper, None, "cpu"), joined(clips_of(CLIPS))
    expected, tokens = wrapper(batch)
    states = encode_joined(whisper, batch.pop("input_features"), batch["lengths"])[0]
    of_another_process = WhisperModelWrapper(small_whisper(), None, "cpu")
    assert of_another_process({**batch, "encoder_states": states}) == (expected, tokens)


def test_bf16(whisper):
    wrapper, batch = WhisperModelWrapper(whisper, None, "cpu"), joined(clips_of(CLIPS))
    expected, _ = wrapper(batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = wrapper(batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0)
    assert loss.dtype == torch.float32 and all(
        p.grad.isfinite().all() for p in wrapper.parameters() if p.grad is not None
    )


def test_masks_of_the_checkpoints_config_are_drawn_for_each_clip():
    """Clips shorter than a mask have none."""
    about = {"mask_time_prob": 0.9, "mask_time_length": 10, "mask_time_min_masks": 1}
    model, (long, short) = small_whisper(apply_spec_augment=True, **about).train(), (40, 8)
    mels, lengths = torch.randn(MELS, long + short), Lengths([long, short], [1, 1])
    model.config.apply_spec_augment = False
    plain = encode_joined(model, mels, lengths)[0]
    model.config.apply_spec_augment = True
    before = mels.clone()
    masked = encode_joined(model, mels, lengths)[0]
    assert not torch.equal(masked[: long // 2], plain[: long // 2]) and torch.equal(mels, before)
    torch.testing.assert_close(masked[long // 2 :], plain[long // 2 :])


def test_the_model_is_otherwise_as_before(whisper, tmp_path):
    features = torch.randn(2, MELS, FULL)
    untouched = copy.deepcopy(whisper)
    WhisperModelWrapper(whisper, None, "cpu")(joined(clips_of(CLIPS)))
    assert whisper.config._attn_implementation == ATTENTION
    ids = torch.tensor([[START, 1, 2, 3], [START, 4, 5, END]])
    logits = [model(input_features=features, decoder_input_ids=ids).logits for model in (whisper, untouched)]
    assert torch.equal(*logits)
    texts = [model.generate(features, max_new_tokens=8) for model in (whisper, untouched)]
    assert torch.equal(*texts)
    for model, name in ((whisper, "one"), (untouched, "other")):
        model.save_pretrained(tmp_path / name)
    one, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "other"))
    assert one == other and ATTENTION not in str(one)
