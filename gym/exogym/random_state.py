"""The random generators that a model may draw from, as they can be written down."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that a model may draw from on this rank (SpecAugment uses numpy's)."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest]}
    state["torch"] = torch.get_rng_state()
    if device.type in ("cuda", "mps"):
        state["device"] = getattr(torch, device.type).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type in ("cuda", "mps"):
        getattr(torch, device.type).set_rng_state(state["device"])
