"""Asks for the language of the speech; suggests it only where it is known, or was guessed from a few clips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from multimac.view.progress import working
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.labels import token_limit
from whisper_tuner.eval.spoken_language import languages_heard
from whisper_tuner.hub import folder_here
from whisper_tuner.languages import language_code

from .draft import Draft, Model
from .model import is_multilingual
from .questions import Questions

CLIPS = 5
LISTENING_S = 20.0  # most of it is the loading of torch and of the model


def ask_language(questions: Questions, draft: Draft, console: Console) -> str:
    """Return the code of a language; "" for an English-only model, which is told none."""
    if not is_multilingual(draft.model):
        return ""
    default = _known(draft)
    if not default and questions.interactive:
        default = _guessed(questions, draft, console)

    def check(text: str) -> None:
        language_code(text)
        if Path(draft.model.base_model).is_dir():
            token_limit(draft.model.base_model, language=text)

    return language_code(questions.text("language", "Language of the speech (en, fr, German, ...):", default, check))


def _known(draft: Draft) -> str:
    """Return the language of the data's section, else that of the data itself, else what the profile inherits."""
    draft.language = draft.data.language
    inherited = draft.extended_config().profile_values(draft.name).values.get("language", "")
    return draft.data.language or draft.data.stated_language or inherited


def _guessed(questions: Questions, draft: Draft, console: Console) -> str:
    """Guess what the model hears in most of a few clips, if it is on this disk; nothing is downloaded."""
    clips = _chosen(draft.data.samples["train"])
    found = questions.once("listen", (draft.model.base_model, clips), lambda: _listen(draft.model, clips, console))
    if not found:
        return ""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    [(code, count)] = Counter(found).most_common(1)
    name = LANGUAGES.get(code, code).title()
    console.print(f"A guess of this model: it sounds like {name} in {count} of {len(found)} clips.", markup=False)
    return code if count > len(found) / 2 else ""


def _chosen(samples: Sequence[Sample]) -> list[Path]:
    """Choose some clips of the longer half, from all over the list."""
    longer = sorted(samples, key=lambda sample: -sample.duration_s)[: max(CLIPS, len(samples) // 2)]
    longer.sort(key=lambda sample: sample.line)
    return [longer[place * len(longer) // CLIPS].audio for place in range(min(CLIPS, len(longer)))]


def _listen(model: Model, clips: Sequence[Path], console: Console) -> list[str]:
    folder = folder_here(model.base_model)
    if folder is None:
        return []
    with working(console, f"listening to {len(clips)} clips (up to {LISTENING_S:.0f} s)"):
        return languages_heard(folder, clips, LISTENING_S)
