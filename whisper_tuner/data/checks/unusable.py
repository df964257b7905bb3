"""Rows that training leaves out by itself: what `whisper_tuner.data.problems` names, with a remedy for each."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import TEST, Material
from whisper_tuner.data.problems import Kind as Problem

_WORDS = {  # what it means, and what to do
    Problem.COLUMNS: ("The row has more cells than the header, or a cell that is not text.", "Mend the row."),
    Problem.QUOTING: ("A quote is opened and never closed, or the other way round.", "Mend the row's quotes."),
    Problem.NO_AUDIO: ("There is no such audio file, or the row names none.", "Correct the path, or remove the row."),
    Problem.EVICTED: ("The file is in iCloud only.", "Download it: in Finder, Keep Downloaded."),
    Problem.UNREADABLE: ("The audio cannot be decoded.", "Convert it again, or remove the row."),
    Problem.EMPTY_AUDIO: ("The file has no audio, or too little for a single frame.", "Record it again."),
    Problem.TRUNCATED: ("The file ends before its header says.", "Copy it again."),
    Problem.NO_TEXT: (
        "The row has no transcript.",
        "Write what is said. If nobody speaks, no_speech = train makes use of the row.",
    ),
    Problem.TOO_LONG: (
        "The clip is longer than max_duration_s, or than the 30 s that Whisper hears at once.",
        "--fix with --model cuts it at pauses, and divides its text. If there are subtitles, an import cuts by them.",
    ),
    Problem.TOKENS: (
        "The text has more tokens than the decoder takes, usually 448 with its prompt.",
        "Cut the clip at a pause, and divide its text accordingly.",
    ),
    Problem.DURATION: (
        "The duration that the manifest states is not that of the file.",
        "Remove the column, so that durations are measured. If the row names the wrong file, correct it.",
    ),
    Problem.LANGUAGE: ("The model does not know the row's language.", "Correct it, or choose a multilingual model."),
    Problem.SAME_ID: ("An earlier row of the manifest has the same id.", "Give each row an id of its own."),
    Problem.SAME_AUDIO: (
        "An earlier row of the manifest names the same file, with another text.",
        "Keep the right one.",
    ),
    Problem.SAME_ROW: ("An earlier row of the manifest has the same file and text.", "Remove one of them."),
}
KINDS = {
    problem: Kind(name=str(problem), severity=Severity.ERROR, means=means, remedy=remedy, unusable=True)
    for problem, (means, remedy) in _WORDS.items()
}


def find(material: Material) -> Iterator[Finding]:
    for part, manifest in material.manifests.items():
        for found in manifest.problems:
            yield Finding(kind=KINDS[found.kind], part=part, manifest=manifest.path, line=found.line, what=found.what)
    limit = material.limit
    for row in material.rows if limit else ():
        text, language = row.text, row.sample.language
        if row.part == TEST:  # its texts are not trained on
            continue
        if language and not limit.knows(language):
            yield of_row(KINDS[Problem.LANGUAGE], row, f"the model does not know the language '{language}'")
        elif excess := limit.excess(text, language):
            yield of_row(KINDS[Problem.TOKENS], row, excess)


CHECK = Check(kinds=tuple(KINDS.values()), find=find)
