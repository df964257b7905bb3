"""Reads manifests, headers, audio and tokenizer: all that checks look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from whisper_tuner.data.check import header_index
from whisper_tuner.data.checks.facts_store import FILE, FactsStore, Told
from whisper_tuner.data.checks.material import Material
from whisper_tuner.data.dataset import Manifest, load_manifest
from whisper_tuner.hub import loading, model_file


def read(path: Path, store: Path, *, max_duration_s: float, no_speech: bool = False) -> Manifest:
    """A manifest with the rows that can be used, and those that cannot. Headers of its audio are kept below `store`."""
    index = header_index(path, store)
    try:
        return load_manifest(path, max_duration_s=max_duration_s, index=index, no_speech=no_speech)
    finally:
        index.save()


def decode(material: Material, store: Path, told: Told) -> Material:
    """With facts of all its audio; those of earlier checks are kept below `store`."""
    files = (row.sample.audio for row in material.rows)
    return replace(material, facts=FactsStore(store / "cache" / FILE).facts_of(files, told))


def reading_back(base_model: str) -> Callable[[str], str] | None:
    """What a model's tokenizer makes of a text, there and back; None if it has no tokenizer.json. Raises ModelError."""
    with loading(f"{base_model}: its tokenizer does not load", remedy="Copy the model again."):
        if not (file := model_file(base_model, "tokenizer.json")):
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids).strip()
