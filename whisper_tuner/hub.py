"""A base model's files, be it a folder or a hub id: where they are, and whether they are whole. Nothing loads torch."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from exogym.config import nearest
from whisper_tuner.config import WHISPERS, Profile
from whisper_tuner.errors import ConfigError, ModelError
from whisper_tuner.files import download_remedy, expanded, is_below, is_evicted, is_file
from whisper_tuner.text import is_unicode, parse_json

ADAPTER_CONFIG = "adapter_config.json"  # of a LoRA adapter
HUB_ID = r"\w[\w.-]*/[\w.-]+"
HUB_S = 5.0
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # the first that a model has
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"  # behind the name of weights that lie in several files
EXTRACTOR, TOKENIZER = ("preprocessor_config.json", "processor_config.json"), ("tokenizer.json", "vocab.json")
# A model has at least one file of each.
NEEDED = (("config.json",), (SAFETENSORS, SAFETENSORS + INDEX, PICKLED, PICKLED + INDEX), EXTRACTOR, TOKENIZER)
NOT_FETCHED = "cannot be fetched from the hub"
CHECK_NETWORK = "Check the network, or name a folder that holds the model."
COPY_AGAIN = "Copy the model again."
LAYOUT = "Give a folder in transformers layout, or a hub id such as openai/whisper-small."
PANIC = "PanicException"  # of a library in Rust: no Exception, and it cannot be imported


@contextlib.contextmanager
def loading(failure: str, *, remedy: str) -> Iterator[None]:
    """Turn what libraries raise for a damaged folder or a bad network, whatever it is, into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{failure}: {reason}", remedy=remedy) from error


def settings_of(base_model: str | Path, name: str) -> dict:
    """Read a JSON file of a model; empty if it has none. Raises ModelError."""
    file = model_file(base_model, name)
    try:
        stored = parse_json(file.read_text(encoding="utf-8")) if file else {}
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}", remedy="Check its permissions.") from None
    except ValueError as error:
        raise ModelError(f"{file} is damaged: {error}", remedy=COPY_AGAIN) from None
    if not isinstance(stored, dict):
        raise ModelError(f"{file} is damaged: not a JSON object", remedy=COPY_AGAIN)
    return stored


def model_file(base_model: str | Path, name: str) -> Path | None:
    """Find a file of a folder or, downloaded if need be, of a hub id; None if it has none. Raises ModelError."""
    if expanded(base_model).is_dir():
        file = expanded(base_model) / name
        return file if file.is_file() else None
    base_model = str(base_model)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with loading(f"{base_model}: {NOT_FETCHED}", remedy=CHECK_NETWORK):
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(hf_hub_download(base_model, name, local_files_only=True))
        return Path(hf_hub_download(base_model, name)) if _is_on_hub(base_model, name) else None


