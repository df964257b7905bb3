"""How many samples are computed at once: found within a limit, and without a trace."""

import copy
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from exogym_toys import Line, Points, Processes
from torch import nn

from exogym import AllReduceStrategy, LocalTrainer
from exogym import device as devices
from exogym.errors import OutOfMemory, SettingError
from exogym.micro_batches import Memory, Trial, samples_at_once
from exogym.samplers.batches import DatasetSamples

CPU = torch.device("cpu")
MB = 1_000_000


class Pictures(torch.utils.data.Dataset):
    """Random ones, [3, 128, 128] float32."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return torch.randn(3, 128, 128) + random.random() + np.random.rand()


class Layers(nn.Module):
    """Six layers of 8 channels: about 3.2 MB of activations a picture, and few parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(8 if n else 3, 8, 3, padding=1) for n in range(6)))
        self.norm, self.dropout = nn.BatchNorm2d(8), nn.Dropout(0.1)
        self.calls, self.seen, self.largest = 0, [], 0

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return self.dropout(self.norm(self.layers(x))).square().mean()


class Changes(Line):
    def forward(self, batch):
        with torch.no_grad():
            self.linear.bias += 1
        return super().forward(batch)


class OnlyOf(Line):
    """A model that is written for one batch size."""

    def forward(self, batch):
        return super().forward(batch) + batch[0].view(32, 4).sum() * 0


def trial(model, data, *, batch_size, extra=None):
    """extra: bytes that may be taken beside those in use now."""
    memory = Memory.of(CPU, usage=0.8)
    if extra is not None:  # what earlier tests have left is given back by now
        memory = Memory(device=CPU, most=devices.memory_in_use(CPU) + extra, told=f"{extra} bytes")
    return Trial(model, DatasetSamples(data, batch_size=batch_size), memory, "float32")


def test_what_plainly_fits_is_not_cut_and_not_tried_whole():
    model = Layers()
    counts = []
    model.norm.register_forward_pre_hook(lambda _module, inputs: counts.append(len(inputs[0])))
    assert samples_at_once(trial(model, Pictures(), batch_size=256), 256) == 256
    assert max(counts) == 4
    assert samples_at_once(trial(Line(), Points(4), batch_size=4), 1) == 1


def _found(_comm, extra):
    """How many, what they take, and what they may take, in bytes."""
    trial(Layers(), Pictures(), batch_size=8).run(8)  # what only a process's first pass takes is no part of it
    tried = trial(Layers(), Pictures(), batch_size=128, extra=extra)
    limit = tried.memory.most + extra // 5
    found = samples_at_once(tried, 128)
    return found, min(_peak(tried, found) for _ in range(3)), limit


def _peak(tried, count):
    """Of one pass. Freed memory that lies in pieces makes that of some larger, by chance."""
    with devices.PeakMemory(CPU) as peak:
        tried.run(count)
    tried.model.zero_grad(set_to_none=True)
    return peak.bytes


@pytest.mark.slow
@pytest.mark.parametrize("extra", [150 * MB, 80 * MB])
def test_what_is_found_fits_and_not_much_more_does(extra):
    with Processes(1, _found, extra) as fresh:  # what other tests have left in this one would be in the way
        found, peak, limit = fresh.result(0)
    assert 4 <= found < 64
    assert extra / found < 16 * MB  # a picture takes 5 to 8 MB, forward and backward
    assert peak < limit


