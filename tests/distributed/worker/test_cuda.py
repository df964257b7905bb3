"""What only a CUDA card shows. Elsewhere all of it is skipped."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from distributed.checkup.doctor.gradients import small_whisper
from exogym import device as devices
from exogym.device import random_state, set_random_state
from exogym.flat import FlatParameters

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here")]
MB = 10**6
TWICE = """
import sys
import torch
from exogym import device as devices
from distributed.checkup.doctor.gradients import small_whisper
from whisper_tuner.model.base_model import whisper_of

device = torch.device("cuda", 0)
devices.repeat_bits(device)
model = small_whisper().to(device).train()
config = whisper_of(model.model).config
features = torch.randn(8, config.num_mel_bins, 2 * config.max_source_positions)
batch = {"input_features": features, "labels": torch.randint(config.vocab_size, (8, 40))}
found = []
for _ in range(3):
    model.zero_grad(set_to_none=True)
    with devices.autocast(device, sys.argv[1]):
        loss, _ = model(batch)
    loss.backward()
    found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
print(len(found[0]), same)
"""


@pytest.fixture
def card() -> torch.device:
    return devices.choose("cuda")


@pytest.mark.parametrize("precision", devices.PRECISIONS)
def test_steps_that_are_repeated_have_the_same_bits(precision):
    """In a process of its own: what it sets holds for all that follows."""
    told = subprocess.run([sys.executable, "-c", TWICE, precision], capture_output=True, text=True, timeout=120)
    count, same = told.stdout.split() or [0, told.stderr]
    assert int(count) > 50 and same == "True", told.stderr


def test_a_peak_is_what_was_given_out(card):
    before = devices.memory_in_use(card)
    with devices.PeakMemory(card) as peak:
        torch.ones(25 * MB, device=card)
    assert 100 * MB <= peak.bytes < 200 * MB + before
    free, total = devices.own_memory(card)
    assert 0 < free < total


def test_weights_travel_without_a_bit_lost(card):
    model, here = small_whisper().to(card), FlatParameters(small_whisper())
    flats = FlatParameters(model)
    assert flats.layout() == here.layout() and torch.equal(flats.read(), here.read())
    changed = flats.read() * 1.25
    flats.write(changed)
    assert torch.equal(flats.read(), changed) and flats.read().device.type == "cpu"


def test_the_cards_generator_is_put_back(card):
    state = random_state(card)
    dropout = nn.Dropout(0.5)
    drawn = dropout(torch.ones(1000, device=card))
    set_random_state(state, card)
    assert torch.equal(dropout(torch.ones(1000, device=card)), drawn)


def test_a_full_card_is_told_from_other_errors(card):
    _, total = devices.own_memory(card)
    with pytest.raises(RuntimeError) as full:
        torch.empty(2 * total, dtype=torch.uint8, device=card)
    assert devices.is_out_of_memory(full.value)
    assert devices.told_out_of_memory(full.value).startswith("the GPU's memory is full: of ")
