"""Checks a base model's folder without loading the model: neither torch nor transformers is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from exogym.config import nearest
from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError, ModelError
from whisper_tuner.files import download_remedy, is_evicted
from whisper_tuner.hub import settings_of
from whisper_tuner.paths import expanded, is_below

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COPY_AGAIN = "Copy the model again."
LAYOUT = "Give a folder in transformers layout, or a hub id such as openai/whisper-small."
# A model has at least one file of each line.
NEEDED = (
    ("config.json",),
    (WEIGHTS, INDEX, "pytorch_model.bin"),
    ("processor_config.json", "preprocessor_config.json"),
    ("tokenizer.json", "vocab.json"),
)


def check_model(profile: Profile) -> None:
    """A hub id is not checked. Raises ModelError, and ConfigError for LoRA targets that the model does not have."""
    folder = expanded(profile.base_model)
    if not folder.is_dir():
        return
    _check_files(folder)
    check_kind(profile.base_model, stated=True)
    names = [name for path in _weight_files(folder) for name in _matrices(path)]
    if profile.method == "lora" and names:
        _check_targets(profile, {name.removesuffix(".weight") for name in names})


def _check_files(folder: Path) -> None:
    try:
        found = {path.name for path in folder.iterdir() if path.is_file()}
        if evicted := [name for name in sorted(found) if is_evicted((folder / name).stat())]:
            raise ModelError(f"{folder / evicted[0]} is in iCloud only", remedy=download_remedy(folder))
    except OSError as error:
        raise ModelError(f"{folder}: {error.strerror}", remedy="Check its permissions.") from None
    for names in NEEDED:
        if not found & set(names):
            raise ModelError(f"{folder} has no {names[0]}", remedy=LAYOUT)


def check_kind(base_model: str, *, stated: bool = False) -> None:
    """Refuse another kind of model: transformers would load what fits of it, or wait for a hub that does not answer.

    stated: refuse one that does not state its kind, too.
    """
    kind = settings_of(base_model, "config.json").get("model_type")
    if kind != "whisper" and (kind or stated):
        why = f"it is a model of type {kind!r}" if kind else "it has no config.json with a model_type"
        raise ModelError(f"{base_model} does not load as a Whisper model: {why}", remedy=LAYOUT)


def _weight_files(folder: Path) -> Iterator[Path]:
    if (folder / WEIGHTS).is_file():
        yield folder / WEIGHTS
    elif (folder / INDEX).is_file():
        parts = settings_of(folder, INDEX).get("weight_map") or {}
        if not isinstance(parts, dict):
            raise ModelError(f"{folder / INDEX} is damaged: weight_map is not an object", remedy=COPY_AGAIN)
        names = set(map(str, parts.values()))
        if odd := [name for name in names if "/" in name or not is_below(name)]:
            raise ModelError(f"{folder / INDEX} is damaged: {odd[0]!r} is not a file beside it", remedy=COPY_AGAIN)
        yield from (folder / name for name in sorted(names))


def _matrices(file: Path) -> list[str]:
    """Names of the weights that are matrices. A file that is shorter than its header says is refused."""
    try:
        with file.open("rb"):  # for the reason: safetensors does not tell why a file cannot be opened
            pass
        with safe_open(file, framework="numpy") as weights:
            return [name for name in weights.keys() if len(weights.get_slice(name).get_shape()) > 1]  # noqa: SIM118
    except (OSError, ValueError) as error:  # ValueError: a NUL in a name
        remedy = "Check its permissions." if isinstance(error, PermissionError) else COPY_AGAIN
        raise ModelError(f"{file}: {getattr(error, 'strerror', None) or error}", remedy=remedy) from None
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged, or was not copied whole: {error}", remedy=COPY_AGAIN) from None


def _check_targets(profile: Profile, layers: set[str]) -> None:
    short = {name.rpartition(".")[2] for name in layers}
    for layer in profile.lora_targets:
        if not any(name == layer or name.endswith(f".{layer}") for name in layers):
            raise ConfigError(
                f"lora_targets: {profile.base_model} has no layer {layer!r}{nearest(layer, short)}",
                remedy=f"It has: {', '.join(sorted(short))}.",
            )
    if not profile.lora_targets:
        raise ConfigError("method = lora needs lora_targets", remedy=f"Some of: {', '.join(sorted(short))}.")
