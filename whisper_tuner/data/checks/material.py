"""What checks look at: the rows of all manifests together, and what is known of their audio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from whisper_tuner.data.checks.facts import Facts
from whisper_tuner.data.dataset import Manifest, Sample
from whisper_tuner.data.labels import TokenLimit

TRAIN, VALIDATION, TEST = "train", "validation", "test"
PARTS = (TRAIN, VALIDATION, TEST)


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    manifest: Path
    sample: Sample

    @property
    def text(self) -> str:
        return self.sample.text

    @property
    def place(self) -> str:
        return f"{self.manifest.name} line {self.sample.line}"


@dataclass(frozen=True, slots=True)
class Heard:
    """A model's text for a clip. cer: against the transcript, both normalised. logprob: the mean of its tokens."""

    text: str
    cer: float
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Material:
    """manifests: by part; those that are no train, validation or test set count as ones to train on.

    language: a code, "" if nobody says. limit: of the model's decoder. read_back: what its tokenizer makes of a text,
    there and back. facts: by audio file, of those that were decoded. heard: by part and line.
    """

    manifests: Mapping[str, Manifest]
    language: str = ""
    limit: TokenLimit | None = None
    read_back: Callable[[str], str] | None = None
    facts: Mapping[Path, Facts] = field(default_factory=dict)
    heard: Mapping[tuple[str, int], Heard] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        return [
            Row(part, manifest.path, sample) for part, manifest in self.manifests.items() for sample in manifest.samples
        ]

    @cached_property
    def spoken(self) -> list[Row]:
        """Rows with a text."""
        return [row for row in self.rows if row.text]

    def with_facts(self) -> Iterator[tuple[Row, Facts]]:
        """Rows whose audio was decoded."""
        for row in self.rows:
            if (found := self.facts.get(row.sample.audio)) and not found.problem:
                yield row, found

    def of_later_parts(self, part: str) -> Iterator[str]:
        """The parts that must share nothing with this one, and lose nothing for it: test before validation."""
        rank = PARTS.index(part) if part in PARTS else 0
        return (other for other in reversed(PARTS) if PARTS.index(other) > rank and other in self.manifests)


def letters(text: str) -> int:
    """How much there is to say: letters, and four for a digit, which is read out as a word."""
    return sum(4 if char.isdigit() else char.isalpha() for char in text)
