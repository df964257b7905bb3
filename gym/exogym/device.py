"""The one place that knows about kinds of accelerator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from exogym.errors import SettingError

PRECISIONS = ("float32", "bf16")
SAMPLE_S = 0.005
# M1 and M2: a matrix product that sums over more terms adds what lies behind the operands in memory (pytorch 177116).
# torch 2.14 gives those over more than 32,768 to a kernel that is right, but several times slower (198182), and misses
# 32,767, 32,768 and batched ones (195163). Newer chips are right; the limit costs them little.
MPS_TERMS = 32_766
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3), by glibc's malloc.h
KEPT_BYTES, SMALL_BYTES = 32 << 20, 64 << 10  # 32 MB is the most that glibc takes as a threshold
CACHED_SHARE = 0.1  # of what Metal recommends: more is given back when the shape of batches changes
# A container's limit, its use, and the key of the part of it that the system takes back if need be (memory.stat).
CONTAINERS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# A library of CUDA's that finds no memory for its own workspace says so in its own words.
FULL = ("out of memory", "can't allocate", "Invalid buffer size", "STATUS_ALLOC_FAILED", "cublasCreate(handle)")
# MPSAllocator.mm: "MPS backend out of memory (MPS allocated: 18.50 GiB, other allocations: 448.00 KiB, max allowed:
# 18.72 GiB). Tried to allocate 512.00 MiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable ..."
MPS_FULL = re.compile(
    r"MPS backend out of memory \(MPS allocated: ([\d.]+ \w+), other allocations: ([\d.]+ \w+)"
    r"(?:, max allowed: ([\d.]+ \w+))?\)\. Tried to allocate ([\d.]+ \w+)"
)


# "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 3.50 MiB is free.
# Process 13649 has 139.14 GiB memory in use. Including non-PyTorch memory, this process has 658.00 MiB ..."
CUDA_FULL = re.compile(
    r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of ([\d.]+ \w+) of which "
    r"([\d.]+ \w+) is free\."
)


def choose(name: str | torch.device | None = None, local_rank: int = 0) -> torch.device:
    """Return `name`, else what EXOGYM_DEVICE says, else the best of mps, cuda and cpu.

    A bare `cuda` is spread over the cards by `local_rank`.
    """
    if name in (None, "", "auto"):
        name = os.environ.get("EXOGYM_DEVICE") or "auto"
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")  # where nobody trains, either
    if device.type not in ("mps", "cuda", "cpu"):
        raise SettingError(f"device {name}: not known; use mps, cuda or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingError("device mps: this torch has no Metal support here; use device cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SettingError("device cuda: no CUDA device is visible; use device cpu")
        if device.index is None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 where asked for. fp16 is not offered: with a GradScaler it zeroed gradients on mps (pytorch 184286)."""
    if precision not in PRECISIONS:
        raise SettingError(f"unknown precision {precision!r} (known: {', '.join(PRECISIONS)})")
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def repeat_bits(device: torch.device) -> None:
    """Have the same steps of a process that trains give the same bits, as they do on a CPU.

    On CUDA the backward pass of attention, and others, otherwise add in an order that changes from time to time. An
    operation that has no other way then raises RuntimeError. Before the first matrix product of the process.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would be for finding mistakes, and takes time


def synchronize(device: torch.device) -> None:
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back what is held without need."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim:
            trim(0)


def keep_freed_memory() -> None:
    """Keep what torch frees with a process that trains on a CPU, with glibc.

    Otherwise each array of some MB is given back at once, and its pages are zeroed by the system the next time: a fifth
    of a step of whisper-tiny with 8 short clips, half of it with one. Arrays of more than 32 MB are given back all the
    same: kept, they left gaps that grew to 0.3 GB in 50 steps. `empty_cache` still gives back what is free.
    """
    _keep_arrays_below(KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Give back what torch frees at once, where memory is short: gaps between kept arrays may be half of all."""
    _keep_arrays_below(SMALL_BYTES)


def _keep_arrays_below(size: int) -> None:
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, size)
        mallopt(M_TRIM_THRESHOLD, -1)


