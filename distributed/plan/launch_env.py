"""Environment variables of every process of a run."""

from __future__ import annotations

from pathlib import Path


def environment(project: str | Path) -> dict[str, str]:
    """Variables of each process of a run."""
    return {
        "PYTHONPATH": f"{project}/gym:{project}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of every address without a name
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
