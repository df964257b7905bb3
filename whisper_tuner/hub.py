"""A base model's files, be it a folder or a hub id."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from whisper_tuner.errors import ModelError
from whisper_tuner.paths import expanded

HUB_ID = r"\w[\w.-]*/[\w.-]+"
HUB_S = 10.0
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # the first that a model has


def model_file(base_model: str, name: str) -> Path | None:
    """A file of a model's folder or, downloaded if need be, of a hub id; None if it has none. Raises ModelError."""
    if expanded(base_model).is_dir():
        file = expanded(base_model) / name
        return file if file.is_file() else None
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(hf_hub_download(base_model, name, local_files_only=True))
        # The download itself tries for half a minute.
        get_hf_file_metadata(hf_hub_url(base_model, name), timeout=HUB_S)
        return Path(hf_hub_download(base_model, name))
    except RepositoryNotFoundError:
        remedy = "Look it up on huggingface.co; one that is not public needs `hf auth login`."
        raise ModelError(f"{base_model}: the hub has no model of this name", remedy=remedy) from None
    except EntryNotFoundError:
        return None
    except Exception as error:  # the network's own classes depend on the version of the hub's client
        raise _not_fetched(base_model, error) from None


def model_folder(base_model: str, *, show: bool = False) -> Path:
    """The folder of a base model; a hub id is downloaded into the hub's own cache first. Raises ModelError.

    show: progress bars on stderr, if there is anything to download.
    """
    folder = expanded(base_model)
    if folder.is_dir():
        return folder
    model_file(base_model, "config.json")  # what cannot be fetched is told at once
    from tqdm.auto import tqdm

    for weights in WEIGHTS:
        bars = show and not _is_here(base_model, weights)
        try:
            folder = _snapshot(base_model, weights, **({"tqdm_class": tqdm} if bars else {}))
        except Exception as error:  # as above
            raise _not_fetched(base_model, error) from None
        if bars:
            print("\n", file=sys.stderr)  # the bars leave the cursor above the last of them
        if folder:
            return folder
    raise ModelError(f"{base_model}: the hub has no weights of it", remedy=f"It needs one of {', '.join(WEIGHTS)}.")


def _snapshot(base_model: str, weights: str, **options) -> Path | None:
    """The folder in the hub's cache, None if the model has no such weights."""
    from huggingface_hub import snapshot_download

    kept = {"allow_patterns": ["*.json", "*.txt", weights], "ignore_patterns": ["*fp32*"]}  # large-v3's second copy
    folder = Path(snapshot_download(base_model, **kept, **options))
    return folder if any(folder.glob(weights)) else None


def _is_here(base_model: str, weights: str) -> bool:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(base_model, weights, local_files_only=True) is not None
    except LocalEntryNotFoundError:
        return False


def _not_fetched(base_model: str, error: Exception) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"{base_model}: cannot be fetched from the hub: {reason}",
        remedy="Check the network, or set base_model to a folder that holds the model.",
    )
