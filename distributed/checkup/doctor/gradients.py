"""Compares an accelerator with float64 on the CPU, on a small Whisper: gradients at a profile's shapes, and decoding.

The faults looked for: on Apple's M1 and M2 gradients were up to 100,000 times wrong after a change of batch size, once
batch x positions passed 32,766, while the loss was right (pytorch 177116, 193487). torch 2.14 repairs it in part, see
MPS_TERMS: training computes less than that at once there, and its output layer, with more tokens than that, in parts.
On macOS 26 an M1 dropped the bias of a linear layer over a single row (pytorch 188438, 192934), which each step of
cached decoding is. Training computes no single rows: its loss is right, the texts are not.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from distributed.checkup.findings import Finding, Tell, ok, problem, warning
from distributed.hosts.paths import PROJECT
from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym import device as devices
from exogym.device import random_state_kept, seed_all
from whisper_tuner.config import Profile
from whisper_tuner.data.batch_shapes import Lengths, bucket_edges, equal_part
from whisper_tuner.data.dataset import Sample, load_manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import DataError
from whisper_tuner.model.base_model import encode, full_frames, load_base, prepare, whisper_of
from whisper_tuner.model.layers import split_wide_layers

# Of a gradient's norm or its largest element, relative to itself, whichever is worse. Measured on a healthy CPU: 1.1e-5
# in float32, 2.4e-2 in bf16. TF32, in which CUDA computes convolutions, has 10 bits of mantissa to bf16's 7: an eighth
# of its error. The known faults start at 0.1.
GRADIENT_LIMIT = {"float32": 5e-3, "bf16": 0.1}
LOGITS_LIMIT = 5e-3  # relative; measured on a healthy CPU: 6e-7, with biases dropped: 0.5
LOSS_LIMIT = {"float32": 1e-3, "bf16": 2e-2}
FAULTY_POSITIONS = devices.MPS_TERMS + 1  # the fewest terms of a sum that went wrong
ACCELERATOR_POSITIONS = 36_000  # batches are cut to this where training does not cut them: past the fault
CPU_POSITIONS = 2_000
SHORT_FRAMES = 200
BUNDLED = PROJECT / "bundled"
DO_NOT_TRAIN = (
    "Do not train on this GPU with this torch: set device = cpu in the profile. Please send us the --json report."
)
DECODED_CLIPS, DECODED_TOKENS = (1, 2), 6
MADE_ELSEWHERE = (
    "Update macOS and torch. Until then set device = cpu in the profile, "
    "and run `evaluate` and `transcribe` on another machine. Please send us the --json report."
)


@dataclass(frozen=True)
class Shape:
    """A batch: log-mels [clips, 80, frames], labels [clips, tokens]."""

    clips: int
    frames: int
    tokens: int

    @property
    def positions(self) -> int:
        """Terms of the sums in an encoder layer's weight gradients."""
        return self.clips * self.frames // 2

    def __str__(self) -> str:
        return f"{self.clips} x {self.frames // 2}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Compares one batch: how many parameters are past the limit, and the one that is farthest off."""

    shape: Shape
    loss_error: float
    worst_parameter: str
    worst_error: float
    wrong_parameters: int
    parameters: int


def without_inf(figures: dict) -> dict:
    """Replace infinity by None, for JSON has none."""
    return {key: None if value == math.inf else value for key, value in figures.items()}


def small_whisper(path: Path = BUNDLED / "model", dropout: float = 0.0) -> WhisperModelWrapper:
    """Load the bundled model, all of it trainable, as the trainer wraps it."""
    model, processor = load_base(path)
    profile = Profile(base_model=str(path), train=path, dropout=dropout)
    return WhisperModelWrapper(prepare(model, profile), processor, "cpu")