def keep_few_primitives() -> None:
    """Keep memory low, before the first float32 step on a CPU, for a model with few convolutions and many lengths.

    oneDNN keeps what it has compiled for 1,024 shapes: 0.3 GB after 150 steps of Whisper with clips of all lengths.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")


def trim_cache(device: torch.device) -> None:
    """Give back, on mps, what is held for batches of other shapes, if it is much: making it anew takes time."""
    if device.type == "mps":
        cached = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
        if cached > CACHED_SHARE * torch.mps.recommended_max_memory():
            torch.mps.empty_cache()


def most_terms(device: torch.device) -> int | None:
    """Return the most terms that a matrix product may sum over on this device; None without a limit."""
    return MPS_TERMS if device.type == "mps" else None


def compiles_shapes(device: torch.device) -> bool:
    """Say whether each new shape of a batch costs time: mps compiles its graphs for it."""
    return device.type == "mps"


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process holds: of the accelerator's memory, by its driver; on the cpu, resident."""
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(_process(os.getpid()).memory_info().rss)


def own_memory(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes that an accelerator has for programs; None for the cpu."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def available_memory() -> int:
    """Return bytes of this machine's memory that programs can still take; no more than what is left in a container."""
    left = [psutil.virtual_memory().available]
    for folder, most, used, droppable in CONTAINERS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            files = re.search(rf"^{droppable} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            held = int((folder / used).read_text()) - (int(files[1]) if files else 0)
            left.append(int((folder / most).read_text()) - held)
    return int(max(0, min(left)))


def sharers(device: torch.device, processes: int) -> int:
    """Return how many of this machine's `processes`, spread by `choose`, have the same accelerator as this one."""
    return -(-processes // torch.cuda.device_count()) if device.type == "cuda" else processes


class PeakMemory:
    """A context whose `bytes` is the most that this process held meanwhile, of what `memory_in_use` counts.

    Of resident memory Linux keeps the highest value itself. Elsewhere it is sampled, and a machine that is busy with
    other things may see less. On mps what torch has taken stays until the cache is emptied, but what MPSGraph takes
    for a single operation does not.
    """

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        empty_cache(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.device.type == "cpu":
            self._is_kept = _forget_highest_resident()
        if self.device.type != "cuda":
            self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            synchronize(self.device)
        finally:
            self._over.set()
        if self.device.type != "cuda":
            self._sampler.join()
        now = memory_in_use(self.device) if self.device.type != "cuda" else torch.cuda.max_memory_allocated(self.device)
        highest = _highest_resident() if self.device.type == "cpu" and self._is_kept else 0
        self.bytes = max(self.bytes, now, highest)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, memory_in_use(self.device))


def _forget_highest_resident() -> bool:
    """Reset the highest value; False where the system keeps none: see proc(5), clear_refs and VmHWM."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _highest_resident() > 0
    except OSError:
        return False


def _highest_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def is_out_of_memory(error: BaseException) -> bool:
    """mps and the cpu raise a plain RuntimeError; mps has another one for a tensor above Metal's maxBufferLength."""
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def told_out_of_memory(error: BaseException) -> str:
    """Return what an allocator's error says, without the advice to lift the limit, after which macOS may freeze."""
    if found := MPS_FULL.search(str(error)):
        held, others, most, wanted = found.groups()
        limit = f" of {most} that it may take" if most else ""
        return f"the GPU's memory is full: torch holds {held} and Metal {others}{limit}; {wanted} more are needed"
    if found := CUDA_FULL.search(str(error)):
        wanted, total, free = found.groups()
        return f"the GPU's memory is full: of {total} {free} is free; {wanted} more are needed"
    return str(error).split("\n")[0].split(" Use PYTORCH_")[0] or type(error).__name__


@cache
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


# The random generators that a model may draw from, as they can be seeded, written down and put back.


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator that a model may draw from here (SpecAugment uses numpy's)."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest]}
    return state | _torch_state(device)


def _torch_state(device: torch.device) -> dict[str, Any]:
    state = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    _set_torch_state(state, device)


def _set_torch_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"])


def seed_all(seed: int, device: torch.device) -> None:
    """Seed every generator that a model may draw from on this rank, and none of another accelerator's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the generators back as they were."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def same_draws(device: torch.device) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for torch.utils.checkpoint (its context_fn): what is computed again draws what was drawn before.

    By itself it keeps the generators of CPU and CUDA only. On mps dropout drew other masks in the backward pass: wrong
    gradients, without a word (pytorch 127676, open in torch 2.14).
    """
    return contextlib.nullcontext(), _DrawnFrom(_torch_state(device), device)


class _DrawnFrom(AbstractContextManager[None]):
    """Entered once for each backward pass."""

    def __init__(self, state: dict[str, Any], device: torch.device):
        self.state, self.device = state, device

    def __enter__(self) -> None:
        self.now = _torch_state(self.device)
        _set_torch_state(self.state, self.device)

    def __exit__(self, *error: object) -> None:
        _set_torch_state(self.now, self.device)
