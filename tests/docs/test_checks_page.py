"""docs/checks.md has a row for each kind of finding, as the code has it."""

import re
from pathlib import Path

from whisper_tuner.data.checks.table import KINDS

TEXT = (Path(__file__).parents[2] / "docs" / "checks.md").read_text(encoding="utf-8")


def plain(text: str) -> str:
    return text.replace("\\|", "|")


def test_the_table_is_what_the_code_says():
    section = TEXT[TEXT.index("## What it finds") : TEXT.index("## What --fix does")]
    rows = [
        tuple(plain(cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ("kind", "severity", "what it means", "what to do")
    assert sorted(rows[1:]) == sorted((kind.name, str(kind.severity), kind.means, kind.remedy) for kind in KINDS)


def test_names_are_used_once():
    assert len({kind.name for kind in KINDS}) == len(KINDS)
