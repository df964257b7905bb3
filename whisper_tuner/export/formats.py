"""The formats that a trained model can be exported to. A new one is a file beside this one and a line in FORMATS."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from exogym.config import nearest
from whisper_tuner.errors import ConfigError, MissingProgram, RunError
from whisper_tuner.files import atomic_folder

if TYPE_CHECKING:
    import numpy as np

    from whisper_tuner.export.merged import Merged, Speech

CARD = "README.md"
WHOLE = ("float32", "float16")  # precisions at which a runtime must write what transformers writes


@dataclass(frozen=True, kw_only=True)
class Format:
    """module: has `write(merged, folder, precision)` and `listener(folder, speech)`.

    precisions: the first is the default. writing, running: Python modules that it needs for that; `extra` of
    pyproject.toml installs them. knows_all_tokens: whether it takes other vocabularies than OpenAI's.
    """

    name: str
    runtime: str
    module: str
    precisions: tuple[str, ...]
    extra: str = ""
    writing: tuple[str, ...] = ()
    quantizing: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    knows_all_tokens: bool = False

    def write(self, merged: Merged, folder: Path, precision: str, card: str = "") -> None:
        """The folder appears whole or not at all. card: its README.md.

        Raises ModelError for a model that the runtime cannot use, RunError if it cannot be written.
        """
        self.check(merged)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(folder, mode=0o755) as part:
                self._module.write(merged, part, precision)
                if card:
                    (part / CARD).write_text(card, encoding="utf-8")
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            remedy = "Free some space, or choose another folder with --out."
            raise RunError(f"{folder}: the export cannot be written: {reason}", remedy=remedy) from error

    def check(self, merged: Merged) -> None:
        """Raises ModelError for a model that the runtime cannot use."""
        if not self.knows_all_tokens:
            from whisper_tuner.export.openai import require_vocabulary

            require_vocabulary(merged, self.runtime)

    def listener(self, folder: Path, speech: Speech) -> Callable[[np.ndarray], str]:
        """The runtime with the exported model: a function of a waveform [n] at 16 kHz, of 30 s at most, to its text."""
        return self._module.listener(folder, speech)

    def usage(self, folder: str, speech: Speech, precision: str, *, is_multilingual: bool) -> str:
        """Lines that show how the runtime transcribes a file with it, indented."""
        about = {"language": speech.language or "en", "task": speech.task}
        languages = self._module.LANGUAGES.format(**about) if is_multilingual else ""
        return self._module.USE.format(folder=folder, languages=languages, is_half=precision == "float16")

    def require(self, precision: str, *, running: bool) -> None:
        """Raises MissingProgram with what to install."""
        needed = self.writing + (self.running if running else ())
        needed += self.quantizing if precision not in WHOLE else ()
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            what = f"{self.name} needs the Python package {' and '.join(missing)}, which is not installed here"
            remedy = f"Install it, in this project's folder: .venv/bin/python -m pip install -e '.[{self.extra}]'"
            raise MissingProgram(what, remedy=remedy)

    @property
    def _module(self) -> ModuleType:
        return importlib.import_module(f"whisper_tuner.export.{self.module}")


FORMATS = {
    each.name: each
    for each in (
        Format(
            name="transformers",
            runtime="transformers",
            module="folder",
            precisions=("float32", "float16"),
            knows_all_tokens=True,
        ),
        Format(
            name="faster-whisper",
            runtime="faster-whisper",
            module="faster_whisper",
            precisions=("float16", "float32", "int8"),
            extra="faster-whisper",
            writing=("ctranslate2",),
            running=("faster_whisper",),
            knows_all_tokens=True,
        ),
        Format(
            name="whisper.cpp",
            runtime="whisper.cpp",
            module="ggml",
            precisions=("float16", "q8_0", "q5_0"),
            extra="whisper-cpp",
            quantizing=("gguf",),
            running=("pywhispercpp",),
        ),
        Format(
            name="mlx",
            runtime="mlx-whisper",
            module="mlx",
            precisions=("float16", "float32"),
            extra="mlx",
            running=("mlx_whisper",),
        ),
        Format(
            name="onnx",
            runtime="onnxruntime",
            module="onnx",
            precisions=("float32", "float16", "int8"),
            extra="onnx",
            writing=("onnx", "onnxscript"),
            quantizing=("onnxruntime",),
            running=("onnxruntime",),
            knows_all_tokens=True,
        ),
        Format(
            name="openai",
            runtime="openai-whisper",
            module="openai",
            precisions=("float16", "float32"),
            extra="openai",
            running=("whisper",),
        ),
    )
}


def chosen(names: Sequence[str], precision: str) -> list[tuple[Format, str]]:
    """Formats with the precision of each: `precision`, or its own default. Raises ConfigError."""
    found = []
    for name in dict.fromkeys(names):
        if name not in FORMATS:
            remedy = f"Known: {', '.join(FORMATS)}."
            raise ConfigError(f"--to {name}: no such format{nearest(name, FORMATS)}", remedy=remedy)
        known = FORMATS[name].precisions
        if precision and precision not in known:
            what = f"--precision {precision}: {name} has no such precision{nearest(precision, known)}"
            raise ConfigError(what, remedy=f"Known: {', '.join(known)}.")
        found.append((FORMATS[name], precision or known[0]))
    return found
