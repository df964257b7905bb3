import sys
import time
import types

import psutil
import pytest
import torch

from exogym import device as devices
from exogym.device import (
    PeakMemory,
    empty_cache,
    is_out_of_memory,
    memory_in_use,
    own_memory,
    sharers,
    told_out_of_memory,
)
from exogym.errors import SettingError

CPU = torch.device("cpu")
MB = 10**6


def test_the_environment_names_a_device_where_no_setting_does(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)  # virtual Macs have one that computes nothing
    assert devices.choose().type == "mps"
    monkeypatch.setenv("EXOGYM_DEVICE", "cpu")
    assert [devices.choose(name).type for name in (None, "auto", "mps")] == ["cpu", "cpu", "mps"]
    monkeypatch.setenv("EXOGYM_DEVICE", "")
    assert devices.choose().type == "mps"
    monkeypatch.setenv("EXOGYM_DEVICE", "gpu")
    with pytest.raises(SettingError, match="device gpu: not known; use mps, cuda or cpu"):
        devices.choose()


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


FULL_MPS = (
    "MPS backend out of memory (MPS allocated: 18.50 GiB, other allocations: 448.00 KiB, max allowed: 18.72 GiB). "
    "Tried to allocate 512.00 MiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for "
    "memory allocations (may cause system failure)."
)
TOLD = "the GPU's memory is full: torch holds 18.50 GiB and Metal 448.00 KiB of 18.72 GiB that it may take; "


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (FULL_MPS, TOLD + "512.00 MiB more are needed"),
        (
            "MPS backend out of memory (MPS allocated: 9.00 GB, other allocations: 1.20 MB). Tried to allocate 256 "
            "bytes on private pool.",
            "the GPU's memory is full: torch holds 9.00 GB and Metal 1.20 MB; 256 bytes more are needed",
        ),
        ("Invalid buffer size: 19.38 GiB", "Invalid buffer size: 19.38 GiB"),
    ],
)
def test_what_mps_says_when_memory_is_full_becomes_figures_without_its_dangerous_advice(said, told):
    assert is_out_of_memory(RuntimeError(said))
    assert told_out_of_memory(RuntimeError(said)) == told
    assert told_out_of_memory(MemoryError()) == "MemoryError"


MPS = torch.device("mps")


@pytest.fixture
def metal(monkeypatch):
    """Stands in for torch.mps, of a Mac with 10 GB for its GPU: what its driver and its tensors hold, in GB."""
    state = types.SimpleNamespace(driver=4.0, tensors=3.5, emptied=0)

    def empty():
        state.driver, state.emptied = state.tensors, state.emptied + 1

    answers = {
        "driver_allocated_memory": lambda: int(state.driver * 1e9),
        "current_allocated_memory": lambda: int(state.tensors * 1e9),
        "recommended_max_memory": lambda: 10 * 10**9,
        "empty_cache": empty,
        "synchronize": lambda: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.mps, name, answer)
    return state


def test_the_cache_is_emptied_when_much_is_in_it_and_not_at_every_shape(metal):
    devices.trim_cache(MPS)
    assert not metal.emptied
    metal.driver = 4.6
    devices.trim_cache(MPS)
    assert metal.emptied == 1 and metal.driver == 3.5
    devices.trim_cache(CPU)


def test_a_peak_on_mps_has_what_metal_took_for_a_while(metal):
    with PeakMemory(MPS) as peak:
        metal.driver = 7.0
        time.sleep(0.2)
        metal.driver = 5.0
    assert peak.bytes == 7 * 10**9


def test_no_thread_goes_on_looking_after_an_error_of_metals(metal, monkeypatch):
    def fail():
        raise RuntimeError("the command buffer was not executed")

    monkeypatch.setattr(torch.mps, "synchronize", fail)
    with pytest.raises(RuntimeError, match="command buffer"), PeakMemory(MPS) as peak:
        pass
    peak._sampler.join(5)
    assert not peak._sampler.is_alive()


def test_only_mps_sums_over_few_terms():
    assert devices.most_terms(MPS) == 32_766
    assert devices.compiles_shapes(MPS) and not devices.compiles_shapes(CPU)
    assert devices.most_terms(CPU) is devices.most_terms(torch.device("cuda")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep the highest value")
def test_a_peak_is_seen_though_the_sampler_is_not_given_a_turn(monkeypatch):
    monkeypatch.setattr(devices, "SAMPLE_S", 60.0)
    devices.empty_cache(CPU)  # or `before` has what earlier tests have freed, and the context gives it back
    before = devices.memory_in_use(CPU)
    with devices.PeakMemory(CPU) as peak:
        torch.ones(50_000_000)
    assert peak.bytes > before + 180_000_000
    with devices.PeakMemory(CPU) as later:
        pass
    assert later.bytes < peak.bytes - 150_000_000