class Parity:
    """Holds the same weights twice, in float64 on the CPU and on the device, and compares what both compute."""

    def __init__(self, model: WhisperModelWrapper, device: torch.device, precision: str = "float32"):
        self.device, self.precision = device, precision
        self.reference = copy.deepcopy(model).double().train()
        self.candidate = copy.deepcopy(model).to(device).train()
        if most := devices.most_terms(device):
            split_wide_layers(self.candidate, most)
        self._expected: dict[Shape, tuple[float, dict[str, Tensor]]] = {}

    def step(self, shape: Shape) -> Step:
        if shape not in self._expected:
            batch: dict[str, Any] = make_batch(self.reference, shape)
            batch["input_features"] = batch["input_features"].double()
            self._expected[shape] = gradients(self.reference, batch, torch.device("cpu"), "float32")
        loss, expected = self._expected[shape]
        batch = make_batch(self.candidate, shape)
        if self.device.type == "cpu":
            batch = without_padding(self.candidate, batch, shape)
        found_loss, found = gradients(self.candidate, batch, self.device, self.precision)
        errors = {name: deviation(grad, found.get(name)) for name, grad in expected.items()}
        worst = max(errors, key=errors.__getitem__)
        loss_error = abs(found_loss - loss) / abs(loss)
        return Step(
            shape=shape,
            loss_error=loss_error if math.isfinite(loss_error) else math.inf,
            worst_parameter=worst.removeprefix("model.model."),
            worst_error=errors[worst],
            wrong_parameters=sum(error > GRADIENT_LIMIT[self.precision] for error in errors.values()),
            parameters=len(errors),
        )


def gradients(
    model: WhisperModelWrapper, batch: dict[str, Any], device: torch.device, precision: str
) -> tuple[float, dict[str, Tensor]]:
    """Compute the loss, and the gradients by parameter, float64 on the CPU."""
    model.zero_grad(set_to_none=True)
    with devices.autocast(device, precision):
        loss, _ = model(batch)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: grad.detach().cpu().double() for name, grad in found.items()}


def deviation(expected: Tensor, found: Tensor | None) -> float:
    """Measure how far a gradient is off, relative to itself: by the norm, or by the largest element if worse."""
    if found is None or not bool(torch.isfinite(found).all()):
        return math.inf
    difference = found - expected
    by_norm = difference.norm() / expected.norm().clamp_min(1e-12)
    by_element = difference.abs().max() / expected.abs().max().clamp_min(1e-12)
    return float(max(by_norm, by_element))


def make_batch(model: WhisperModelWrapper, shape: Shape) -> dict[str, Tensor]:
    """Make noise of a log-mel's range and random words: the same for a shape each time, on every machine."""
    config = whisper_of(model.model).config
    chance = torch.Generator().manual_seed(shape.clips * 100_000 + shape.frames)
    features = torch.rand(shape.clips, config.num_mel_bins, shape.frames, generator=chance) * 2 - 1
    labels = torch.randint(config.decoder_start_token_id - 1, (shape.clips, shape.tokens), generator=chance)
    return {"input_features": features, "labels": labels}


def without_padding(model: WhisperModelWrapper, batch: dict[str, Tensor], shape: Shape) -> dict[str, Any]:
    """Put the clips of a batch one after the other, as a worker on a CPU computes them."""
    config, labels = whisper_of(model.model).config, batch["labels"]
    assert config.pad_token_id is not None
    inputs = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
    return {
        "input_features": torch.cat([*batch["input_features"]], dim=1),
        "decoder_input_ids": inputs.flatten(),
        "labels": labels.flatten(),
        "lengths": Lengths([shape.frames] * shape.clips, [shape.tokens] * shape.clips),
    }


