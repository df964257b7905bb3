"""Gradients of tied weights, against those of autograd."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from whisper_tuner.config import Profile
from whisper_tuner.model.base_model import prepare
from whisper_tuner.model.layers import TiedWeights, split_wide_layers

VOCABULARY, WIDTH, PADDING = 11, 4, 3


class Toy(nn.Module):
    """Ids [n] -> the summed loss of the next ids, by an embedding and an output layer of the same weights."""

    def __init__(self, padding=PADDING):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.padding = padding

    def forward(self, ids, tied):
        weights = TiedWeights(self.embed.weight, self.padding)
        states = self.between(weights.embed(ids) if tied else self.embed(ids)).tanh()
        parts = states[:-1].split(2)  # the output layer is used several times
        logits = [weights.logits(part) if tied else nn.functional.linear(part, self.embed.weight) for part in parts]
        return nn.functional.cross_entropy(torch.cat(logits).float(), ids[1:], reduction="sum")


BATCHES = [torch.tensor([1, 2, 2, 9, PADDING, 1]), torch.tensor([5, PADDING, 10, 2]), torch.tensor([0, 0, 0])]


def gradients(model, tied, dtype=None):
    model.zero_grad()
    for ids in BATCHES:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(ids, tied)
        (0.5 * loss).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("padding", [PADDING, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-6), (torch.bfloat16, 3e-2)])
def test_gradients_of_several_micro_batches_are_autograds(padding, dtype, tolerance):
    model = Toy(padding)
    expected, found = (gradients(model, tied, dtype) for tied in (False, True))
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def test_hooks_are_called_once_with_the_whole_gradient_which_stays_where_it_is():
    model, seen, expected = Toy(), [], []
    for count in (1, 2, 3):
        model.zero_grad()
        for ids in BATCHES[:count]:
            model(ids, tied=False).backward()
        expected.append(model.embed.weight.grad.clone())
    model.zero_grad()
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad.data_ptr(), p.grad.clone())))
    for ids in BATCHES:
        model(ids, tied=True).backward()
    assert len(seen) == len(BATCHES) and len({place for place, _ in seen}) == 1
    for (_, gradient), whole in zip(seen, expected, strict=True):
        torch.testing.assert_close(gradient, whole)


def whisper(**settings):
    special = {"bos_token_id": 9, "eos_token_id": 9, "pad_token_id": 9, "decoder_start_token_id": 8}
    size = {"vocab_size": 16, "num_mel_bins": 8, "d_model": 8, "max_source_positions": 10, "max_target_positions": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    return WhisperForConditionalGeneration(
        WhisperConfig(encoder_layers=1, decoder_layers=1, **size, **heads, **special, **settings)
    )


def profile_of(**settings):
    return Profile(base_model="", train=Path(), **settings)


def test_only_plain_tied_weights_that_are_trained():
    model = whisper()
    assert TiedWeights.of(model) is not None
    assert TiedWeights.of(prepare(model, profile_of(method="decoder"))) is not None
    split_wide_layers(model, 10)  # as on Apple's GPUs
    assert TiedWeights.of(model) is None
    frozen = whisper()
    frozen.requires_grad_(False)
    assert TiedWeights.of(frozen) is None
    adapted = prepare(whisper(), profile_of(method="lora", lora_targets=("q_proj", "proj_out")))
    assert TiedWeights.of(adapted.get_base_model()) is None
    untied = whisper()
    untied.proj_out.weight = nn.Parameter(untied.proj_out.weight.detach().clone())
    assert TiedWeights.of(untied) is None
