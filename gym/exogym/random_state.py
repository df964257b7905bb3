"""The random generators that a model may draw from, as they can be seeded, written down and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that a model may draw from on this rank (SpecAugment uses numpy's)."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest]}
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
    """Every generator that a model may draw from on this rank, and none of another accelerator's."""
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
    """Afterwards the generators are as they were."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def same_draws(device: torch.device) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for torch.utils.checkpoint (its context_fn): what is computed again draws what was drawn before.

    By itself it keeps the generators of CPU and CUDA only. On mps dropout drew other masks in the backward pass: wrong
    gradients, without a word (pytorch 127676, open in torch 2.14).
    """
    return nullcontext(), _DrawnFrom(_torch_state(device), device)


class _DrawnFrom(AbstractContextManager):
    """Entered once for each backward pass."""

    def __init__(self, state: dict[str, Any], device: torch.device):
        self.state, self.device = state, device

    def __enter__(self) -> None:
        self.now = _torch_state(self.device)
        _set_torch_state(self.state, self.device)

    def __exit__(self, *error: object) -> None:
        _set_torch_state(self.now, self.device)
