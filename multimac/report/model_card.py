"""A model card, `README.md` with a header that the Hugging Face hub reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from distributed.run_dir.summary import RunSummary
from multimac.view.models import file_name
from whisper_tuner.eval.predictions import PREDICTIONS
from whisper_tuner.eval.wer import wer_interval
from whisper_tuner.text import counted

from .asked import listed_clips
from .measured import Clip, read_predictions

METHODS = {"lora": "LoRA, merged", "full": "all weights"}


def card(run: RunSummary | None, *, language: str | None, runtime: str, precision: str, usage: str) -> str:
    """Describe a model, and the run that made it if that is known."""
    lines = ["---", "pipeline_tag: automatic-speech-recognition", "tags: [whisper]"]
    if language:
        lines.append(f"language: {json.dumps(language)}")
    if run and run.base_model and run.base_model == file_name(run.base_model):
        lines.append(f"base_model: {json.dumps(run.base_model, ensure_ascii=False)}")
    title = (run.name or run.id) if run else "Whisper, fine-tuned"
    lines += ["---", "", f"# {title}", ""]
    lines += [f"A fine-tuned Whisper model for {runtime}, weights in {precision}.", ""]
    lines += _about_run(run) if run else []
    return "\n".join([*lines, "## Use", "", usage]).rstrip() + "\n"


def _about_run(run: RunSummary) -> list[str]:
    """Tell in a table what is known of a run."""
    clips, hours, _ = listed_clips(run.path / "train.csv") or (0, 0.0, "")
    tested = run.path / "evaluation" / Path(run.test).stem
    before, after = (read_predictions(tested / name / PREDICTIONS) if run.test else [] for name in ("base", "final"))
    told = {
        "trained from": f"`{file_name(run.base_model)}`" if run.base_model else "",
        "method": METHODS.get(run.method, run.method),
        "training data": f"{clips:,} clips, {hours:.2f} hours" if clips else "",
        "training": f"{run.steps:,} steps on {counted(len(set(run.hosts)) or 1, 'host')}" if run.steps else "",
        "WER of the base model": _rate(run.wer_before, before) if run.test else "",
        "WER of this model": _rate(run.wer_after, after) if run.test else "",
    }
    rows = [f"| {name} | {value} |" for name, value in told.items() if value]
    lines = ["| | |", "|---|---|", *rows, ""] if rows else []
    if told["WER of this model"]:
        where = f"on {len(after):,} test clips" if after else "on the run's test clips"
        lines += [
            f"WER is the word error rate in per cent {where}, after Whisper's text normaliser, with its interval of "
            "95 %. It was measured before the export, with transformers.",
            "",
        ]
    return lines


def _rate(wer: float | None, clips: Sequence[Clip]) -> str:
    if wer is None:
        return ""
    return f"{wer:.1f} ({wer_interval([clip.counts for clip in clips])})" if clips else f"{wer:.1f}"
