"""Estimates the memory that fine-tuning needs, from the model's dimensions alone: no torch, no download.

It tells 8 GB from 30 GB before a run starts; the run itself reports what it really uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from whisper_tuner.config import Profile
from whisper_tuner.data.batch_shapes import CPU_POSITIONS, POSITIONS
from whisper_tuner.files import expanded
from whisper_tuner.text import parse_json

FLOAT = 4  # bytes
FROZEN = {"float32": 4, "bf16": 2, "int8": 1}  # bytes of a weight that is not trained; the fastest first
# For each trained parameter, beside its value: 4 for the gradient, 8 for AdamW's moments, 12 for three flats of DiLoCo
# with plain averaging, and copies while a checkpoint is written. With the value that is 28 at rest, and 48 at worst.
# Some strategies take more: distributed/plan/automatic.py.
TRAINED_BYTES = 41
AFTER_A_STEP_BYTES = 40  # the part of TRAINED_BYTES that a first forward and backward pass do not show
COPIED_BYTES = 12  # the part of TRAINED_BYTES that stands only while a checkpoint is written, after a step
PROCESS_BYTES = 380_000_000  # Python with torch and transformers, before any model
KEPT_FREE_BYTES = 120_000_000  # gaps in memory that is not given back at once: see exogym.device
# A CUDA card holds the gradient and AdamW's moments for each trained parameter; flats and copies are in the machine's
# memory. The moments are what a first pass does not show. Each process takes CUDA_CONTEXT of the card before any
# tensor (0.55 GB on an H200), and what is copied to and from the card goes through two pieces of STAGED at most.
CUDA_TRAINED_BYTES, CUDA_AFTER_A_STEP_BYTES = 12, 8
CUDA_CONTEXT, STAGED = 600_000_000, 64 << 20
LOGITS_AT_ONCE = 512  # tokens: see WhisperModelWrapper
FRAMES_PER_S = 50  # encoder positions, after its convolutions
TOKENS_PER_S = 6  # of fast speech
LOGITS = 4  # copies of them in the loss and its backward pass
MPS_SHARE = 0.7  # of a Mac's memory for its GPU: Metal's recommendedMaxWorkingSetSize is two thirds to three quarters
RESERVE = 0.1  # of the memory: left to what else runs there
ENCODER, DECODER = PARTS = "encoder", "decoder"  # the halves of a model, as the stages of a pipeline
# Micro-batches of a pipeline's step, where it has so many clips: with two stages a fifth of the time is waiting. The
# encoder has the activations of IN_FLIGHT of them.
PASSES, IN_FLIGHT = 4, 2
MOST, MOST_LAYERS = 10_000_000, 1000  # of a dimension, of layers; a config.json with more is damaged


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Whisper's dimensions, by the names in its config.json."""

    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    vocab_size: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448

    @property
    def encoder_parameters(self) -> int:
        d = self.d_model
        stem = (self.num_mel_bins * 3 + 1) * d + (d * 3 + 1) * d
        return stem + self.positions + _layers(d, self.encoder_layers, self.encoder_ffn_dim, attentions=1)

    @property
    def decoder_parameters(self) -> int:
        """Including the embedding, which is also the output layer."""
        embedding = (self.vocab_size + self.max_target_positions) * self.d_model
        return embedding + _layers(self.d_model, self.decoder_layers, self.decoder_ffn_dim, attentions=2)

    def half(self, part: str) -> ModelShape:
        """Return the shape of a model that has the layers of one part only."""
        return replace(self, **{f"{other}_layers": 0 for other in PARTS if other != part})

    @property
    def positions(self) -> int:
        """The encoder's sinusoids, which are never trained."""
        return self.max_source_positions * self.d_model

    @property
    def parameters(self) -> int:
        return self.encoder_parameters + self.decoder_parameters

    def linear_layers(self) -> Iterator[tuple[str, int, int]]:
        """(name, values in, values out) of each layer that LoRA can adapt."""
        d = self.d_model
        for part, count, inner in (
            ("encoder", self.encoder_layers, self.encoder_ffn_dim),
            ("decoder", self.decoder_layers, self.decoder_ffn_dim),
        ):
            for number in range(count):
                layer = f"model.{part}.layers.{number}"
                for attention in ("self_attn", "encoder_attn") if part == "decoder" else ("self_attn",):
                    yield from ((f"{layer}.{attention}.{name}_proj", d, d) for name in ("q", "k", "v", "out"))
                yield f"{layer}.fc1", d, inner
                yield f"{layer}.fc2", inner, d
        yield "proj_out", d, self.vocab_size


