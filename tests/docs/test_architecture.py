"""docs/architecture.md: what it names exists, and it stays short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TEXT = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_page_can_be_read_in_ten_minutes():
    assert TEXT.count("\n") <= 160


@pytest.mark.parametrize(("file", "name"), sorted(set(re.findall(r"`([\w/]+\.py):(\w+)`", TEXT))))
def test_what_the_page_names_exists(file, name):
    tree = ast.parse((PROJECT / file).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def test_the_page_has_the_layers_of_the_tests():
    from test_imports import LAYERS

    table = TEXT[TEXT.index("## Layers") : TEXT.index("## Processes")]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:] == list(LAYERS)
    assert len(LAYERS) <= 12


@pytest.mark.parametrize("page", sorted(path.name for path in (PROJECT / "docs").glob("*.md")))
def test_files_that_the_docs_name_exist(page):
    text = (PROJECT / "docs" / page).read_text(encoding="utf-8")
    roots = ("", "gym/", "gym/exogym/", "distributed/", "distributed/worker/")
    for name in set(re.findall(r"`([\w/]+/\w+\.py)`", text)) - {"gym/__init__.py"}:  # of another package
        assert any((PROJECT / root / name).is_file() for root in roots), name


def test_paragraphs_are_short():
    for page in ("architecture.md", "membership.md"):
        text = (PROJECT / "docs" / page).read_text(encoding="utf-8")
        for paragraph in text.split("\n\n"):
            if not paragraph.startswith(("|", " ", "#", "1.", "-")):
                assert len(re.findall(r"[.!?](?:\s|$)", paragraph)) <= 5, paragraph


def test_the_page_for_macs_names_every_check_of_the_self_test():
    from distributed.checkup.selftest.run import CHECKS, LID

    text = (PROJECT / "docs" / "mac.md").read_text(encoding="utf-8")
    section = text[text.index("## The self-test") : text.index("### Please send")]
    rows = ", ".join(re.findall(r"^\| (.+?) \|", section, re.MULTILINE))
    assert not [check.name for check in [*CHECKS, LID] if check.name not in rows]
    told = set(re.findall(r"\*([\w :]+?)\*", text[text.index("## What remains") :]))
    known = {name for row in re.split(", ", rows) for name in [row.removesuffix(" (`--lid`)")]}
    assert not {name for name in told - known - {"not known", "large batch"} if not name.startswith("doctor: ")}
