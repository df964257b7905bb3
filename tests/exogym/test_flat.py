import copy

import pytest
import torch
from exogym_toys import Tokens
from torch import nn

from exogym import flat as flat_module
from exogym.flat import FlatParameters, digest


class Zoo(nn.Module):
    """Conv, batch norm, a scalar, a bf16 weight, a channels-last weight, an unsaved buffer, an integer buffer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.low = nn.Parameter(torch.ones(5, 2, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def test_frozen_left_out_and_tied_once():
    flat = FlatParameters(Tokens())
    assert flat.names == ["embedding.weight", "hidden.weight", "hidden.bias"]
    assert flat.numel == flat.num_parameters == 11 * 8 + 8 * 8 + 8


def test_floating_saved_buffers_only():
    assert FlatParameters(Zoo()).names[-2:] == ["norm.running_mean", "norm.running_var"]


@pytest.mark.parametrize("chunk", [1, 7, 20, 10**6])
def test_round_trip_in_chunks_of_any_size(chunk, monkeypatch):
    monkeypatch.setattr(flat_module, "CHUNK", chunk)
    source, target = Zoo(), Zoo()
    with torch.no_grad():
        for p in source.parameters():
            p.normal_()
    source.norm.running_mean.normal_()
    FlatParameters(target).write(FlatParameters(source).read())
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert target.conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_what_is_added_reaches_each_tensor_once_in_its_own_dtype(monkeypatch, at_once):
    monkeypatch.setattr("exogym.flat.PIECE", at_once)
    model = nn.Module()
    model.w, model.low = nn.Parameter(torch.ones(2, 3).T), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    model.tied = model.w
    flat = FlatParameters(model)
    flat.move(torch.arange(10.0) + 5, since=torch.full((10,), 5.0))
    assert flat.read().tolist() == [*range(1, 11)] and model.low.dtype == torch.bfloat16


def test_gradients_round_trip_and_none_reads_as_zeros():
    model = Zoo()
    flat = FlatParameters(model)
    model.scale.grad = torch.tensor(3.0)
    values = flat.read_grads(torch.full((flat.numel,), 9.0))
    at = sum(p.numel() for p in flat.parameters[: flat.names.index("scale")])
    assert values[at] == 3 and values[: flat.num_parameters].sum() == 3
    assert torch.all(values[flat.num_parameters :] == 9)
    flat.write_grads(torch.arange(flat.numel).float())
    assert model.scale.grad == at and model.conv.weight.grad.flatten()[5] == 1 + 10 + 5


def test_buffers_that_were_read_earlier_stand_in_place_of_those_of_now():
    model = Zoo()
    flat = FlatParameters(model)
    earlier, buffers = flat.read(), flat.read_buffers()
    model.norm.running_mean.add_(1)
    assert torch.equal(flat.read(buffers=buffers), earlier) and not torch.equal(flat.read(), earlier)


def test_read_never_aliases_the_model():
    model = Tokens()
    flat = FlatParameters(model)
    before = flat.read()
    with torch.no_grad():
        model.hidden.bias.add_(1)
    assert torch.equal(flat.read()[-8:], before[-8:] + 1)


def test_digest_of_what_is_frozen():
    model = Zoo().requires_grad_(False)
    assert FlatParameters(model).frozen_digest() == FlatParameters(copy.deepcopy(model)).frozen_digest()
    other = copy.deepcopy(model)
    other.low += 1
    assert FlatParameters(model).frozen_digest() != FlatParameters(other).frozen_digest()


def test_what_is_frozen_is_hashed_once(monkeypatch):
    flat = FlatParameters(Zoo().requires_grad_(False))
    first = flat.frozen_digest()
    monkeypatch.setattr(flat_module, "_bytes", None)
    assert flat.frozen_digest() == first


def test_digest():
    values = torch.arange(5.0)
    assert digest(values) == digest(values.clone()) != digest(values + 1)
    assert torch.tensor([digest(values)]).item() == digest(values)
    assert FlatParameters(Tokens()).layout() != FlatParameters(Tokens(vocabulary=12)).layout()