def _layers(d: int, count: int, inner: int, *, attentions: int) -> int:
    """Count the parameters of an encoder's or decoder's layers and of the norm behind them."""
    attention = 4 * d * d + 3 * d + 2 * d  # four projections, the key's without bias, and the norm before them
    feed_forward = 2 * d * inner + inner + d + 2 * d
    return count * (attentions * attention + feed_forward) + 2 * d


def _published(d: int, layers: int, *, vocabulary: int = 51865, mels: int = 80, decoder_layers: int = 0) -> ModelShape:
    return ModelShape(
        d_model=d,
        encoder_layers=layers,
        decoder_layers=decoder_layers or layers,
        encoder_ffn_dim=4 * d,
        decoder_ffn_dim=4 * d,
        encoder_attention_heads=d // 64,
        decoder_attention_heads=d // 64,
        vocab_size=vocabulary,
        num_mel_bins=mels,
    )


_SIZES = {"tiny": (384, 4), "base": (512, 6), "small": (768, 12), "medium": (1024, 24)}
PUBLISHED = {
    **{f"openai/whisper-{name}": _published(*size) for name, size in _SIZES.items()},
    **{f"openai/whisper-{name}.en": _published(*size, vocabulary=51864) for name, size in _SIZES.items()},
    "openai/whisper-large": _published(1280, 32),
    "openai/whisper-large-v2": _published(1280, 32),
    "openai/whisper-large-v3": _published(1280, 32, vocabulary=51866, mels=128),
    "openai/whisper-large-v3-turbo": _published(1280, 32, vocabulary=51866, mels=128, decoder_layers=4),
}


