"""Characters that are lost already, or that the tokenizer loses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material

SPECIAL = re.compile(r"<\|[^|<>]*\|>")

LOST = Kind(
    name="lost characters",
    severity=Severity.WARNING,
    means="The text has the sign � in place of a character that an earlier conversion has lost.",
    remedy="Read the original again in its right encoding, or type the text anew.",
)
TOKENS = Kind(
    name="special tokens",
    severity=Severity.ERROR,
    means="The text has tokens of Whisper's own, as `<|0.00|>`. The tokenizer takes them for commands, not for text.",
    remedy="Remove them from the text. Times belong into the column timed_text.",
)
CHANGED = Kind(
    name="changed by the tokenizer",
    severity=Severity.WARNING,
    means="The model's tokenizer does not give back what it is given: the model can never write this text.",
    remedy="Replace the characters that are lost, or use the tokenizer that belongs to the model.",
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if found := SPECIAL.search(row.text):
            yield of_row(TOKENS, row, f"'{found[0]}'")
        elif (at := row.text.find("\ufffd")) >= 0:
            yield of_row(LOST, row, f"'{row.text[max(0, at - 15) : at + 15]}'")
        elif material.read_back and (back := material.read_back(row.text)) != row.text:
            yield of_row(CHANGED, row, f"it becomes: {back[:80]}")


CHECK = Check(kinds=(LOST, TOKENS, CHANGED), find=find)
