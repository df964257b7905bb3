"""Compares decoding on an accelerator with float64 on the CPU: token by token with a cache, and all tokens at once.

The fault looked for: on macOS 26 an M1 dropped the bias of a linear layer over a single row (pytorch 188438, 192934),
which each step of cached decoding is. Training computes no single rows: its loss is right, the texts are not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distributed.checkup.findings import Finding, Tell, ok, problem
from whisper_tuner.model.base_model import encode, full_frames, load_base

from .gradients import BUNDLED, DO_NOT_TRAIN, deviation, without_inf

LOGITS_LIMIT = 5e-3  # relative; measured on a healthy CPU: 6e-7, with biases dropped: 0.5
CLIPS, TOKENS = (1, 2), 6
MADE_ELSEWHERE = (
    "Update macOS and torch. Until then set device = cpu in the profile, "
    "and run `evaluate` and `transcribe` on another machine. Please send us the --json report."
)


def check_decoding(device: torch.device, tell: Tell) -> Finding:
    """Compare logits of fixed random tokens, so that a small difference does not lead to another text."""
    model = load_base(BUNDLED / "model")[0].eval()
    tell(f"{TOKENS} tokens")
    cached, at_once = map(max, zip(*(logit_errors(model, clips, device) for clips in CLIPS), strict=True))
    figures = without_inf({"limit": LOGITS_LIMIT, "cached": cached, "at_once": at_once})
    off = f"logits are off by {cached:.1e} of their size with a cache, {at_once:.1e} all at once"
    off = f"{device}: {off} (limit {LOGITS_LIMIT:g})"
    if at_once > LOGITS_LIMIT:
        return problem(f"{off}: no loss, WER or text can be trusted", DO_NOT_TRAIN, **figures)
    if cached > LOGITS_LIMIT:
        wrong = "WER and texts cannot be trusted, training and validation loss can"
        return problem(f"{off}: {wrong}", MADE_ELSEWHERE, **figures)
    return ok(off, **figures)


def logit_errors(model: nn.Module, clips: int, device: torch.device) -> tuple[float, float]:
    """Return the errors (with a cache, all at once), relative to the same weights in float64 on the CPU."""
    chance = torch.Generator().manual_seed(clips)
    features = torch.rand(clips, model.config.num_mel_bins, full_frames(model), generator=chance) * 2 - 1
    ids = torch.randint(model.config.decoder_start_token_id, (clips, TOKENS), generator=chance)
    exact = logits(copy.deepcopy(model).double(), features.double(), [ids])
    candidate, features, ids = copy.deepcopy(model).to(device), features.to(device), ids.to(device)
    cached, at_once = (logits(candidate, features, parts) for parts in (ids.split(1, dim=1), [ids]))
    return deviation(exact, cached), deviation(exact, at_once)


@torch.no_grad()
def logits(model: nn.Module, features: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Compute logits, float64 [clips, TOKENS, vocabulary] on the CPU. parts: of the ids [clips, n], in order."""
    states, cache, found = encode(model, features), None, []
    for ids in parts:
        output = model(encoder_outputs=states, decoder_input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1).double().cpu()