def _is_on_hub(base_model: str, name: str) -> bool:
    """Ask the hub once for a file; a download would try for half a minute. Raises ModelError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    near = "" if base_model in WHISPERS else nearest(base_model, WHISPERS)
    # Without an answer only a name of OpenAI's is known to be wrong.
    meant = f" Of OpenAI's models{near}" if near and base_model.startswith("openai/") else ""
    with loading(f"{base_model}: {NOT_FETCHED}", remedy=CHECK_NETWORK + meant):
        try:
            get_hf_file_metadata(hf_hub_url(base_model, name), timeout=HUB_S)
        except RepositoryNotFoundError:
            what = f"{base_model}: the hub has no model of this name{near}"
            remedy = "Look it up on huggingface.co; one that is not public needs `hf auth login`."
            raise ModelError(what, remedy=remedy) from None
        except OfflineModeIsEnabled:
            remedy = f"Unset it to fetch the model, or name a folder that holds it.{meant}"
            raise ModelError(f"{base_model} is not on this disk, and HF_HUB_OFFLINE is set", remedy=remedy) from None
        except EntryNotFoundError:
            return False
    return True


def check_at_hand(base_model: str) -> None:
    """Raise ModelError for a hub id that is neither on this disk nor on the hub, or if the hub cannot be reached."""
    if folder_here(base_model) is None:
        _is_on_hub(base_model, "config.json")


def model_folder(base_model: str, *, show: bool = False) -> Path:
    """Find the folder of a base model; a hub id is downloaded into the hub's own cache first. Raises ModelError.

    show: progress bars on stderr, if there is anything to download.
    """
    if expanded(base_model).is_dir():
        return expanded(base_model)
    check_at_hand(base_model)
    for weights in WEIGHTS:
        bars = show and _stored(base_model, weights) is None
        with loading(f"{base_model}: {NOT_FETCHED}", remedy=CHECK_NETWORK):
            folder = _snapshot(base_model, weights, bars=bars)
        if bars:
            print("\n", file=sys.stderr)  # the bars leave the cursor above the last of them
        if folder:
            return folder
    raise ModelError(f"{base_model}: the hub has no weights for it", remedy=f"It needs one of {', '.join(WEIGHTS)}.")


def _snapshot(base_model: str, weights: str, *, bars: bool = False, is_here: bool = False) -> Path | None:
    """Return the folder in the hub's cache, None if the model has no such weights. is_here: it downloads nothing."""
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    folder = Path(
        snapshot_download(
            base_model,
            allow_patterns=["*.json", "*.txt", weights],
            ignore_patterns=["*fp32*"],  # large-v3's second copy
            tqdm_class=tqdm if bars else None,
            local_files_only=is_here,
        )
    )
    return folder if any(folder.glob(weights)) else None


def is_adapter(model: str | Path) -> bool:
    """Tell if a model is a folder with a LoRA adapter, which needs its base model."""
    return (expanded(model) / ADAPTER_CONFIG).is_file()


