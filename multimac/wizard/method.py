"""Asks for language, method and the few settings that matter, each with a default and a line on what it does."""

from __future__ import annotations

from rich.console import Console

from whisper_tuner.config import ConfigFile
from whisper_tuner.languages import language_code
from whisper_tuner.settings import parse
from whisper_tuner.text import size

from .draft import Draft, Model
from .machine import this_machine
from .model import fits, memory_needed
from .questions import Option, Questions

METHODS = {
    "full": "all weights: best with hours of speech, most memory",
    "lora": "LoRA, small matrices beside the weights: little memory, little to send",
    "decoder": "the decoder only: new words and spelling rather than new sounds",
}
# (parameters up to, rate of full fine-tuning, rate of LoRA), as commonly used; small models bear larger rates.
LEARNING_RATES = (
    (20e6, 1.5e-3, 5e-3),
    (50e6, 3.75e-5, 1e-3),
    (100e6, 2.5e-5, 1e-3),
    (300e6, 1.25e-5, 1e-3),
    (1e9, 6.25e-6, 5e-4),
    (1e12, 5e-6, 1e-4),
)
EXPLAINED = {
    "epochs": "Epochs (passes over the clips; stop earlier if validation loss rises):",
    "learning_rate": "Learning rate (too high forgets, too low learns little):",
    "batch_size": "Clips per machine and step (fewer need less memory, more are faster):",
}


def ask_language(questions: Questions, draft: Draft) -> str:
    if not draft.model.multilingual:
        return ""
    default = draft.data.language or "en"
    answer = questions.text("language", "Language of the speech (en, fr, German, ...):", default, _check_language)
    return language_code(answer)


def ask_method(questions: Questions, model: Model) -> str:
    options = []
    for method, words in METHODS.items():
        needed = memory_needed(model, method)
        unfit = "" if fits(model, method) else f"needs {size(needed)}, this machine has {size(this_machine().memory)}"
        cost = f" ({size(needed)})" if needed and needed > 4e9 else ""
        options.append(Option(value=method, short=method, title=f"{method}: {words}{cost}", unfit=unfit))
    default = "full" if (memory_needed(model, "full") or 1e12) <= this_machine().memory / 2 else "lora"
    return questions.select("method", "Which weights do you want to train?", options, default)


def ask_settings(questions: Questions, draft: Draft, console: Console) -> dict[str, str]:
    defaults = _defaults(draft)
    settings = {}
    for key, message in EXPLAINED.items():
        settings[key] = questions.text(key, message, defaults[key], lambda text, key=key: _check_setting(key, text))
    batch = int(settings["batch_size"])
    if not fits(draft.model, draft.method, batch):
        needed = size(memory_needed(draft.model, draft.method, batch))
        console.print(f"{batch} clips of 30 s at once would need {needed}; shorter ones need less.", style="yellow")
    return settings


def _defaults(draft: Draft) -> dict[str, str]:
    """Those of a profile with the same model, data and method if there is one, else what suits the model's size."""
    model, method = draft.model, draft.method
    batch = next((count for count in (8, 4, 2) if fits(model, method, count)), 1)
    found = {"epochs": "5", "learning_rate": f"{_learning_rate(model, method):g}", "batch_size": str(batch)}
    return found | _of_similar_profile(draft.config, draft)


def _of_similar_profile(config: ConfigFile, draft: Draft) -> dict[str, str]:
    for name in config.names("profile"):
        own = config.section("profile", name).values
        same = own.get("model") == draft.model.section and own.get("dataset") == draft.data.section
        if same and draft.model.section and draft.data.section and own.get("method", "full") == draft.method:
            return {key: own[key] for key in EXPLAINED if key in own}
    return {}


def _learning_rate(model: Model, method: str) -> float:
    if model.learning_rate and method != "lora":
        return model.learning_rate
    count = model.shape.parameters if model.shape else 250e6
    _, full, lora = next(row for row in LEARNING_RATES if count <= row[0])
    return lora if method == "lora" else full


def _check_setting(key: str, text: str) -> None:
    import dataclasses
    import typing
    from pathlib import Path

    from whisper_tuner.config import Profile

    field = next(field for field in dataclasses.fields(Profile) if field.name == key)
    value = parse(field, typing.get_type_hints(Profile)[key], text, Path())
    if not value:
        raise ValueError("expected a number above 0")


def _check_language(text: str) -> None:
    language_code(text)