def profile_shapes(
    model: WhisperModelWrapper, profile: Profile | None, device: torch.device
) -> tuple[list[Shape], str]:
    """Return the batches of a profile as training meets them, a smaller last one included; and whose they are."""
    samples, source = _samples(profile)
    clips = -(-profile.batch_size // profile.accumulation) if profile else 8
    full = full_frames(model.model)
    context = profile.audio_context if profile else "mixed"
    edges = (full,) if context == "full" else bucket_edges(samples, full)
    limit = CPU_POSITIONS if device.type == "cpu" else devices.most_terms(device) or ACCELERATOR_POSITIONS
    if device.type == "cpu":
        edges = tuple(sorted({edges[0], edges[-1]}))
    most = max(2, equal_part(clips, limit * 2 // edges[-1]))
    rest = len(samples) % clips
    last = rest if 0 < rest < most else max(1, most // 2)
    sequence = [(most, edges[-1]), (last, edges[-1]), *((most, edge) for edge in edges[:-1]), (most, edges[-1])]
    if context == "mixed" and device.type != "cpu":
        sequence.append((1, full))
    if most < clips:
        source = f"{source}, {most} of {clips} clips at a time"
    return [_shape(model, count, frames) for count, frames in sequence], source


def wide_whisper() -> WhisperModelWrapper:
    """Make a model with as many tokens as large-v3: the gradient behind its output layer sums over them."""
    config = WhisperConfig.from_pretrained(BUNDLED / "model", vocab_size=51_866, encoder_layers=1, decoder_layers=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config)
    _, processor = load_base(BUNDLED / "model")
    profile = Profile(base_model=str(BUNDLED / "model"), train=BUNDLED)
    return WhisperModelWrapper(prepare(model, profile), processor, "cpu")


def wide_shapes(model: WhisperModelWrapper) -> list[Shape]:
    """Return batches of changing size, of more than the 16 tokens from which the fault shows."""
    return [_shape(model, count, SHORT_FRAMES) for count in (8, 4, 8)]


def large_shapes(model: WhisperModelWrapper, device: torch.device) -> list[Shape]:
    """Return batches of short clips, of changing size, some past the size of the known fault (not on the CPU)."""
    most = 10 if device.type == "cpu" else FAULTY_POSITIONS * 2 // SHORT_FRAMES + 2
    return [_shape(model, count, SHORT_FRAMES) for count in (most // 10, most, most // 4, most, most // 7, most)]


def _shape(model: WhisperModelWrapper, clips: int, frames: int) -> Shape:
    """Make a shape with four tokens a second, about what English has."""
    most = whisper_of(model.model).config.max_target_positions
    return Shape(clips, frames, min(most, max(8, frames // 25)))


def _samples(profile: Profile | None) -> tuple[Sequence[Sample], str]:
    """Load a profile's clips, or the bundled ones where it has none that can be used; and say whose they are."""
    with contextlib.suppress(DataError):
        if profile:
            reading = Reading.of(profile)
            # Where the manifest states no durations the audio itself is looked at.
            samples = load_manifest(profile.train, check_audio=False, reading=reading).samples
            samples = samples or load_manifest(profile.train, reading=reading).samples
            if samples:
                return samples, "the profile"
    return load_manifest(BUNDLED / "data" / "train.csv", check_audio=False).samples, "the bundled data"


def compare(parity: Parity, shapes: Sequence[Shape], source: str, tell: Tell, *, tidy: bool = True) -> Finding:
    """Compare the batches in order. tidy: empty the accelerator's cache at each new shape."""
    steps: list[Step] = []
    for number, shape in enumerate(shapes, 1):
        tell(f"batch {number} of {len(shapes)}: {shape.clips} clips x {shape.frames // 2} positions")
        if tidy:
            devices.empty_cache(parity.device)
        steps.append(parity.step(shape))
    limit = GRADIENT_LIMIT[parity.precision]
    figures: dict[str, Any] = {"device": str(parity.device), "precision": parity.precision, "limit": limit}
    figures["steps"] = [
        without_inf(asdict(step) | asdict(step.shape) | {"positions": step.shape.positions, "shape": str(step.shape)})
        for step in steps
    ]
    loss_limit = LOSS_LIMIT[parity.precision]
    wrong = [n for n, step in enumerate(steps) if step.wrong_parameters or step.loss_error > loss_limit]
    most = devices.most_terms(parity.device)
    if wrong and most and all(steps[number].shape.positions > most for number in wrong):
        no_harm = f"On this GPU training computes at most {most:,} positions at once: it is not affected."
        return warning(_describe(parity, steps, wrong), no_harm, **figures)
    if wrong:
        remedy = DO_NOT_TRAIN
        if parity.precision == "bf16":
            remedy = "Set precision = float32 in the profile."
        elif parity.device.type == "cpu":
            remedy = (
                "This CPU, or this torch, gives wrong results: do not train here. Please send us the --json report."
            )
        return problem(_describe(parity, steps, wrong), remedy, **figures)
    worst = max(steps, key=lambda step: step.worst_error)
    sizes = ", ".join(dict.fromkeys(str(step.shape) for step in steps))
    agrees = f"{parity.device} agrees with float64 at {sizes} (clips x positions, {source})"
    return ok(f"{agrees}: at most {worst.worst_error:.1e} off in {worst.worst_parameter}, limit {limit:g}", **figures)


def compare_checkpointed(device: torch.device, tell: Tell) -> Finding:
    """Compare gradients with and without computing activations again: from one seed dropout must be the same."""
    tell("with and without gradient_checkpointing")
    model, found = small_whisper(dropout=0.1).to(device), []
    batch = make_batch(model, _shape(model, 4, SHORT_FRAMES))
    with random_state_kept(device):
        for prepare_model in (model.train, model.checkpoint_gradients):
            prepare_model()
            seed_all(0, device)
            found.append(gradients(model, batch, device, "float32")[1])
    kept, again = found
    name, error = max(((name, deviation(kept[name], again.get(name))) for name in kept), key=lambda each: each[1])
    limit = GRADIENT_LIMIT["float32"]
    off = f"up to {error:.2g} times its size (limit {limit:g}) in {name.removeprefix('model.model.')}"
    off = f"{device}: with dropout, gradient_checkpointing changes a gradient by {off}"
    figures = without_inf({"worst_error": error, "limit": limit})
    if error > limit:
        return problem(off, "Train with dropout = 0 and lora_dropout = 0, or with device = cpu.", **figures)
    return ok(off, **figures)


def _describe(parity: Parity, steps: Sequence[Step], wrong: Sequence[int]) -> str:
    """Tell of the first of the batches whose numbers are in `wrong`."""
    step = steps[wrong[0]]
    before = f", after {steps[wrong[0] - 1].shape}" if wrong[0] else ""
    number = wrong[0] + 1
    where = f"{parity.device}, batch {number} of {len(steps)} ({step.shape}{before})"
    off = f"off by {step.worst_error:.2g} times its size (limit {GRADIENT_LIMIT[parity.precision]:g})"
    others = f"{step.wrong_parameters} of {step.parameters} parameters wrong, {len(wrong)} of {len(steps)} batches"
    loss_is_wrong = step.loss_error > LOSS_LIMIT[parity.precision]
    loss = f"the loss is {step.loss_error:.1e} off" if loss_is_wrong else "the loss is right"
    return f"{where}: the gradient of {step.worst_parameter} is {off}; {others}; {loss}"


# Decoding.


def check_decoding(device: torch.device, tell: Tell) -> Finding:
    """Compare logits of fixed random tokens, so that a small difference does not lead to another text."""
    model = load_base(BUNDLED / "model")[0].eval()
    tell(f"{DECODED_TOKENS} tokens")
    cached, at_once = map(max, zip(*(logit_errors(model, clips, device) for clips in DECODED_CLIPS), strict=True))
    figures = without_inf({"limit": LOGITS_LIMIT, "cached": cached, "at_once": at_once})
    off = f"logits are off by {cached:.1e} of their size with a cache, {at_once:.1e} all at once"
    off = f"{device}: {off} (limit {LOGITS_LIMIT:g})"
    if at_once > LOGITS_LIMIT:
        return problem(f"{off}: no loss, WER or text can be trusted", DO_NOT_TRAIN, **figures)
    if cached > LOGITS_LIMIT:
        wrong = "WER and texts cannot be trusted, training and validation loss can"
        return problem(f"{off}: {wrong}", MADE_ELSEWHERE, **figures)
    return ok(off, **figures)


def logit_errors(model: WhisperForConditionalGeneration, clips: int, device: torch.device) -> tuple[float, float]:
    """Return the errors (with a cache, all at once), relative to the same weights in float64 on the CPU."""
    chance = torch.Generator().manual_seed(clips)
    features = torch.rand(clips, model.config.num_mel_bins, full_frames(model), generator=chance) * 2 - 1
    ids = torch.randint(model.config.decoder_start_token_id, (clips, DECODED_TOKENS), generator=chance)
    exact = logits(copy.deepcopy(model).double(), features.double(), [ids])
    candidate = copy.deepcopy(model).to(device)  # type: ignore[arg-type]  # transformers declares it wrongly
    features, ids = features.to(device), ids.to(device)
    cached, at_once = (logits(candidate, features, parts) for parts in (ids.split(1, dim=1), [ids]))
    return deviation(exact, cached), deviation(exact, at_once)


@torch.no_grad()
def logits(model: WhisperForConditionalGeneration, features: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Compute logits, float64 [clips, tokens, vocabulary] on the CPU. parts: of the ids [clips, n], in order."""
    states, cache, found = encode(model, features), None, []
    for ids in parts:
        output = model(encoder_outputs=states, decoder_input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1).double().cpu()
