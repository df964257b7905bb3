import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import WhisperConfig, WhisperForConditionalGeneration

from whisper_tuner.model.base_model import prepare
from whisper_tuner.model.layers import SplitLinear, split_wide_layers

MOST = 32_766
TOKENS = 51_866
TILED = 16  # M1 and M2 are wrong where both sides of the product have as many (pytorch 183535)


class LongestSum(TorchDispatchMode):
    """Of the matrix products that run meanwhile: the most terms of a sum."""

    def __init__(self):
        super().__init__()
        self.terms = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[-2:]
            if min(left.shape[-2], right.shape[-1]) >= TILED:
                self.terms = max(self.terms, left.shape[-1])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def model():
    settings = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": TOKENS}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(
        WhisperConfig(**settings, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=100)
    )


def longest_sum(model) -> int:
    model.train()
    with LongestSum() as longest:
        loss = model(input_features=torch.rand(2, 80, 200), labels=torch.randint(50_000, (2, 20))).loss
        loss.backward()
    return longest.terms


@pytest.mark.parametrize(
    ("method", "targets"), [("full", ()), ("decoder", ()), ("lora", ("q_proj",)), ("lora", ("proj_out", "fc1"))]
)
def test_no_step_sums_over_the_whole_vocabulary(model, profile_of, method, targets):
    settings = {"lora_targets": targets, "lora_r": TILED} if targets else {}
    model = prepare(model, profile_of(method=method, **settings))
    assert longest_sum(model) == TOKENS
    split_wide_layers(model, MOST)
    assert longest_sum(model) <= MOST


def test_outputs_and_gradients_are_those_of_the_whole_layer():
    torch.manual_seed(0)
    whole = nn.Linear(6, 50)
    split = copy.deepcopy(whole)
    split_wide_layers(nn.Sequential(split, narrow := nn.Linear(50, 5)), 20)
    assert type(split) is SplitLinear and type(narrow) is nn.Linear
    one, other = (torch.ones(3, 4, 6).requires_grad_() for _ in range(2))
    torch.testing.assert_close(split(other), whole(one))
    for layer, values in ((whole, one), (split, other)):
        layer(values).square().sum().backward()
    torch.testing.assert_close(other.grad, one.grad)
    torch.testing.assert_close(split.weight.grad, whole.weight.grad)
    torch.testing.assert_close(split.bias.grad, whole.bias.grad)


def test_ties_and_files_stay_as_they_are(model, tmp_path):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    split_wide_layers(model, MOST)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert type(again.proj_out) is nn.Linear
    torch.testing.assert_close(again.state_dict(), before, rtol=0, atol=0)
