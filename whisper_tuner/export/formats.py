"""The formats that a trained model can be exported to. A new one is a file beside this one, and a line in FILES."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError

from exogym.config import nearest
from whisper_tuner.data.labels import NO_TIMESTAMPS, TIMESTAMPS, added_words, is_multilingual, token_id
from whisper_tuner.errors import ConfigError, MissingProgram, ModelError, RunError
from whisper_tuner.files import atomic_folder

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizer

FILES = (  # each has a FORMAT
    "folder",
    "faster_whisper",
    "ggml",
    "mlx",
    "onnx",
    "openai",
)
CARD = "README.md"
WHOLE = ("float32", "float16")  # precisions at which a runtime must write what transformers writes
# Sizes of OpenAI's vocabularies: English-only; multilingual with 99 languages; and with 100, as large-v3.
VOCABULARIES = range(51_864, 51_867)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The model in float32 on the CPU, adapters merged."""

    model: WhisperForConditionalGeneration
    processor: WhisperProcessor


@dataclass(frozen=True, kw_only=True)
class Speech:
    """language: the code of what is spoken, None if the runtime is to find it out; `en` for an English-only model."""

    language: str | None
    task: str = "transcribe"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format, and how a runtime uses it.

    write_files: fills an empty folder, at one of `precisions`, of which the first is the default.
    listener: makes of such a folder a function of a waveform [n] at 16 kHz, of 30 s at most, to the runtime's text.
    use: lines that show how the runtime transcribes a file, indented; `languages`: what is said there to a multilingual
    model.
    writing, quantizing, running: Python modules that it needs for that; `extra` of pyproject.toml installs them.
    knows_all_tokens: whether it takes other vocabularies than OpenAI's. has_output_layer: whether that may be another
    than the token embedding. takes_any_model: whether it does both, and writes words that were added to a vocabulary.
    """

    name: str
    runtime: str
    precisions: tuple[str, ...]
    write_files: Callable[[Merged, Path, str], None]
    listener: Callable[[Path, Speech], Callable[[np.ndarray], str]]
    use: str
    languages: str
    extra: str = ""
    writing: tuple[str, ...] = ()
    quantizing: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    knows_all_tokens: bool = False
    has_output_layer: bool = False
    takes_any_model: bool = False

    def write(self, merged: Merged, folder: Path, precision: str, card: str = "") -> None:
        """Make the folder, whole or not at all. card: its README.md.

        Raises ModelError for a model that the runtime cannot use, RunError if it cannot be written.
        """
        self.check(merged)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(folder, mode=0o755) as part:
                self.write_files(merged, part, precision)
                if card:
                    (part / CARD).write_text(card, encoding="utf-8")
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            remedy = "Free some space, or choose another folder with --out."
            raise RunError(f"{folder}: the export cannot be written: {reason}", remedy=remedy) from error

    def check(self, merged: Merged) -> None:
        """Refuse a model that the runtime would make other text of. Raises ModelError."""
        size, runtime = merged.model.config.vocab_size, self.runtime
        if not (self.knows_all_tokens or size in VOCABULARIES):
            known = f"{VOCABULARIES[0]:,} to {VOCABULARIES[-1]:,}"
            what = f"{runtime} cannot use a model with {size:,} tokens: it has the tokens of OpenAI's models built in, "
            remedy = "Export to transformers or faster-whisper, or fine-tune one of OpenAI's models."
            raise ModelError(what + known, remedy=remedy)
        if not self.takes_any_model and (reason := self._mistaken(merged.model, merged.processor.tokenizer)):
            raise ModelError(f"{runtime} cannot use this model: {reason}", remedy="Export to transformers or onnx.")

    def _mistaken(self, model: WhisperForConditionalGeneration, tokenizer: WhisperTokenizer) -> str:
        """Say what of a model the runtime would take for something else, '' if nothing."""
        import torch

        if not (self.has_output_layer or torch.equal(model.proj_out.weight, model.model.decoder.embed_tokens.weight)):
            return "its output layer is not its token embedding"
        if words := added_words(tokenizer):
            return f"words were added to its vocabulary, such as {next(iter(words.values()))!r}"
        size = model.config.vocab_size
        # CTranslate2 goes by the size, or in later versions by the empty token that only OpenAI's multilingual has.
        signs = {size >= VOCABULARIES[1]} | ({"" in tokenizer.get_vocab()} if self.knows_all_tokens else set())
        if signs != {is_multilingual(model)}:
            kind = "an English-only" if is_multilingual(model) else "a multilingual"
            return f"by its {size:,} tokens it would be taken for {kind} one"
        found, taken = token_id(tokenizer, NO_TIMESTAMPS), size - TIMESTAMPS - 1
        if self.knows_all_tokens or found == taken:
            return ""
        return f"of {size:,} tokens it takes {taken} for {NO_TIMESTAMPS}, which is {found}"

    def usage(self, folder: str, speech: Speech, precision: str, *, is_multilingual: bool) -> str:
        """Return the lines that show how the runtime transcribes a file with this folder."""
        told = self.languages.format(language=speech.language or "en", task=speech.task) if is_multilingual else ""
        return self.use.format(folder=folder, languages=told, is_half=precision == "float16")

    def require(self, precision: str, *, running: bool) -> None:
        """Raises MissingProgram with what to install."""
        needed = self.writing + (self.running if running else ())
        needed += self.quantizing if precision not in WHOLE else ()
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            what = f"{self.name} needs Python packages that are not installed here: {', '.join(missing)}"
            remedy = f"Install it, in this project's folder: .venv/bin/python -m pip install -e '.[{self.extra}]'"
            raise MissingProgram(what, remedy=remedy)


@cache
def formats() -> dict[str, Format]:
    """Return all formats by name, in the order of FILES."""
    found: list[Format] = [importlib.import_module(f"whisper_tuner.export.{file}").FORMAT for file in FILES]
    return {each.name: each for each in found}


def chosen(names: Sequence[str], precision: str) -> list[tuple[Format, str]]:
    """Return formats with the precision of each: `precision`, or its own default. Raises ConfigError."""
    found = []
    for name in dict.fromkeys(names):
        if name not in formats():
            remedy = f"Known: {', '.join(formats())}."
            raise ConfigError(f"--to {name}: no such format{nearest(name, formats())}", remedy=remedy)
        known = formats()[name].precisions
        if precision and precision not in known:
            what = f"--precision {precision}: {name} has no such precision{nearest(precision, known)}"
            raise ConfigError(what, remedy=f"Known: {', '.join(known)}.")
        found.append((formats()[name], precision or known[0]))
    return found
