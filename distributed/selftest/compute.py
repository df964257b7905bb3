"""What a machine's CPU and accelerator compute from fixed seeds, and how they bear changing shapes."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from exogym import device as devices
from whisper_tuner.config import Profile
from whisper_tuner.model.base_model import load_base, prepare, whisper_of

COUNT = 1 << 20
CLIPS = 2
FIXED = [(400, 20)] * 6  # frames of log-mel, tokens: 4 s of speech
VARYING = [(400 + 60 * n, 20 + 3 * n) for n in (-3, 2, -1, 3, -2, 1)]  # as many in all, no two alike


def arithmetic(request: dict) -> list[dict]:
    """One AdamW step and one norm on each device of this machine."""
    kinds = dict.fromkeys(["cpu", devices.choose().type])
    return [{"device": kind, **_step(torch.device(kind), request.get("seed", 0))} for kind in kinds]


def _step(device: torch.device, seed: int) -> dict:
    chance = torch.Generator().manual_seed(seed)
    before, gradient = (torch.randn(COUNT, generator=chance) for _ in range(2))
    parameter = nn.Parameter(before.to(device))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.01)
    parameter.grad = gradient.to(device)
    optimizer.step()
    after, norm = parameter.detach().cpu(), float(parameter.grad.norm())
    return {
        "step": hashlib.sha256(after.numpy().tobytes()).hexdigest()[:16],
        "sum": float(after.double().sum()),
        "norm": norm,
        "norm_bits": norm.hex(),
    }


def shapes(request: dict) -> dict:
    """Training steps of the bundled Whisper at one shape, then at ever changing ones, without emptying the cache."""
    path = Path(request["model"]).expanduser()
    device = devices.choose(request.get("device"))
    torch.set_num_threads(1)  # hosts of a test may be one machine, and an accelerator does not care
    model = _trainable(path).to(device).train()
    _steps(model, device, FIXED[:1])  # the first one ever is slow everywhere
    return {
        "device": device.type,
        "fixed": _steps(model, device, FIXED),
        "varying": _steps(model, device, VARYING),
    }


def _trainable(path: Path) -> nn.Module:
    from distributed.worker.whisper_wrapper import WhisperModelWrapper

    model, processor = load_base(path)
    return WhisperModelWrapper(prepare(model, Profile(base_model=str(path), train=path)), processor, "cpu")


def _steps(model: nn.Module, device: torch.device, wanted: Sequence[tuple[int, int]]) -> dict:
    config = whisper_of(model.model).config
    before, milliseconds, losses = devices.memory_in_use(device), [], []
    for frames, tokens in wanted:
        features = torch.zeros(CLIPS, config.num_mel_bins, frames)
        labels = torch.ones(CLIPS, tokens, dtype=torch.long)
        devices.synchronize(device)
        began = time.perf_counter()
        model.zero_grad(set_to_none=True)
        loss, _ = model({"input_features": features, "labels": labels})
        loss.backward()
        devices.synchronize(device)
        milliseconds.append(round(1000 * (time.perf_counter() - began), 1))
        losses.append(loss.item())
    finite = all(loss == loss and abs(loss) < float("inf") for loss in losses)
    memory = {"memory_before": before, "memory": devices.memory_in_use(device)}
    return {"ms": milliseconds, "median_ms": statistics.median(milliseconds), "is_finite": finite, **memory}
