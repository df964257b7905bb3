"""A trained model -> a folder that other programs load, and back.

Full fine-tuning gives an ordinary checkpoint: `WhisperForConditionalGeneration.from_pretrained(folder)`. LoRA gives an
adapter: `PeftModel.from_pretrained(base, folder)`. Beside the weights lie what faster-whisper
(`preprocessor_config.json`) and whisper.cpp's converter (`vocab.json`, `added_tokens.json`) look for. The export to
another runtime is a new file beside this one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizer

from whisper_tuner.errors import RunError
from whisper_tuner.files import atomic_folder, expanded, write_atomically
from whisper_tuner.hub import ADAPTER_CONFIG, EXTRACTOR, TOKENIZER, base_of, is_adapter, loading
from whisper_tuner.model.base_model import load_base, whisper_of
from whisper_tuner.model.rounded import RoundedLinear
from whisper_tuner.model.special_tokens import settle_generation


def save_final(
    model: nn.Module, processor: WhisperProcessor, out: str | Path, base_model: str | Path, *, blend: float = 1.0
) -> Path:
    """Write the final model to `out`, which appears whole or not at all; an existing one is replaced.

    `base_model` is what training started from. An adapter names it: a hub id as it is, a local folder by its path
    relative to `out`, since an absolute path would be wrong on another machine. `load_model` reads both.
    blend: see Profile; the model in memory is changed.
    Raises RunError: disk full, no permission.
    """
    out = Path(out)
    if blend < 1:
        _blend_with_base(model, base_model, blend)
    try:
        with atomic_folder(out) as part:
            if isinstance(model, PeftModel):
                named = _portable_name(base_model, out)
                for config in model.peft_config.values():
                    config.base_model_name_or_path = named
                # Without this peft looks for the base's config under that name, on the network too.
                model.save_pretrained(str(part), save_embedding_layers=False)
                whisper_of(model).generation_config.save_pretrained(part)
                (part / "README.md").write_text(_ADAPTER_CARD.format(base=named), encoding="utf-8")
            else:
                with_published_weights(model, base_model).save_pretrained(part)
            save_processor(processor, part)
    except (OSError, SafetensorError) as error:
        remedy = "Free some space, or choose another folder with runs_dir."
        raise RunError(f"{out}: the model cannot be written: {error}", remedy=remedy) from error
    return out


@torch.no_grad()
def _blend_with_base(model: nn.Module, base_model: str | Path, share: float) -> None:
    """Keep a share of what training has changed (WiSE-FT, 2109.01903)."""
    if isinstance(model, PeftModel):
        for name, value in model.named_parameters():
            if ".lora_B." in name:  # what an adapter adds is B A x
                value.mul_(share)
        return
    base, _ = load_base(base_model)
    untrained = dict(base.named_parameters())
    for name, value in model.named_parameters():
        if value.requires_grad:
            value.copy_(untrained[name].lerp(value.float(), share))


def with_published_weights(model: nn.Module, base_model: str | Path) -> WhisperForConditionalGeneration:
    """Return the model in float32, with its base's weights where they were not trained; itself if none is rounded."""
    whisper = whisper_of(model)
    if not any(isinstance(module, RoundedLinear) for module in whisper.modules()):
        return whisper
    if all(value.requires_grad or value.dtype == torch.float32 for value in whisper.parameters()):
        return whisper.float()  # in place: a second model may be more than there is memory for
    base, _ = load_base(base_model)
    trained = {name: value.detach() for name, value in whisper.named_parameters() if value.requires_grad}
    base.load_state_dict(trained, strict=False)
    base.config, base.generation_config = whisper.config, whisper.generation_config
    return base


def load_model(
    folder: str | Path, base_model: str | Path | WhisperForConditionalGeneration | None = None
) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """Load a saved model (float32, on the CPU) and its processor: a checkpoint, a hub id, or an adapter on its base.

    `base_model` overrides the base that an adapter names; one in memory becomes part of the result. The adapter is
    added to its weights: the output is the same, and the model is a plain one again. Raises ModelError.
    """
    folder = expanded(folder) if expanded(folder).exists() else folder
    if not is_adapter(folder):
        return load_base(folder)
    if isinstance(base_model, WhisperForConditionalGeneration):
        base, its_processor = base_model.cpu(), None
    else:
        base, its_processor = load_base(base_model or base_of(Path(folder)))
    remedy = "The adapter and its base model must be of the same size."
    with loading(f"{folder} does not load as an adapter", remedy=remedy):
        processor = _processor_of(Path(folder), its_processor)
        if (Path(folder) / "generation_config.json").is_file():
            base.generation_config = GenerationConfig.from_pretrained(folder)
        settle_generation(folder, base, processor.tokenizer)
        model = PeftModel.from_pretrained(base, folder)
    return model.merge_and_unload(), processor


def _processor_of(adapter: Path, base: WhisperProcessor | None) -> WhisperProcessor:
    """Load an adapter's processor. peft alone saves none: what lacks is that of the base model."""
    has_extractor, has_tokenizer = (any((adapter / name).is_file() for name in each) for each in (EXTRACTOR, TOKENIZER))
    if has_extractor and has_tokenizer:
        return WhisperProcessor.from_pretrained(adapter)
    base = base or WhisperProcessor.from_pretrained(base_of(adapter))
    extractor, tokenizer = base.feature_extractor, base.tokenizer
    extractor = extractor.from_pretrained(adapter) if has_extractor else extractor
    return WhisperProcessor(extractor, tokenizer.from_pretrained(adapter) if has_tokenizer else tokenizer)


def save_processor(processor: WhisperProcessor, part: Path) -> None:
    """Save a processor, with the files that other runtimes look for beside it."""
    processor.save_pretrained(part)
    processor.feature_extractor.save_pretrained(part)
    vocabulary, added = vocabularies(processor.tokenizer)
    for name, tokens in (("vocab.json", vocabulary), ("added_tokens.json", added)):
        (part / name).write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")


def vocabularies(tokenizer: WhisperTokenizer) -> tuple[dict[str, int], dict[str, int]]:
    """Return text tokens and special tokens, by their ids; end-of-text counts as text, as in OpenAI's files."""
    special = tokenizer.get_added_vocab()
    special.pop(tokenizer.eos_token, None)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {token: i for token, i in by_id if token not in special}, {t: i for t, i in by_id if t in special}


def _portable_name(base_model: str | Path, out: Path) -> str:
    base = expanded(base_model)
    if not base.is_dir():
        return str(base_model)
    return Path(os.path.relpath(base.resolve(), out.resolve())).as_posix()


def name_base(folder: Path, base_model: str | Path) -> None:
    """Make the adapter in `folder`, which another machine wrote, name its base by the path from there."""
    config = folder / ADAPTER_CONFIG
    if config.is_file():
        stated = json.loads(config.read_text(encoding="utf-8"))
        stated["base_model_name_or_path"] = _portable_name(base_model, folder)
        write_atomically(config, json.dumps(stated, indent=2, sort_keys=True) + "\n")


_ADAPTER_CARD = """---
base_model: {base}
library_name: peft
---

A LoRA adapter for the Whisper model `{base}`. A path is relative to this folder.

    from peft import PeftModel
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    base = WhisperForConditionalGeneration.from_pretrained(BASE)  # the model named above, where you have it
    model = PeftModel.from_pretrained(base, THIS_FOLDER)
    processor = WhisperProcessor.from_pretrained(THIS_FOLDER)
"""
