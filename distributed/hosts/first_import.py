"""Loads once what a run will: run by tools/setup.sh here, and sent to hosts as text, where our code may not be yet.

The first time, macOS scans each library as it is loaded: 60 s for a set of packages with torch, 4 s from then on
(Canner/WrenAI #2354). An import that waits for that holds the interpreter's lock, and a worker is not heard meanwhile.
"""

from __future__ import annotations

import importlib
import importlib.util

MODULES = (
    "torch.distributed",
    "transformers.models.whisper.modeling_whisper",
    "transformers.models.whisper.processing_whisper",
    "peft",
    "librosa",
    "soundfile",
    "soxr",
    "paramiko",
    "jiwer",
)


def main() -> None:
    for name in MODULES:
        if importlib.util.find_spec(name.partition(".")[0]):  # whoever installs says what is missing
            importlib.import_module(name)


if __name__ == "__main__":
    main()
