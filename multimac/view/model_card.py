"""A model card, `README.md` with a header that the Hugging Face hub reads."""

from __future__ import annotations

import json
from dataclasses import dataclass

from whisper_tuner.eval.intervals import Interval
from whisper_tuner.text import counted

from .models import file_name


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A WER in per cent, after Whisper's text normaliser."""

    wer: float
    interval: Interval | None = None

    def __str__(self) -> str:
        return f"{self.wer:.1f} ({self.interval})" if self.interval else f"{self.wer:.1f}"


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts of a model; empty or None where they are not known."""

    title: str
    base_model: str = ""
    method: str = ""
    language: str = ""
    clips: int = 0
    hours: float = 0.0
    hosts: int = 1
    steps: int = 0
    test_clips: int = 0
    before: Rate | None = None
    after: Rate | None = None
    runtime: str = ""
    precision: str = ""
    usage: str = ""


def card(about: About) -> str:
    return "\n".join([*_header(about), "", f"# {about.title}", "", *_paragraphs(about)]).rstrip() + "\n"


def _header(about: About) -> list[str]:
    lines = ["---", "pipeline_tag: automatic-speech-recognition", "tags: [whisper]"]
    if about.language:
        lines.append(f"language: {json.dumps(about.language)}")
    if about.base_model and about.base_model == file_name(about.base_model):
        lines.append(f"base_model: {json.dumps(about.base_model, ensure_ascii=False)}")
    return [*lines, "---"]


def _paragraphs(about: About) -> list[str]:
    what = f"A fine-tuned Whisper model for {about.runtime}, weights in {about.precision}."
    lines = [what, ""]
    rows = []
    if about.base_model:
        rows.append(("trained from", f"`{file_name(about.base_model)}`"))
    if about.method:
        rows.append(("method", {"lora": "LoRA, merged", "full": "all weights"}.get(about.method, about.method)))
    if about.clips:
        rows.append(("training data", f"{about.clips:,} clips, {about.hours:.2f} hours"))
    if about.steps:
        rows.append(("training", f"{about.steps:,} steps on {counted(about.hosts, 'host')}"))
    if about.before:
        rows.append(("WER of the base model", str(about.before)))
    if about.after:
        rows.append(("WER of this model", str(about.after)))
    if rows:
        lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    if about.after:
        where = f"on {about.test_clips:,} test clips" if about.test_clips else "on the run's test clips"
        lines += [
            f"WER is the word error rate in per cent {where}, after Whisper's text normaliser, with its interval of "
            "95 %. It was measured before the export, with transformers.",
            "",
        ]
    return [*lines, "## Use", "", about.usage]
