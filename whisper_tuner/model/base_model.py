"""Whisper checkpoints: loading, choosing what is trained, and an encoder for inputs shorter than 30 s."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import gelu
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import (
    WhisperDecoder,
    WhisperDecoderLayer,
    WhisperEncoder,
    WhisperEncoderLayer,
)
from transformers.utils import cached_file

from whisper_tuner.config import Profile
from whisper_tuner.data.labels import is_multilingual
from whisper_tuner.errors import ConfigError, ModelError
from whisper_tuner.files import expanded
from whisper_tuner.hub import HUB_ID, LAYOUT, check_files, check_kind, loading
from whisper_tuner.languages import language_code
from whisper_tuner.model.memory import ENCODER, PARTS
from whisper_tuner.model.rounded import IN_FLOAT32, hold_rounded
from whisper_tuner.model.special_tokens import settle_generation
from whisper_tuner.text import parse_json

warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks transformers by its old name


class _PartlyRounded(WhisperForConditionalGeneration):
    """How a model is loaded of which some weights are bf16, so that it never stands in memory as float32."""

    _keep_in_fp32_modules_strict = set(IN_FLOAT32)  # noqa: RUF012 - as transformers declares it


class _RoundedEncoder(_PartlyRounded):
    _keep_in_fp32_modules_strict = {*IN_FLOAT32, "decoder", "proj_out"}  # noqa: RUF012


class _RoundedDecoder(_PartlyRounded):
    _keep_in_fp32_modules_strict = {*IN_FLOAT32, "model.encoder"}  # noqa: RUF012


def load_base(
    path: str | Path, profile: Profile | None = None, *, part: str = ""
) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """Load model (float32, on the CPU) and processor of a folder in transformers layout or of a hub id.

    profile: its linear layers and embeddings are bf16 where it says so; `prepare` makes them usable.
    part: one of PARTS; the other one is read without its layers, which never come into memory.
    Raises ModelError for what is not a loadable Whisper.
    """
    name = str(expanded(path)) if expanded(path).exists() else str(path)
    if Path(name).is_dir():
        check_files(Path(name))
    if Path(name).is_dir() or re.fullmatch(HUB_ID, name):
        check_kind(name)
    with loading(f"{path} does not load as a Whisper model", remedy=LAYOUT):
        # large-v3 and turbo are stored as fp16, in which nothing can be trained.
        kind, dtype = WhisperForConditionalGeneration, torch.float32
        if profile and (profile.rounds_frozen or profile.rounds_trained):
            kind, dtype = _PartlyRounded, torch.bfloat16
            if profile.method == "decoder" and not profile.rounds_trained:
                kind = _RoundedEncoder
            elif profile.method == "decoder" and not profile.rounds_frozen:
                kind = _RoundedDecoder
        model = _of_part(kind, name, dtype, part) if part else kind.from_pretrained(name, dtype=dtype)
        model.__class__ = WhisperForConditionalGeneration
        processor = WhisperProcessor.from_pretrained(name)
        _mend_generation_config(name, model)
        settle_generation(path, model, processor.tokenizer)
    made_for = (model.config.num_mel_bins, full_frames(model))
    gives = (processor.feature_extractor.feature_size, processor.feature_extractor.nb_max_frames)
    if made_for != gives:
        what = f"{path}: the model takes log-mels {made_for}, its feature extractor makes {gives}"
        raise ModelError(what, remedy="Use the processor that belongs to the model.")
    return model, processor


def prepare(model: WhisperForConditionalGeneration, profile: Profile) -> nn.Module:
    """Make the model what the profile's method trains: all of it, adapters (a PeftModel), or the decoder only.

    Raises ConfigError.
    """
    _set_dropout(model, profile.dropout)
    if profile.no_speech == "train":
        # `generate` may end at once: published models forbid it, and so write something of silence, too.
        for config in (model.generation_config, model.config):
            forbidden = set(getattr(config, "begin_suppress_tokens", None) or ()) - {model.config.eos_token_id}
            config.begin_suppress_tokens = sorted(forbidden) or None
    found: nn.Module = model
    if profile.method == "lora":
        found = _add_adapters(model, profile)
    else:
        model.requires_grad_(True)
        model.model.encoder.embed_positions.requires_grad_(False)  # sinusoids, fixed in Whisper's own training
        if profile.method == "decoder":
            model.model.encoder.requires_grad_(False)
    if profile.rounds_frozen or profile.rounds_trained:
        hold_rounded(model, profile.frozen_precision)
    return found


def _of_part(kind: Any, name: str, dtype: torch.dtype, part: str) -> Any:
    """Load a model that says it has all its layers, as plans and exports go by that, and has only those of one part."""
    config = WhisperConfig.from_pretrained(name)
    layers = _layers_beside(config, part)
    config.update(dict.fromkeys(layers, 0))
    without = rf"^model\.({'|'.join(other for other in PARTS if other != part)})\.layers\."
    quiet: Any = type(kind.__name__, (kind,), {"_keys_to_ignore_on_load_unexpected": [without]})
    model = quiet.from_pretrained(name, dtype=dtype, config=config)
    model.config.update(layers)
    return model


def _layers_beside(config: WhisperConfig, part: str) -> dict[str, int]:
    """Return the number of layers that the other part has, by its key."""
    return {f"{other}_layers": getattr(config, f"{other}_layers") for other in PARTS if other != part}


def train_only(model: nn.Module, part: str) -> None:
    """Freeze what is left of the other part of a model that `load_base` has read in part."""
    for name, parameter in model.named_parameters():
        if ("model.encoder." in name) != (part == ENCODER):
            parameter.requires_grad_(False)


def skeleton(model: nn.Module, profile: Profile, *, part: str = "") -> nn.Module:
    """Return the whole of a model that was read in part, or `part` of it, prepared as it was, with no weights ("meta").

    The first numbers of adapters are drawn all the same, from torch's generator.
    """
    whisper = whisper_of(model)
    config = copy.deepcopy(whisper.config)
    if part:
        config.update(dict.fromkeys(_layers_beside(config, part), 0))
    with torch.device("meta"):
        whole = WhisperForConditionalGeneration(config)
    whole.generation_config = whisper.generation_config
    return prepare(whole, replace(profile, frozen_precision="float32", optimizer="adamw"))


def set_language(model: nn.Module, language: str | None, task: str = "transcribe") -> None:
    """Make a multilingual model assume this language in `generate`; an English-only model has nothing to set."""
    whisper = whisper_of(model)
    if is_multilingual(whisper):
        settings: Any = whisper.generation_config
        settings.language, settings.task = language_code(language), task


def whisper_of(model: nn.Module) -> WhisperForConditionalGeneration:
    """Return the Whisper inside a PeftModel, or the model itself."""
    whisper = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(whisper, WhisperForConditionalGeneration)
    return whisper


def full_frames(model: nn.Module) -> int:
    """Return the mel frames that the encoder is made for (3,000 = 30 s in every published Whisper)."""
    encoder = whisper_of(model).model.encoder
    return encoder.config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]


def encode(model: nn.Module, log_mel: Tensor) -> BaseModelOutput:
    """Compute encoder states [B, frames / 2, d_model] of log-mels [B, 80|128, frames] of up to the model's length.

    transformers' encoder refuses inputs shorter than 30 s; this is the same computation with the positions cut to the
    input's length. SpecAugment and LayerDrop act as the checkpoint's config says.
    """
    whisper = whisper_of(model)
    encoder = whisper.model.encoder
    log_mel = masked(whisper, log_mel)
    if log_mel.shape[-1] == full_frames(model):
        return encoder(log_mel)
    states = gelu(encoder.conv2(gelu(encoder.conv1(log_mel)))).transpose(1, 2)
    states = states + encoder.embed_positions.weight[: states.shape[1]]
    return BaseModelOutput(last_hidden_state=through_layers(encoder, states))


def masked(whisper: WhisperForConditionalGeneration, log_mel: Tensor) -> Tensor:
    """Do transformers' SpecAugment on log-mels [B, 80|128, frames], if the checkpoint's config asks for it."""
    masks = whisper.config.apply_spec_augment and log_mel.shape[-1] >= whisper.config.mask_time_length
    if not (masks and whisper.model.encoder.training):
        return log_mel
    return whisper.model._mask_input_features(log_mel.clone())  # it writes in place


def through_layers(encoder: WhisperEncoder, states: Tensor, **options: object) -> Tensor:
    """Compute what is behind the encoder's convolutions and positions, [B, n, d_model], as it does."""
    states = drop(states, p=encoder.dropout, training=encoder.training)
    for layer in encoder.layers:
        if encoder.training and encoder.layerdrop > 0 and torch.rand([]) < encoder.layerdrop:
            continue
        states = layer(states, None, **options)
    return encoder.layer_norm(states)