def test_the_trial_leaves_no_trace():
    model = Layers().eval()
    model.layers[0].weight.grad = torch.ones_like(model.layers[0].weight)
    before, gradient = copy.deepcopy(model.state_dict()), model.layers[0].weight.grad
    seen = model.seen
    chances = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    samples_at_once(trial(model, Pictures(), batch_size=64, extra=100 * MB), 64)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.norm.num_batches_tracked == 0 and model.calls == 0
    assert model.seen is seen == []
    assert model.layers[0].weight.grad is gradient and model.layers[2].weight.grad is None
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), chances[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == chances[1:]


def test_a_model_that_changes_its_parameters_by_itself_is_refused():
    with pytest.raises(SettingError, match=r"changes the parameter linear.bias, .*: give minibatch_size"):
        samples_at_once(trial(Changes(), Points(8), batch_size=8), 8)


class Wide(nn.Module):
    """10 million parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2_000_000)

    def forward(self, batch):
        return self.layer(batch[0]).mean()


def _refused(_comm):
    with pytest.raises(OutOfMemory) as refused:
        samples_at_once(trial(Wide(), Points(8), batch_size=8, extra=300 * MB), 8)
    return str(refused.value)


@pytest.mark.slow
def test_not_even_one_sample():
    # Not what is in use now: the system may take unused pages back meanwhile.
    full = replace(trial(Layers(), Pictures(), batch_size=16), memory=Memory(device=CPU, most=0, told="0 bytes"))
    with pytest.raises(OutOfMemory, match="a single sample at a time needs more memory than 0 bytes: use fewer ranks"):
        samples_at_once(full, 16)
    with Processes(1, _refused) as fresh:  # 40 bytes for each parameter after the pass that is tried
        assert re.search(r"needs [0-3]\.\d\d GB, more than 300000000 bytes", fresh.result(0))


def test_an_allocator_that_is_full_is_no_failure(monkeypatch):
    class Full(Line):
        def forward(self, batch):
            if len(batch[0]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return super().forward(batch)

    assert samples_at_once(trial(Full(), Points(64), batch_size=10), 10) == 3  # four parts: 3, 3, 3, 1


def test_a_model_for_one_batch_size_trains():
    assert samples_at_once(trial(OnlyOf(), Points(64), batch_size=32), 32) == 32
    LocalTrainer(OnlyOf(), Points(64)).fit(AllReduceStrategy(), batch_size=32, device="cpu")


class Splits(Line):
    """Full with more than 3 samples."""

    def forward(self, batch):
        if self.training and len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(batch)


def test_a_batch_is_cut_where_it_does_not_fit_and_the_weights_are_the_same():
    cut, whole, events = Splits(), Line(), []
    settings = {"num_epochs": 4, "batch_size": 8, "device": "cpu"}
    LocalTrainer(cut, Points(20)).fit(AllReduceStrategy(lr=0.1), logger=events.append, **settings)
    LocalTrainer(whole, Points(20)).fit(AllReduceStrategy(lr=0.1), **settings)
    torch.testing.assert_close(cut.linear.weight, whole.linear.weight)
    [warning] = [event for event in events if event["type"] == "warning"]
    assert warning["what"].startswith("8 samples at once do not fit into ") and warning["rank"] == 0
    assert warning["what"].endswith("of what is available): a step has 3 at a time")


def test_what_was_said_is_kept_unless_a_limit_was_said_too():
    settings = {"batch_size": 8, "device": "cpu", "gradient_accumulation": 2}
    with pytest.raises(torch.OutOfMemoryError):
        LocalTrainer(Splits(), Points(20)).fit(AllReduceStrategy(), **settings)
    events = []
    LocalTrainer(Splits(), Points(20)).fit(AllReduceStrategy(), logger=events.append, max_memory_usage=0.5, **settings)
    [warning] = [event["what"] for event in events if event["type"] == "warning"]
    assert warning.startswith("4 samples at once do not fit")


def test_ranks_of_one_machine_share_what_there_is(monkeypatch):
    one, four = (Memory.of(CPU, usage=0.5, sharing=sharing, available=8_000 * MB) for sharing in (1, 4))
    assert (one.most, four.most) == (4_000 * MB, 1_000 * MB)
    assert four.told == "1.00 GB on cpu (max_memory_usage = 0.5 of what is available to 4 ranks)"
    monkeypatch.setattr(devices, "available_memory", lambda: 100 * MB)
    resident = devices.memory_in_use(CPU)
    assert Memory.of(CPU, usage=0.5).most == pytest.approx(resident + 50 * MB, abs=20 * MB)


def test_a_container_has_less_than_the_machine(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\n")
    containers = [(tmp_path, "memory.max", "memory.current", "inactive_file")]
    monkeypatch.setattr(devices, "CONTAINERS", containers)
    assert devices.available_memory() == 700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.available_memory() > 10**8
