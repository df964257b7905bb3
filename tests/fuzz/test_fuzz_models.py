"""A model's folder: its settings, its weights, its tokenizer; and an adapter's."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import damaged, damaged_json
from fuzzing import fuzz, outcome, parsed
from hypothesis import example
from safetensors.numpy import load, load_file, save

from whisper_tuner.config import Profile
from whisper_tuner.data.labels import token_limit
from whisper_tuner.export.final import load_model, save_final
from whisper_tuner.hub import check_model
from whisper_tuner.model.base_model import load_base, prepare
from whisper_tuner.model.memory import profile_memory

BUNDLED = Path(__file__).parents[2] / "bundled/model"
JSON = {file.name: json.loads(file.read_text()) for file in BUNDLED.glob("*.json")}
SETTINGS = ("config.json", "generation_config.json")
MULTILINGUAL = {**JSON["generation_config.json"], "is_multilingual": True, "lang_to_id": {"<|en|>": 5, "<|fr|>": 6}}
WEIGHTS = save({"layers.0.q_proj.weight": np.zeros((2, 2), dtype=np.float32), "norm.weight": np.zeros(2)})
PARTS = {"metadata": {"total_size": 6000}, "weight_map": {"proj_out.weight": "model.safetensors", "x": "b.safetensors"}}


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, folder / "model"))


@pytest.fixture(scope="module")
def adapter(folder: Path, model: Path) -> Path:
    base, processor = load_base(model)
    profile = Profile(base_model=str(model), train=Path("x"), method="lora", lora_r=2, lora_targets=("q_proj",))
    lora = prepare(base, profile)
    return save_final(lora, processor, folder / "adapter", model)


def with_file(folder: Path, name: str, data: bytes, look: Callable[[Path], object]) -> None:
    """What `look` makes of a folder with this file in it; it is put back afterwards."""
    whole = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(data)
        look(folder)
    finally:
        (folder / name).write_bytes(whole)


def without_weights(model: Path, name: str, data: bytes) -> Path:
    """The model, but for its weights, and with this file."""
    if not model.exists():
        shutil.copytree(BUNDLED, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / name).write_bytes(data)
    return model


def before_a_run(model: Path) -> None:
    """A limit is what the files say; memory grows with the batch; a whole model is right."""
    profile = Profile(base_model=str(model), train=Path("clips.csv"), method="lora", lora_targets=("q_proj",))
    good = outcome(lambda: check_model(profile) or True, names=model)
    memory = [outcome(profile_memory, dataclasses.replace(profile, batch_size=clips)) for clips in (1, 8)]
    assert memory == [None, None] or 0 < memory[0] <= memory[1]
    limit = outcome(lambda: token_limit(str(model), language="fr"))
    texts = [(model / name).read_bytes().decode("utf-8", "replace") for name in SETTINGS]
    config, generation = map(parsed, texts)
    if limit:
        multilingual = generation.get("is_multilingual") if isinstance(generation, dict) else None
        if multilingual is None:
            multilingual = config.get("vocab_size", 0) >= 51_865
        assert limit.longest == config.get("max_target_positions", 448) - (4 if multilingual else 2)
        excess = outcome(limit.excess, "many words " * 50, names=model)
        assert not excess or f"the decoder takes {limit.longest}" in excess
        assert limit.longest < 2 or limit.excess("") == ""
    if config == JSON["config.json"] and generation in (JSON["generation_config.json"], MULTILINGUAL):
        assert limit and limit.language in ("fr", "") and memory[0]
    elif not isinstance(config, dict):
        assert good is None and limit is None


def config(**changes: object) -> bytes:
    return json.dumps(JSON["config.json"] | changes).encode()


@fuzz("config.json", damaged_json(JSON["config.json"]), cost=2)
@example(data=config(max_target_positions="x"))
@example(data=config(vocab_size="x"))
@example(data=config(d_model=float("inf")))
@example(data=config(encoder_layers=10**9))
def test_a_config(model: Path, data: bytes):
    with_file(model, "config.json", data, before_a_run)


@fuzz("generation_config.json", damaged_json(MULTILINGUAL), cost=2)
@example(data=json.dumps(MULTILINGUAL | {"lang_to_id": [{}]}).encode())
@example(data=json.dumps(MULTILINGUAL | {"lang_to_id": 7}).encode())
def test_a_generation_config(model: Path, data: bytes):
    with_file(model, "generation_config.json", data, before_a_run)


PANIC = {**JSON["tokenizer.json"], "model": {**JSON["tokenizer.json"]["model"], "continuing_subword_prefix": "xx"}}


@fuzz("tokenizer.json", damaged_json(JSON["tokenizer.json"]), cost=10)
@example(data=json.dumps(PANIC).encode())
def test_a_tokenizer(model: Path, data: bytes):
    with_file(model, "tokenizer.json", data, before_a_run)


@fuzz("model.safetensors", damaged(WEIGHTS), cost=2)
@example(data=WEIGHTS)
def test_weights(folder: Path, data: bytes):
    """Accepted exactly if the library reads them, and they have the layer that LoRA is for."""
    model = without_weights(folder / "weights", "model.safetensors", data)
    before_a_run(model)
    profile = Profile(base_model=str(model), train=Path("clips.csv"), method="lora", lora_targets=("q_proj",))
    accepted = outcome(lambda: check_model(profile) or True, names=model)
    try:
        matrices = [name for name, weights in load(data).items() if weights.ndim > 1]
    except Exception:  # the library raises what it likes
        matrices = None
    if accepted is None:
        assert matrices is None or not any(name.endswith("q_proj.weight") for name in matrices)
    elif matrices is not None:
        assert not matrices or any(name.removesuffix(".weight").split(".")[-1] == "q_proj" for name in matrices)


@fuzz("model.safetensors.index.json", damaged_json(PARTS), cost=2)
@example(data=b'{"weight_map": [{}]}')
@example(data=b'{"weight_map": {"x": "\\u0000"}}')
def test_weights_in_parts(folder: Path, data: bytes):
    before_a_run(without_weights(folder / "parts", "model.safetensors.index.json", data))


def loaded(folder: Path, *, names: bool = True) -> None:
    """What loads is the model: its embeddings are those of the file, and it holds nothing but numbers."""
    found = outcome(load_model, folder, names=folder if names else "")
    if found:
        model, _ = found
        embeddings = load_file(BUNDLED / "model.safetensors")["model.decoder.embed_tokens.weight"]
        assert np.array_equal(model.model.decoder.embed_tokens.weight.detach().numpy(), embeddings)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@fuzz("config.json, loaded", damaged_json(JSON["config.json"]), few=2, cost=100)
@example(data=config(decoder_attention_heads={}))
def test_a_config_loaded(model: Path, data: bytes):
    with_file(model, "config.json", data, loaded)


@fuzz("generation_config.json, loaded", damaged_json(MULTILINGUAL), few=2, cost=100)
@example(data=b"0")
def test_a_generation_config_loaded(model: Path, data: bytes):
    with_file(model, "generation_config.json", data, loaded)


@fuzz("processor_config.json, loaded", damaged_json(JSON["processor_config.json"]), few=2, cost=100)
def test_a_processor_config_loaded(model: Path, data: bytes):
    with_file(model, "processor_config.json", data, loaded)


@fuzz("tokenizer_config.json, loaded", damaged_json(JSON["tokenizer_config.json"]), few=2, cost=100)
@example(data=b"null")
def test_a_tokenizer_config_loaded(model: Path, data: bytes):
    with_file(model, "tokenizer_config.json", data, loaded)


@fuzz("tokenizer.json, loaded", damaged_json(JSON["tokenizer.json"]), few=2, cost=100)
@example(data=json.dumps(JSON["tokenizer.json"] | {"version": []}).encode())
def test_a_tokenizer_loaded(model: Path, data: bytes):
    with_file(model, "tokenizer.json", data, loaded)


ADAPTER = {"base_model_name_or_path": "../model", "peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}


@fuzz("adapter_config.json, loaded", damaged_json(ADAPTER), few=2, cost=100)
@example(data=json.dumps(ADAPTER | {"base_model_name_or_path": "x" * 300}).encode())
@example(data=json.dumps(ADAPTER | {"base_model_name_or_path": "\ud800"}).encode())
def test_an_adapter_loaded(adapter: Path, data: bytes):
    with_file(adapter, "adapter_config.json", data, lambda folder: loaded(folder, names=False))
