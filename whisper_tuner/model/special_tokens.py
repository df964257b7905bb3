"""What `generate` is told of a model's special tokens and attention heads: it is all there, and of this model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import WhisperForConditionalGeneration, WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from whisper_tuner.data.labels import NO_TIMESTAMPS, PREVIOUS, TIMESTAMPS, added_words, is_multilingual, token_id
from whisper_tuner.errors import ModelError

START = "<|startoftranscript|>"
OWN = "Use the tokenizer that belongs to the model."


def settle_generation(name: str | Path, model: WhisperForConditionalGeneration, tokenizer: WhisperTokenizer) -> None:
    """Complete the generation config by the tokenizer: older models have none, or one that knows no languages.

    Raises ModelError where tokenizer, config.json and generation_config.json are not those of one model.
    """
    settings: Any = model.generation_config
    settings._from_model_config = settings.forced_decoder_ids = model.config.forced_decoder_ids = None  # those raise
    vocabulary, size = tokenizer.get_vocab(), model.config.vocab_size
    if lacking := {START, NO_TIMESTAMPS} - vocabulary.keys():
        raise ModelError(f"{name}: its tokenizer has no token {max(lacking)}", remedy=OWN)
    if vocabulary[START] != (start := model.config.decoder_start_token_id):
        raise ModelError(f"{name}: {START} is {start} in config.json, {vocabulary[START]} in the tokenizer", remedy=OWN)
    sizes = f"{name}: the model has {size:,} tokens, its tokenizer {len(tokenizer):,}"
    if beyond := sorted(text for text, token in vocabulary.items() if token >= size and text != tokenizer.pad_token):
        remedy = f"{OWN} Or train that model after `model.resize_token_embeddings({len(tokenizer)})`."
        raise ModelError(f"{sizes}, such as {beyond[0]!r}", remedy=remedy)
    stated = _stated(settings)
    if wrong := [token for token, number in stated.items() if vocabulary.get(token) != number]:
        theirs = f"{stated[wrong[0]]} in generation_config.json, and {vocabulary.get(wrong[0])} in the tokenizer"
        remedy = "Use files of one model. If the tokenizer is right, remove generation_config.json: it is made anew."
        raise ModelError(f"{name}: {wrong[0]} is {theirs}", remedy=remedy)
    first_time = vocabulary[NO_TIMESTAMPS] + 1
    if not stated and size not in (len(tokenizer), first_time + TIMESTAMPS):
        raise ModelError(f"{sizes}, and no generation_config.json says which they are", remedy=OWN)
    known = {key: getattr(model.config, key) for key in ("eos_token_id", "pad_token_id", "decoder_start_token_id")}
    known |= {"no_timestamps_token_id": first_time - 1, "max_length": model.config.max_target_positions}
    if known.setdefault("is_multilingual", is_multilingual(model)):
        languages = [token for code in LANGUAGES if (token := f"<|{code}|>") in vocabulary]
        known["lang_to_id"] = {token: vocabulary[token] for token in languages}
        known["task_to_id"] = {task: token_id(tokenizer, f"<|{task}|>") for task in ("transcribe", "translate")}
    for key, value in known.items():
        if getattr(settings, key, None) in (None, {}):
            setattr(settings, key, value)
    if added_words(tokenizer):  # transformers takes them for timestamps
        settings.return_timestamps = False
    _leave_out_heads(name, model)


def _stated(settings: Any) -> dict[str, int]:
    """Return the ids of special tokens that a generation config names."""
    single = {NO_TIMESTAMPS: "no_timestamps_token_id", PREVIOUS: "prev_sot_token_id"}
    found = {token: number for token, key in single.items() if (number := getattr(settings, key, None)) is not None}
    found |= getattr(settings, "lang_to_id", None) or {}
    return found | {f"<|{task}|>": number for task, number in (getattr(settings, "task_to_id", None) or {}).items()}


def _leave_out_heads(name: str | Path, model: WhisperForConditionalGeneration) -> None:
    """Forget alignment heads that the model does not have: a distilled one may come with its teacher's."""
    settings: Any = model.generation_config
    heads = getattr(settings, "alignment_heads", None) or []
    layers, width = model.config.decoder_layers, model.config.decoder_attention_heads
    if odd := [[layer, head] for layer, head in heads if not (0 <= layer < layers and 0 <= head < width)]:
        settings.alignment_heads = [each for each in heads if list(each) not in odd] or None
        what = f"{name}: left out alignment_heads of another model ({odd[0]} of {layers} layers with {width} heads)"
        logging.getLogger(__name__).warning(f"{what}; times of words may be wrong")
