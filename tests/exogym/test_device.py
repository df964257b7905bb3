import sys

import psutil
import pytest
import torch

from exogym import device as devices
from exogym.device import PeakMemory, empty_cache, is_out_of_memory, memory_in_use, own_memory, sharers

CPU = torch.device("cpu")
MB = 10**6


def test_on_the_cpu_the_resident_size_is_the_memory_in_use():
    before = memory_in_use(CPU)
    assert before == pytest.approx(psutil.Process().memory_info().rss, abs=20 * MB)
    held = torch.ones(50_000_000)
    assert memory_in_use(CPU) - before == pytest.approx(200 * MB, abs=20 * MB)
    del held
    assert own_memory(CPU) is None and sharers(CPU, 3) == 3


def test_a_peak_is_seen_after_it_is_over():
    empty_cache(CPU)
    before = memory_in_use(CPU)
    with PeakMemory(CPU) as peak:
        for _ in range(3):
            torch.ones(50_000_000).mul(2)
    assert memory_in_use(CPU) - before < 100 * MB
    assert peak.bytes - before == pytest.approx(400 * MB, abs=40 * MB)


def test_the_allocators_errors_are_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep the highest value")
def test_a_peak_is_seen_though_the_sampler_is_not_given_a_turn(monkeypatch):
    monkeypatch.setattr(devices, "SAMPLE_S", 60.0)
    before = devices.memory_in_use(CPU)
    with devices.PeakMemory(CPU) as peak:
        torch.ones(50_000_000)
    assert peak.bytes > before + 180_000_000
    with devices.PeakMemory(CPU) as later:
        pass
    assert later.bytes < peak.bytes - 150_000_000
