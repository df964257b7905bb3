"""Pages of docs/ say what the code has: kinds of findings, layouts, columns, kinds of bad rows, names of commands."""

from __future__ import annotations

import re
from pathlib import Path

from distributed.plan.hosts_file import HOSTS_FILE
from multimac.wizard.flow import READY
from whisper_tuner.data.checks.table import KINDS
from whisper_tuner.data.formats import rows, times
from whisper_tuner.data.formats.layouts import LAYOUTS
from whisper_tuner.data.formats.rows import KIND_OF
from whisper_tuner.problems import Kind

PROJECT = Path(__file__).parents[2]
CHECKS = (PROJECT / "docs" / "checks.md").read_text(encoding="utf-8")
DATA = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
PLACES = ("README.md", "config.ini", "docs", "multimac", "distributed", "whisper_tuner", "gym", "tools", "cli_typer.py")
OTHER = re.compile(r"\bpython3? cli_typer\.py (?!COMMAND\b)")
COLUMNS = {
    "audio": rows.AUDIO_COLUMNS,
    "text": rows.TEXT_COLUMNS,
    "id": rows.ID_COLUMNS,
    "speaker": rows.SPEAKER_COLUMNS,
    "language": rows.LANGUAGE_COLUMNS,
    "task": rows.TASK_COLUMNS,
    "duration": times.DURATION_COLUMNS,
    "part": rows.SPLIT_COLUMNS,
    "begin of the clip in its recording": times.START_COLUMNS,
    "its end there": times.END_COLUMNS,
    "text with the times of its parts": rows.TIMED_COLUMNS,
}


def test_the_page_for_two_macs_names_answers_that_the_wizard_offers():
    page = (PROJECT / "docs" / "two-macs.md").read_text(encoding="utf-8")
    step = page[page.index("## 4. Train") : page.index("### Which model")]
    hosts = (PROJECT / "multimac" / "wizard" / "hosts.py").read_text(encoding="utf-8")
    titles = [option.title for option in READY] + re.findall(r'title=f"(.*?)"', hosts)
    offered = [title.replace("{path.name}", HOSTS_FILE) for title in titles]
    _, *answers = re.findall(r"\*([^*]+)\*", page[: page.index("## 1.")] + step)  # the first is *Mac*
    assert len(answers) == 3 and all(any(title.startswith(name) for title in offered) for name in answers)


def test_the_table_is_what_the_code_says():
    section = CHECKS[CHECKS.index("## What it finds") : CHECKS.index("## What --fix does")]
    rows = [
        tuple(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ("kind", "severity", "what it means", "what to do")
    assert sorted(rows[1:]) == sorted((kind.name, str(kind.severity), kind.means, kind.remedy) for kind in KINDS)


def test_names_are_used_once():
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def section(title: str) -> list[list[str]]:
    """The cells of its table."""
    body = DATA.partition(f"## {title}\n")[2].partition("\n## ")[0] if title else DATA.partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ")][1:]


def test_every_name_of_a_column():
    told = {cells[0]: tuple(re.findall(r"`(\w+)`", cells[1])) for cells in section("Columns")}
    assert told == COLUMNS


def test_every_layout():
    assert {cells[2].strip("`") for cells in section("")} == set(LAYOUTS)


def test_every_kind_of_row_that_is_left_out():
    told = [kind for cells in section("Rows that cannot be used") for kind in cells[0].split(", ")]
    assert sorted(told) == sorted(Kind)


def test_every_usual_name_of_a_part():
    assert {name for name in KIND_OF if f"`{name}`" in DATA or f"`{name}/`" in DATA} >= {"train", "dev", "test", "val"}


def test_no_message_and_no_page_calls_a_command_by_its_file():
    files = [path for name in PLACES for path in [PROJECT / name, *(PROJECT / name).rglob("*")]]
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in (".py", ".md", ".ini", ".sh")}
    assert len(texts) > 100
    assert [str(path) for path, text in texts.items() if OTHER.search(text)] == []
