"""Where things are: this project here, and what was sent below a host's project folder."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
STORE = ".multimac"  # below the project folder on a host: models, audio, bundles, caches