def _add_adapters(model: WhisperForConditionalGeneration, profile: Profile) -> PeftModel:
    """Put low-rank adapters (2106.09685) on the linear layers whose names end in one of `lora_targets`."""
    targets: list[str] | str = list(profile.lora_targets)
    if profile.lora_part != "all":  # by an expression for whole names: only the output layer is not inside the decoder
        targets = rf"(model\.decoder\..*\.)?({'|'.join(map(re.escape, targets))})"
    settings = LoraConfig(
        task_type=None,  # SEQ_2_SEQ_LM would call forward with input_ids, which Whisper has not
        r=profile.lora_r,
        lora_alpha=profile.lora_alpha,
        lora_dropout=profile.lora_dropout,
        target_modules=targets,
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        names = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ConfigError(f"LoRA cannot be added: {error}", remedy=f"Use some of {', '.join(names)}.") from error


def _set_dropout(model: WhisperForConditionalGeneration, dropout: float) -> None:
    """Drop a share of what feed-forward layers compute. What layers hand on is left whole: there a few values carry
    much, and with a tenth of them dropped plain transformers' loss of tiny.en on English rises from 2.1 to 8.1.
    """
    model.config.dropout, model.config.activation_dropout = 0.0, dropout
    for module in model.modules():
        if isinstance(module, (WhisperEncoder, WhisperEncoderLayer, WhisperDecoder, WhisperDecoderLayer)):
            module.dropout = 0.0
        if isinstance(module, (WhisperEncoderLayer, WhisperDecoderLayer)):
            module.activation_dropout = dropout


def _mend_generation_config(name: str, model: WhisperForConditionalGeneration) -> None:
    """Read a generation config with the mark `_from_model_config` anew.

    transformers drops keys from a file that has the mark, the language ids among them.
    """
    file = cached_file(name, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if file and model.generation_config._from_model_config:
        stored = parse_json(Path(file).read_text(encoding="utf-8")) | {"_from_model_config": None}
        model.generation_config = GenerationConfig.from_dict(stored)
