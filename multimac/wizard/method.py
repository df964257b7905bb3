"""Asks for language, method and the few settings that matter, each with a default and a line on what it does."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from whisper_tuner.config import Profile
from whisper_tuner.languages import language_code
from whisper_tuner.settings import parse
from whisper_tuner.text import size

from .draft import Draft, Model
from .model import METHODS, fits, is_multilingual, memory_here, memory_needed
from .questions import Option, Questions

# (parameters up to, rate of full fine-tuning, rate of LoRA), as commonly used; small models bear larger rates.
LEARNING_RATES = (
    (20e6, 1.5e-3, 5e-3),
    (50e6, 3.75e-5, 1e-3),
    (100e6, 2.5e-5, 1e-3),
    (300e6, 1.25e-5, 1e-3),
    (1e9, 6.25e-6, 5e-4),
    (1e12, 5e-6, 1e-4),
)
SETTINGS = {
    "epochs": "Epochs (passes over the clips; stop earlier if validation loss rises):",
    "learning_rate": "Learning rate (too high forgets, too low learns little):",
    "batch_size": "Clips per machine and step (fewer need less memory, more are faster):",
}


def ask_language(questions: Questions, draft: Draft) -> str:
    if not is_multilingual(draft.model):
        return ""
    message, default = "Language of the speech (en, fr, German, ...):", draft.data.language or "en"
    return language_code(questions.text("language", message, default, language_code))


def ask_method(questions: Questions, model: Model) -> str:
    options = []
    for method, words in METHODS.items():
        needed, here = memory_needed(model, method) or 0, memory_here()
        unfit = f"needs {size(needed)}, this machine has {size(here)}" if needed > here else ""
        cost = f" ({size(needed)})" if needed > 4e9 else ""
        options.append(Option(value=method, short=method, title=f"{method}: {words}{cost}", unfit=unfit))
    default = "full" if (memory_needed(model, "full") or 1e12) <= memory_here() / 2 else "lora"
    return questions.select("method", "Which weights do you want to train?", options, default)


def ask_settings(questions: Questions, draft: Draft, console: Console) -> dict[str, str]:
    defaults, settings = _defaults(draft), {}
    for key, message in SETTINGS.items():
        settings[key] = questions.text(key, message, defaults[key], lambda text, key=key: _check(key, text))
    batch = int(settings["batch_size"])
    if not fits(draft.model, draft.method, batch):
        needed = size(memory_needed(draft.model, draft.method, batch))
        console.print(f"{batch} clips of 30 s at once would need {needed}; shorter ones need less.", style="yellow")
    return settings


def _defaults(draft: Draft) -> dict[str, str]:
    """Those of a profile with the same model, data and method if there is one, else what suits the model's size."""
    model, data, method = draft.model, draft.data, draft.method
    batch = next((count for count in (8, 4, 2) if fits(model, method, count)), 1)
    found = {"epochs": "5", "learning_rate": _learning_rate(model, method), "batch_size": str(batch)}
    for name in draft.config.names("profile") if model.section and data.section else ():
        own = draft.config.section("profile", name).values
        if (own.get("model"), own.get("dataset"), own.get("method", "full")) == (model.section, data.section, method):
            return found | {key: own[key] for key in SETTINGS if key in own}
    return found


def _learning_rate(model: Model, method: str) -> str:
    if model.learning_rate and method != "lora":
        return model.learning_rate
    count = model.shape.parameters if model.shape else 250e6
    _, full, lora = next(row for row in LEARNING_RATES if count <= row[0])
    return f"{lora if method == 'lora' else full:g}"


def _check(key: str, text: str) -> None:
    field = Profile.__dataclass_fields__[key]
    if not parse(field, type(field.default), text, Path()):
        raise ValueError("expected a number above 0")
