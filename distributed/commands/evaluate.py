"""`multimac evaluate`: WER and CER of models on a test set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus


def evaluate(
    config: Path, models: Sequence[str], *, data: Path | None, profile: str, language: str, batch_size: int
) -> ExitStatus:
    from exogym import device as devices
    from whisper_tuner.dataset import load_manifest
    from whisper_tuner.evaluation import evaluate
    from whisper_tuner.export import load_model

    from ..evaluate_run import summary

    console = Console(highlight=False)
    if profile:
        chosen = ConfigFile(config).profile(profile)
        data, language = data or chosen.test, language or chosen.language
    if data is None:
        raise ConfigError(
            "nothing to evaluate on", remedy="Name a manifest with --data, or a profile that has a test set."
        )
    samples = load_manifest(data).samples
    table = Table(title=f"{data}: {len(samples)} clips; WER and CER in per cent", header_style="bold")
    for column in ("model", "WER", "CER", "WER as written", "CER as written"):
        table.add_column(column, justify="left" if column == "model" else "right", overflow="fold")
    for path in models:
        model, processor = load_model(path)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(str(path), total=len(samples))
            result = evaluate(
                model.to(devices.choose()),
                processor,
                samples,
                language=language or None,
                batch_size=batch_size,
                progress=lambda done, total, bar=bar, task=task: bar.update(task, completed=done),
            )
        for problem in result.problems:
            console.print(f"skipped: {problem}")
        figures = summary(result)
        table.add_row(str(path), *(f"{figures[key]:.1f}" for key in ("wer", "cer", "wer_raw", "cer_raw")))
    console.print(table)
    return ExitStatus.OK
