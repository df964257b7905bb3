"""A base model's files, be it a folder or a hub id."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from whisper_tuner.errors import ModelError
from whisper_tuner.json_text import parse_json
from whisper_tuner.paths import expanded

ADAPTER_CONFIG = "adapter_config.json"  # of a LoRA adapter
HUB_ID = r"\w[\w.-]*/[\w.-]+"
HUB_S = 10.0
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # the first that a model has
NOT_FETCHED = "cannot be fetched from the hub"
CHECK_NETWORK = "Check the network, or set base_model to a folder that holds the model."
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
    """A JSON file of a model; empty if it has none. Raises ModelError."""
    file = model_file(base_model, name)
    try:
        stored = parse_json(file.read_text(encoding="utf-8")) if file else {}
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}", remedy="Check its permissions.") from None
    except ValueError as error:
        raise ModelError(f"{file} is damaged: {error}", remedy="Copy the model again.") from None
    if not isinstance(stored, dict):
        raise ModelError(f"{file} is damaged: not a JSON object", remedy="Copy the model again.")
    return stored


def model_file(base_model: str | Path, name: str) -> Path | None:
    """A file of a model's folder or, downloaded if need be, of a hub id; None if it has none. Raises ModelError."""
    if expanded(base_model).is_dir():
        file = expanded(base_model) / name
        return file if file.is_file() else None
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    with loading(f"{base_model}: {NOT_FETCHED}", remedy=CHECK_NETWORK):
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(hf_hub_download(base_model, name, local_files_only=True))
        try:
            # The download itself tries for half a minute.
            get_hf_file_metadata(hf_hub_url(base_model, name), timeout=HUB_S)
            return Path(hf_hub_download(base_model, name))
        except RepositoryNotFoundError:
            remedy = "Look it up on huggingface.co; one that is not public needs `hf auth login`."
            raise ModelError(f"{base_model}: the hub has no model of this name", remedy=remedy) from None
        except EntryNotFoundError:
            return None


def model_folder(base_model: str, *, show: bool = False) -> Path:
    """The folder of a base model; a hub id is downloaded into the hub's own cache first. Raises ModelError.

    show: progress bars on stderr, if there is anything to download.
    """
    if expanded(base_model).is_dir():
        return expanded(base_model)
    model_file(base_model, "config.json")  # what cannot be fetched is told at once
    from tqdm.auto import tqdm

    for weights in WEIGHTS:
        bars = show and not _is_here(base_model, weights)
        with loading(f"{base_model}: {NOT_FETCHED}", remedy=CHECK_NETWORK):
            folder = _snapshot(base_model, weights, **({"tqdm_class": tqdm} if bars else {}))
        if bars:
            print("\n", file=sys.stderr)  # the bars leave the cursor above the last of them
        if folder:
            return folder
    raise ModelError(f"{base_model}: the hub has no weights for it", remedy=f"It needs one of {', '.join(WEIGHTS)}.")


def _snapshot(base_model: str, weights: str, **options) -> Path | None:
    """The folder in the hub's cache, None if the model has no such weights."""
    from huggingface_hub import snapshot_download

    kept = {"allow_patterns": ["*.json", "*.txt", weights], "ignore_patterns": ["*fp32*"]}  # large-v3's second copy
    folder = Path(snapshot_download(base_model, **kept, **options))
    return folder if any(folder.glob(weights)) else None


def is_adapter(model: str | Path) -> bool:
    """Tell if a model is a folder with a LoRA adapter, which needs its base model."""
    return (expanded(model) / ADAPTER_CONFIG).is_file()


def folder_here(base_model: str) -> Path | None:
    """The folder of a base model that is on this disk; None if it would have to be downloaded."""
    if expanded(base_model).is_dir():
        return expanded(base_model)
    return next(filter(None, (_stored(base_model, weights) for weights in WEIGHTS)), None)


def _is_here(base_model: str, weights: str) -> bool:
    return _stored(base_model, weights) is not None


def _stored(base_model: str, weights: str) -> Path | None:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(base_model, weights, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):  # the hub's own rules for names are stricter than HUB_ID
        return None