def shape_of(base_model: str) -> ModelShape | None:
    """Return the dimensions of a model folder or of a published hub id; None if that takes a download."""
    if base_model in PUBLISHED:
        return PUBLISHED[base_model]
    try:
        config = parse_json((expanded(base_model) / "config.json").read_text(encoding="utf-8"))
        shape = ModelShape(**{name: int(config[name]) for name in ModelShape.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    sizes, layers = vars(shape).values(), max(shape.encoder_layers, shape.decoder_layers)
    return shape if min(sizes) > 0 and max(sizes) < MOST and layers < MOST_LAYERS else None


def trained_parameters(shape: ModelShape, profile: Profile) -> int:
    if profile.method == "lora":
        return sum(
            profile.lora_r * (width + height)
            for name, width, height in shape.linear_layers()
            if (profile.lora_part == "all" or ".encoder." not in name)
            and any(name == target or name.endswith(f".{target}") for target in profile.lora_targets)
        )
    return shape.decoder_parameters if profile.method == "decoder" else shape.parameters - shape.positions


def frozen_parameters(shape: ModelShape, profile: Profile) -> int:
    """Count the weights that are held in `frozen_precision`: of linear layers and embeddings that are not trained."""
    if profile.method == "full":
        return 0
    held = (each for each in shape.linear_layers() if profile.method == "lora" or ".encoder." in each[0])
    return sum(width * height for _, width, height in held)


def best_bytes(profile: Profile) -> int:
    """Return bytes for each trained parameter: the best weights, which stand twice while a checkpoint is written."""
    return FLOAT if profile.keep_best else 0


def training_memory(
    shape: ModelShape,
    profile: Profile,
    *,
    clips: int,
    clip_s: float = 30.0,
    device: str = "cpu",
    more_bytes: int = 0,
    part: str = "",
) -> int:
    """Estimate the bytes that training takes at its peak, with so many clips computed at once.

    On cuda, of the card. clip_s: their padded length. more_bytes: what the strategy takes for each trained parameter
    beyond TRAINED_BYTES; not of a card. part: one of PARTS, for a stage of a pipeline that trains both.
    """
    if part:
        shape = shape.half(part)
    trained = trained_parameters(shape, profile)
    if part and profile.method == "full":  # without what is left of the other part
        trained = shape.encoder_parameters - shape.positions if part == ENCODER else shape.decoder_parameters
    clips *= IN_FLIGHT if part == ENCODER else 1
    weights = FLOAT * (shape.parameters + (trained if profile.method == "lora" else 0))
    weights -= (FLOAT - FROZEN.get(profile.frozen_precision, FLOAT)) * frozen_parameters(shape, profile)
    weights -= (FLOAT - FROZEN["bf16"]) * trained if profile.rounds_trained else 0
    tokens, logits = _lengths(shape, clip_s)[1], FLOAT * LOGITS * shape.vocab_size  # bytes of a token's logits
    tokens = 0 if part == ENCODER else tokens
    if device == "cuda":  # adapters keep hardly more there, and logits are made for some tokens at a time
        staged = 2 * min(STAGED, FLOAT * trained)
        kept = clips * _layers_keep(shape, profile, clip_s, more=0)
        kept += logits * min(LOGITS_AT_ONCE, clips * tokens)
        held = FLOAT if profile.optimizer == "low_memory" else CUDA_TRAINED_BYTES
        return CUDA_CONTEXT + weights + held * trained + staged + kept
    more_bytes += 2 * best_bytes(profile)
    per_clip = _layers_keep(shape, profile, clip_s, more=22) + logits * tokens
    if device == "mps":
        per_clip += _attention_weights(shape, profile, clip_s)
    activations = clips * per_clip
    if profile.gradient_checkpointing and profile.method == "lora":  # of other methods this was not measured
        activations = max(0, activations - COPIED_BYTES * trained)
    elif not (profile.gradient_checkpointing and profile.rounds_trained):
        activations += KEPT_FREE_BYTES
    return PROCESS_BYTES + weights + (TRAINED_BYTES + more_bytes) * trained + activations


def profile_memory(
    profile: Profile,
    *,
    longest_s: float | None = None,
    clips: int | None = None,
    device: str = "cpu",
    more_bytes: int = 0,
    part: str = "",
) -> int | None:
    """Estimate the most bytes that a profile takes in each worker; None if the model's dimensions are not known here.

    Without clips that are padded to 30 s in their turn: where one does not fit, a worker leaves that out.
    longest_s: of the longest clip, if the manifest has been read. clips: computed at once, if not as the worker does.
    more_bytes, part: see training_memory.
    """
    shape = shape_of(profile.base_model)
    if shape is None:
        return None
    longest = profile.max_duration_s if longest_s is None else longest_s
    clip_s = min(30.0, longest) if profile.audio_context in ("cropped", "mixed") else 30.0
    batch = math.ceil(profile.batch_size / (passes(profile) if part else profile.accumulation))
    most = CPU_POSITIONS if device == "cpu" else POSITIONS
    clips = clips or min(batch, max(1, most // max(_lengths(shape, clip_s))))
    return training_memory(shape, profile, clips=clips, clip_s=clip_s, device=device, more_bytes=more_bytes, part=part)


def passes(profile: Profile) -> int:
    """Return the micro-batches of a pipeline's step."""
    return max(profile.accumulation, min(PASSES, profile.batch_size))


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a profile: `frozen_precision`, and the bytes of each worker, `whole` with whole batches.

    one: with a clip at a time; again: with activations that are computed again in the backward pass.
    """

    frozen_precision: str
    again: bool
    whole: int
    one: int


def ways_of(
    profile: Profile,
    *,
    longest_s: float | None = None,
    device: str = "cpu",
    more_bytes: int = 0,
    part: str = "",
) -> tuple[Way, ...]:
    """Return the ways to train the profile, the fastest first; () if the model's dimensions are not known here.

    part: see training_memory.
    """
    kinds = [profile.frozen_precision]
    if profile.frozen_precision == "auto":
        kinds = ["float32"] if profile.method == "full" else [*FROZEN]
    found = []
    for again in (True,) if profile.gradient_checkpointing else (False, True):
        for kind in kinds:
            one = replace(profile, frozen_precision=kind, gradient_checkpointing=again)
            whole, least = (
                profile_memory(one, clips=clips, longest_s=longest_s, device=device, more_bytes=more_bytes, part=part)
                for clips in (None, 1)
            )
            if whole is None or least is None:
                return ()
            found.append(Way(frozen_precision=kind, again=again, whole=whole, one=least))
    return tuple(found)


def fastest(ways: Sequence[Way], memory: float) -> Way:
    """Return the first way for which there is memory, or the one that needs least."""
    return next((way for way in ways if way.one <= memory), min(ways, key=lambda way: way.one))


def _layers_keep(shape: ModelShape, profile: Profile, clip_s: float, *, more: int) -> int:
    """Estimate the bytes that layers keep of one clip for the backward pass.

    more: values for each of a layer's, which adapters keep and pass on.
    """
    frames, tokens = _lengths(shape, clip_s)
    d, checkpointing = shape.d_model, profile.gradient_checkpointing
    more = more if profile.method == "lora" else 0
    encoder_layer = frames * ((10 + more) * d + 2 * shape.encoder_ffn_dim)
    decoder_layer = tokens * ((18 + more) * d + 2 * shape.decoder_ffn_dim) + 2 * frames * d
    of_encoder = (min(1, shape.encoder_layers) if checkpointing else shape.encoder_layers) * encoder_layer
    of_decoder = (min(1, shape.decoder_layers) if checkpointing else shape.decoder_layers) * decoder_layer
    if checkpointing:  # the inputs of each layer, and one layer whole
        of_encoder += shape.encoder_layers * frames * d
        of_decoder += shape.decoder_layers * tokens * d
    if not profile.trains_encoder:  # nothing of the encoder is kept but its output
        of_encoder = 0
    layers = of_encoder + of_decoder
    stem = 4 * frames * (d + shape.num_mel_bins) if profile.trains_encoder else 0
    return FLOAT * (layers + stem)


def _attention_weights(shape: ModelShape, profile: Profile, clip_s: float) -> int:
    """Estimate the bytes that one clip takes more where attention has no fused backward: on mps (pytorch 179294).

    There each attention keeps its weights [heads, queries, keys] in float32, also under bf16, and scaled copies of
    queries and keys. Causal attention keeps three of its size. Backward holds the gradients of the weights and of the
    scores besides, of one layer at a time; by then the logits are gone. Measured on a CPU without its fused attention.
    """
    frames, tokens = _lengths(shape, clip_s)
    d, heads, checkpointing = shape.d_model, shape.decoder_attention_heads, profile.gradient_checkpointing
    square = shape.encoder_attention_heads * frames**2 if profile.trains_encoder else 0
    encoder_layer = square and square + 2 * frames * d
    decoder_layer = heads * tokens * (frames + 3 * tokens) + (frames + 3 * tokens) * d
    layers = [min(1, count) if checkpointing else count for count in (shape.encoder_layers, shape.decoder_layers)]
    backward = 2 * square if checkpointing else max(0, 2 * square - LOGITS * tokens * shape.vocab_size)
    return FLOAT * (layers[0] * encoder_layer + layers[1] * decoder_layer + backward)


def _lengths(shape: ModelShape, clip_s: float) -> tuple[int, int]:
    """Return a clip's encoder positions and label tokens."""
    frames = min(shape.max_source_positions, round(clip_s * FRAMES_PER_S))
    return frames, min(shape.max_target_positions, round(clip_s * TOKENS_PER_S))
