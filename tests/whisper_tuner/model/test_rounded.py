"""Frozen weights in bf16 and int8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from small_whisper import write_whisper
from torch import nn

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym.flat import FlatParameters
from whisper_tuner.config import Profile
from whisper_tuner.export.final import load_model, save_final
from whisper_tuner.model import rounded
from whisper_tuner.model.base_model import load_base, prepare


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("base"), multilingual=False, seconds=5)


def trained(
    base: Path, method: str, precision: str, optimizer: str = "adamw"
) -> tuple[nn.Module, torch.Tensor, object]:
    settings = {"method": method, "frozen_precision": precision, "optimizer": optimizer}
    profile = Profile(base_model=str(base), train=Path(), **settings)
    torch.manual_seed(1)
    model, processor = load_base(base, profile)
    model = prepare(model, profile)
    wrapper = WhisperModelWrapper(model, processor, "cpu").train()
    torch.manual_seed(2)
    batch = {"input_features": torch.randn(2, 80, 300), "labels": torch.randint(0, 256, (2, 9))}
    loss, _ = wrapper(batch)
    loss.backward()
    gradients = [p.grad.flatten() for p in wrapper.parameters() if p.grad is not None]
    return model, torch.cat(gradients), processor


@pytest.mark.parametrize(("precision", "off"), [("bf16", 0.03), ("int8", 0.2)])
@pytest.mark.parametrize("method", ["lora", "decoder"])
def test_gradients_are_those_of_float32_but_for_rounding(base, method, precision, off):
    _, whole, _ = trained(base, method, "float32")
    model, rounded, _ = trained(base, method, precision)
    assert 0 < (rounded - whole).norm() < off * whole.norm()
    kinds = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert kinds == {torch.float32, {"bf16": torch.bfloat16, "int8": torch.int8}[precision]}
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    flat = FlatParameters(model)  # no rank sends what is frozen, nor its scales
    assert flat.numel == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("method", ["full", "decoder"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_low_memory_trains_matrices_in_bf16(base, method, precision):
    _, whole, _ = trained(base, method, "float32")
    model, gradients, _ = trained(base, method, precision, "low_memory")
    assert 0 < (gradients - whole).norm() < (0.2 if precision == "int8" else 0.03) * whole.norm()
    for name, p in model.named_parameters():
        is_held = p.ndim == 2 and "embed_positions" not in name
        if p.requires_grad:
            assert p.dtype == (torch.bfloat16 if is_held else torch.float32), name
        elif method == "decoder" and is_held:
            assert p.dtype == (torch.int8 if precision == "int8" else torch.float32), name
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight


def test_gradients_of_a_rounded_layer_are_those_of_its_float_copy(monkeypatch):
    monkeypatch.setattr(rounded, "ROWS", 3)
    layer, values = nn.Linear(6, 10), torch.randn(2, 5, 6)
    layer.weight.data = layer.weight.data.bfloat16()
    rounded.hold_rounded(nn.Sequential(layer), "float32")
    weight = layer.weight.detach().float().requires_grad_()
    bias = layer.bias.detach().clone().requires_grad_()
    by = torch.randn(2, 5, 10)
    layer(values).backward(by)
    nn.functional.linear(values, weight, bias).backward(by)
    torch.testing.assert_close(layer.weight.grad, weight.grad.bfloat16())
    torch.testing.assert_close(layer.bias.grad, bias.grad)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_what_its_weights_say_in_parts(monkeypatch, precision, bias):
    monkeypatch.setattr(rounded, "ROWS", 3)
    layer, values = nn.Linear(6, 10, bias=bias).requires_grad_(False), torch.randn(2, 5, 6, requires_grad=True)
    layer.weight.data = layer.weight.data.bfloat16()
    model = nn.Sequential(layer)
    rounded.hold_rounded(model, precision)
    weight = layer.weight.float() if layer.scale is None else layer.weight.float() * layer.scale
    found, expected = model(values), nn.functional.linear(values, weight, layer.bias)
    assert torch.allclose(found, expected, atol=1e-6)
    by = torch.randn_like(found)
    [own], [plain] = (torch.autograd.grad(each, values, by) for each in (found, expected))
    assert torch.allclose(own, plain, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(values).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("method", "precision", "optimizer"),
    [("lora", "float32", "adamw"), ("lora", "int8", "adamw"), ("decoder", "int8", "adamw"),
     ("decoder", "float32", "low_memory"), ("full", "float32", "adamw")],
)  # fmt: skip
def test_a_blend_has_a_share_of_what_was_learnt(base, tmp_path, method, precision, optimizer):
    published, processor = load_base(base)
    models = []
    for share in (1.0, 0.25):
        model, _, _ = trained(base, method, precision, optimizer)
        with torch.no_grad():
            for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
                parameter += 0.01 * (number % 3)
        folder = save_final(model, processor, tmp_path / str(share), base, blend=share)
        models.append(dict(load_model(folder, base if method == "lora" else None)[0].named_parameters()))
    whole, part = models
    moved = 0
    for name, value in published.named_parameters():
        expected = value + 0.25 * (whole[name] - value)
        assert torch.allclose(part[name], expected, atol=2e-3 if optimizer == "low_memory" else 1e-5), name
        moved += not torch.equal(whole[name], value)
    assert moved


def test_embedding_and_output_layer_go_on_sharing_their_weight(base):
    model, _, _ = trained(base, "lora", "int8")
    whisper = model.get_base_model()
    assert whisper.proj_out.weight is whisper.model.decoder.embed_tokens.weight
    assert whisper.proj_out.weight.dtype == torch.int8


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [("lora", "adamw"), ("decoder", "adamw"), ("decoder", "low_memory"), ("full", "low_memory")],
)
def test_what_is_saved_has_the_published_weights(base, tmp_path, method, optimizer):
    """Rounded ones are for training alone; what was trained is saved as it is."""
    model, _, processor = trained(base, method, "int8", optimizer)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.01
    published, _ = load_base(base)
    save_final(model, processor, tmp_path / "final", base)
    found, _ = load_model(tmp_path / "final", base if method == "lora" else None)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    if method == "lora":
        adapted, own = PeftModel.from_pretrained(published, tmp_path / "final"), dict(model.named_parameters())
        assert all(torch.equal(p, own[name]) for name, p in adapted.named_parameters() if "lora_" in name)
        published = adapted.merge_and_unload()
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), published.parameters(), strict=True))
    else:
        for name, p in published.model.encoder.named_parameters() if method == "decoder" else ():
            assert torch.equal(p, found.model.encoder.get_parameter(name)), name
        name = "decoder.layers.0.fc1.weight"
        assert torch.equal(found.model.get_parameter(name), model.model.get_parameter(name).float())
