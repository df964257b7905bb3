"""Computes on a machine's CPU and accelerator from fixed seeds, and at changing shapes."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym import device as devices
from whisper_tuner.config import Profile
from whisper_tuner.model.base_model import load_base, prepare, whisper_of
from whisper_tuner.model.memory import TOKENS_PER_S, shape_of, training_memory

COUNT = 1 << 20
CLIPS = 2
FIXED = [(400, 20)] * 6  # frames of log-mel, tokens: 4 s of speech
LONGEST_S = 30.0  # of a clip
LITTLE = 0.01  # of the GPU's memory
VARYING = [(400 + 60 * n, 20 + 3 * n) for n in (-3, 2, -1, 3, -2, 1)]  # as many in all, no two alike


def arithmetic(request: dict) -> list[dict]:
    """Compute one AdamW step and one norm on each device of this machine."""
    found = []
    for kind in dict.fromkeys(["cpu", devices.choose(request.get("device")).type]):
        chance = torch.Generator().manual_seed(request.get("seed", 0))
        before, gradient = (torch.randn(COUNT, generator=chance) for _ in range(2))
        parameter = nn.Parameter(before.to(kind))
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.01)
        parameter.grad = gradient.to(kind)
        optimizer.step()
        after, norm = parameter.detach().cpu(), float(parameter.grad.norm())
        step = hashlib.sha256(after.numpy().tobytes()).hexdigest()[:16]
        total = float(after.double().sum())
        found.append({"device": kind, "step": step, "sum": total, "norm": norm, "norm_bits": norm.hex()})
    return found


def shapes(request: dict) -> dict:
    """Time training steps of the bundled Whisper at one shape, then at changing ones, without emptying the cache."""
    device = devices.choose(request.get("device"))
    torch.set_num_threads(1)  # hosts of a test may be one machine, and an accelerator does not care
    model = _trainable(Path(request["model"]).expanduser()).to(device).train()
    _steps(model, device, FIXED[:1])  # the first one ever is slow everywhere
    return {
        "device": device.type,
        "fixed": _steps(model, device, FIXED),
        "varying": _steps(model, device, VARYING),
    }


def memory(request: dict) -> dict:
    """Measure the bytes that a clip of 30 s adds to a step's peak, beside the estimate; and see torch at its limit.

    What attention keeps is most of it in a small model, too.
    """
    path = Path(request["model"]).expanduser()
    device = devices.choose(request.get("device"))
    model = _trainable(path).to(device).train()
    profile, shape = Profile(base_model=str(path), train=path), shape_of(str(path))
    assert shape is not None, "the bundled model says its shape"
    frames, tokens = int(100 * LONGEST_S), min(shape.max_target_positions, int(TOKENS_PER_S * LONGEST_S))
    _steps(model, device, [(frames, tokens)], 1)
    few, many = (1, 3) if device.type == "cpu" else (2, 8)
    peaks = {}
    for clips in (few, many):
        with devices.PeakMemory(device) as peak:
            _steps(model, device, [(frames, tokens)], clips)
        peaks[clips] = peak.bytes
    estimates = [training_memory(shape, profile, clips=n, clip_s=LONGEST_S, device=device.type) for n in (few, many)]
    taken, estimated = peaks[many] - peaks[few], estimates[1] - estimates[0]
    sizes = {"taken": taken // (many - few), "estimated": estimated // (many - few)}
    return {"device": device.type, **sizes, "beyond": _beyond(device)}


def _beyond(device: torch.device) -> dict | None:
    """Allocate beyond the limit of torch's, which is set low for that: nobody else's memory is touched."""
    if device.type == "cpu":
        return None
    own = devices.own_memory(device)
    assert own is not None, "an accelerator has memory of its own"
    getattr(torch, device.type).set_per_process_memory_fraction(LITTLE)
    try:
        torch.empty(int(2 * LITTLE * own[1]), dtype=torch.uint8, device=device)
    except RuntimeError as error:
        is_known = device.type != "mps" or bool(devices.MPS_FULL.search(str(error)))
        return {"is_full": devices.is_out_of_memory(error), "is_known": is_known, "said": str(error)[:400]}
    return {"is_full": False, "is_known": False, "said": ""}


def _trainable(path: Path) -> WhisperModelWrapper:
    model, processor = load_base(path)
    return WhisperModelWrapper(prepare(model, Profile(base_model=str(path), train=path)), processor, "cpu")


def _steps(
    model: WhisperModelWrapper, device: torch.device, wanted: Sequence[tuple[int, int]], clips: int = CLIPS
) -> dict:
    config = whisper_of(model.model).config
    before, milliseconds, losses = devices.memory_in_use(device), [], []
    for frames, tokens in wanted:
        features = torch.zeros(clips, config.num_mel_bins, frames)
        labels = torch.ones(clips, tokens, dtype=torch.long)
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
