"""A run's folder, made by hand: as many hosts, steps and clips as a test wants, and whatever went wrong."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from whisper_tuner.eval.predictions import COLUMNS

PROJECT = Path(__file__).parents[3]
DATA = PROJECT / "bundled" / "data"
BEGUN = 1.7e9
Words = tuple[str, str]


class MadeRun:
    """Without anything asked for: a finished run of ten steps on one host, which was not measured."""

    def __init__(self, folder: Path):
        self.path = folder / "secret-home" / "runs" / "20260101-000000-mine"
        self.path.mkdir(parents=True)
        self.data = folder / "secret-home" / "recordings"
        self.data.mkdir()
        self.events: list[dict] = []
        self.test = ""

    def write(
        self,
        *,
        name: str = "mine",
        hosts: Sequence[str] = ("localhost",),
        added: dict[str, int] | None = None,
        **profile,
    ) -> Path:
        """run.json, events.jsonl and the lists of clips."""
        profile = {
            "base_model": f"{self.data}/base",
            "method": "lora",
            "language": "fr",
            "task": "transcribe",
            **profile,
        }
        spec = {"profile": profile, "strategy": "diloco", "strategy_settings": {"H": 5, "wire": "float32"}}
        asked = {
            "name": name,
            "created": BEGUN,
            "ranks": [{"label": host, "spec": spec} for host in hosts],
            "manifests": {"train": f"{self.data}/train.csv"},
            "versions": {"torch": "2.13.0"},
            "added": added or {},
            **({"test": self.test} if self.test else {}),
        }
        (self.path / "run.json").write_text(json.dumps(asked))
        lines = [
            "id,audio_path,transcription,duration_s",
            f"a,{self.data}/a.wav,one,3.0",
            f"b,{self.data}/b.wav,two,6.0",
        ]
        (self.path / "train.csv").write_text("\n".join(lines) + "\n")
        (self.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        (self.path / "final").mkdir(exist_ok=True)
        (self.path / "final" / "config.json").write_text("{}")
        return self.path

    def tell(self, kind: str, at: float = 0.0, **values) -> None:
        self.events.append({"time": BEGUN + at, "type": kind, **values})

    def begin(self, hosts: Sequence[str] = ("localhost",), at: float = 0.0, total: int = 10, **about) -> None:
        self.tell("phase", at, phase="start", hosts=list(hosts), **about)
        for host in hosts:
            self.tell("start", at, host=host, total_steps=total, device="mps (Apple M2)")

    def steps(self, steps: Iterable[int], hosts: Sequence[str] = ("localhost",), validate: int = 0) -> None:
        for step in steps:
            for number, host in enumerate(hosts):
                about = {"epoch": 0, "samples": 4 + number, "seconds": 0.5, "loss": 2.0 / step + 0.1, "lr": 1e-5 * step}
                self.tell("step", step, host=host, step=step, **about)
            if validate and step % validate == 0:
                self.tell("validation", step, host=hosts[0], step=step, loss=2.5 / step + 0.2)

    def end(self, at: float = 100.0, status: int = 0, message: str = "") -> None:
        self.tell("model", at, path=f"{self.path}/final")
        self.tell("end", at, status=status, message=message)

    def measured(self, model: str, texts: Sequence[Words], data: str = "test", audio: Sequence[Path] = ()) -> None:
        """texts: of each clip, what was said and what was written."""
        from whisper_tuner.eval.predictions import align

        path = self.path / "evaluation" / data / model / "predictions.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for number, (said, written) in enumerate(texts):
                marks = [word.mark for word in align(said, written)]
                counts = [marks.count(mark) for mark in "SDI"]
                wer = sum(counts) / max(1, len(said.split()))
                clip = audio[number] if audio else self.data / f"clip-{number}.wav"
                figures = [f"{wer:.4f}", "0.1", *counts, "2.500", ""]
                writer.writerow([f"clip-{number}", clip, said, written, said, written, *figures])

    def manifest(self, rows: Sequence[dict[str, str]], name: str = "test.csv") -> None:
        """The run's own test set."""
        path = self.data / name
        self.test = str(path)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


@pytest.fixture
def made(tmp_path) -> MadeRun:
    return MadeRun(tmp_path)
