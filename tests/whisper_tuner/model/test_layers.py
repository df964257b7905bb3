"""Layers of ours: values and gradients are those of transformers' own, or of autograd.

Clips in one sequence have what each would have alone; tied weights have one gradient; wide layers have parts.
"""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import WhisperConfig, WhisperForConditionalGeneration

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from whisper_tuner.data.batch_shapes import Lengths
from whisper_tuner.model.base_model import encode, prepare
from whisper_tuner.model.layers import ATTENTION, SplitLinear, TiedWeights, encode_joined, split_wide_layers

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
        WhisperConfig(**(SPECIAL | SHAPE | HEADS | LARGEST | {"init_std": 0.2} | changes))
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
def test_losses_and_gradients_are_those_of_each_clip_alone(whisper, profile_of, method, checkpointed):
    model = prepare(whisper, profile_of(method=method, lora_r=2, lora_dropout=0.0))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    wrapper = WhisperModelWrapper(model, None, "cpu").double()  # float32's last digits depend on the CPU
    if checkpointed:
        wrapper.checkpoint_gradients()
    assert_same(wrapper.train(checkpointed), doubled(clips_of(CLIPS)), rtol=1e-5, atol=1e-6)  # it acts in training only


@settings(max_examples=15, deadline=None)
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


WORDS, WIDTH, PADDING = 11, 4, 3


class Toy(nn.Module):
    """Ids [n] -> the summed loss of the next ids, by an embedding and an output layer of the same weights."""

    def __init__(self, padding=PADDING):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
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


def test_only_plain_tied_weights_that_are_trained(profile_of):
    model = small_whisper()
    assert TiedWeights.of(model) is not None
    assert TiedWeights.of(prepare(model, profile_of(method="decoder"))) is not None
    split_wide_layers(model, 10)  # as on Apple's GPUs
    assert TiedWeights.of(model) is None
    frozen = small_whisper()
    frozen.requires_grad_(False)
    assert TiedWeights.of(frozen) is None
    adapted = prepare(small_whisper(), profile_of(method="lora", lora_targets=("q_proj", "proj_out")))
    assert TiedWeights.of(adapted.get_base_model()) is None
    untied = small_whisper()
    untied.proj_out.weight = nn.Parameter(untied.proj_out.weight.detach().clone())
    assert TiedWeights.of(untied) is None


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
def wide():
    return small_whisper(vocab_size=TOKENS, d_model=32)


def longest_sum(model) -> int:
    model.train()
    with LongestSum() as longest:
        loss = model(input_features=torch.rand(2, MELS, FULL), labels=torch.randint(50_000, (2, 16))).loss
        loss.backward()
    return longest.terms


@pytest.mark.parametrize(
    ("method", "targets"), [("full", ()), ("decoder", ()), ("lora", ("q_proj",)), ("lora", ("proj_out", "fc1"))]
)
def test_no_step_sums_over_the_whole_vocabulary(wide, profile_of, method, targets):
    about = {"lora_targets": targets, "lora_r": TILED} if targets else {}
    model = prepare(wide, profile_of(method=method, **about))
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


def test_ties_and_files_stay_as_they_are(wide, tmp_path):
    model = wide
    before = {name: value.clone() for name, value in model.state_dict().items()}
    split_wide_layers(model, MOST)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert type(again.proj_out) is nn.Linear
    torch.testing.assert_close(again.state_dict(), before, rtol=0, atol=0)