def base_of(folder: Path) -> str | Path:
    """Find the base that an adapter names; a relative path starts at the adapter's own folder. Raises ModelError."""
    name = settings_of(folder, ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or not is_unicode(name):
        raise ModelError(
            f"{folder} names no base model",
            remedy=f"Write it into {ADAPTER_CONFIG} as base_model_name_or_path, or copy the folder again.",
        )
    try:
        if (beside := folder / name).is_dir():
            return beside
        if expanded(name).is_dir() or re.fullmatch(HUB_ID, name):
            return name
        looked = os.path.normpath(folder.absolute() / expanded(name))  # as text: the name may be no path at all
    except OSError as error:  # a name longer than names can be
        what = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path: {error.strerror}"
        raise ModelError(what, remedy="Copy the folder again.") from None
    raise ModelError(
        f"{folder} is a LoRA adapter, and its base model is missing: {name}, looked for as {looked}",
        remedy=f"Put one of the two back where it was. Or write the base's folder into {folder / ADAPTER_CONFIG} as "
        f"base_model_name_or_path. Before you move an adapter: `multimac export` makes a model that needs no base.",
    )


def folder_here(base_model: str) -> Path | None:
    """Find the folder of a base model that is on this disk; None if it would have to be downloaded."""
    if expanded(base_model).is_dir():
        return expanded(base_model)
    return next(filter(None, (_stored(base_model, weights) for weights in WEIGHTS)), None)


def _stored(base_model: str, weights: str) -> Path | None:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(base_model, weights, is_here=True)
    except (LocalEntryNotFoundError, HFValidationError):  # the hub's own rules for names are stricter than HUB_ID
        return None


def check_model(profile: Profile) -> None:
    """Check the files of a folder; of a hub id nothing.

    Raises ModelError, and ConfigError for LoRA targets that the model does not have.
    """
    folder = expanded(profile.base_model)
    if not folder.is_dir():
        return
    check_files(folder)
    check_kind(profile.base_model, stated=True)
    layers = {name.removesuffix(".weight") for path in _weight_files(folder) for name in _matrices(path)}
    if profile.method == "lora" and layers:
        _check_targets(profile, layers)


def check_files(folder: Path) -> None:
    """Raises ModelError for a folder that is no whole model: without a tokenizer transformers loads an empty one."""
    try:
        found = {path.name for path in folder.iterdir() if path.is_file()}
        if evicted := [name for name in sorted(found) if is_evicted((folder / name).stat())]:
            raise ModelError(f"{folder / evicted[0]} is in iCloud only", remedy=download_remedy(folder))
    except OSError as error:
        raise ModelError(f"{folder}: {error.strerror}", remedy="Check its permissions.") from None
    if ADAPTER_CONFIG in found:
        remedy = f"Name its base model. Or make a whole model of it: multimac export {folder} --to transformers"
        raise ModelError(f"{folder} is a LoRA adapter, and here a whole model is needed", remedy=remedy)
    for names in NEEDED:
        if not found & set(names):
            raise ModelError(f"{folder} has no {names[0]}", remedy=_where_to_find(names, folder))
    for path in _weight_files(folder):
        if not is_file(path):
            raise ModelError(f"{path}: there is no such file, though an index names it", remedy=COPY_AGAIN)


def _where_to_find(names: tuple[str, ...], folder: Path) -> str:
    """Say where a file may lie that a Trainer's checkpoint lacks, unless it was given a whole processor to save."""
    if names not in (EXTRACTOR, TOKENIZER):
        return LAYOUT
    files = "tokenizer*.json, vocab.json, merges.txt, added_tokens.json" if names == TOKENIZER else " or ".join(names)
    base = settings_of(folder, "config.json").get("_name_or_path") or "the model that it was trained from"
    source = folder.parent if any((folder.parent / name).is_file() for name in names) else base
    return f"Copy the files for it ({files}) from {source} into this folder."


def check_kind(base_model: str, *, stated: bool = False) -> None:
    """Refuse another kind of model: transformers would load what fits of it, or wait for a hub that does not answer.

    stated: refuse one that does not state its kind, too.
    """
    kind = settings_of(base_model, "config.json").get("model_type")
    if kind is None and not expanded(base_model).is_dir() and model_file(base_model, ADAPTER_CONFIG):
        remedy = f"Fetch it into a folder, and name that: hf download {base_model} --local-dir FOLDER"
        raise ModelError(f"{base_model} is a LoRA adapter on the hub", remedy=remedy)
    if kind != "whisper" and (kind or stated):
        why = f"it is a model of type {kind!r}" if kind else "it has no config.json with a model_type"
        raise ModelError(f"{base_model} does not load as a Whisper model: {why}", remedy=LAYOUT)


def _weight_files(folder: Path) -> list[Path]:
    """List the files that transformers would take the weights from: the first kind that there is."""
    for file in (SAFETENSORS, SAFETENSORS + INDEX, PICKLED, PICKLED + INDEX):
        index = folder / file
        if not index.is_file():
            continue
        if not file.endswith(INDEX):
            return [index]
        parts = settings_of(folder, file).get("weight_map") or {}
        if not isinstance(parts, dict):
            raise ModelError(f"{index} is damaged: weight_map is not an object", remedy=COPY_AGAIN)
        names = set(map(str, parts.values()))
        if odd := [name for name in names if "/" in name or not is_below(name)]:
            raise ModelError(f"{index} is damaged: {odd[0]!r} is not a file beside it", remedy=COPY_AGAIN)
        return [folder / name for name in sorted(names)]
    return []


def _matrices(file: Path) -> list[str]:
    """List the names of the weights that are matrices. A file that is shorter than its header says is refused."""
    if file.suffix == ".bin":  # pickled: to read it would be to run it
        return []
    from safetensors import SafetensorError, safe_open  # commands that read no weights need not load it

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
