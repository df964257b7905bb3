"""Where things are: this project here, and what was sent below a host's project folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
STORE = ".multimac"  # below the project folder on a host: models, audio, bundles, caches


def project_settings(project: Path = PROJECT) -> dict:
    """Read the table `project` of pyproject.toml."""
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
