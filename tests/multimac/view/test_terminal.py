"""What a host, a file or a transcript is called does nothing to the terminal that shows it."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli_typer import main
from distributed.checkup.findings import Finding
from distributed.launcher.follow import PlainScreen
from multimac.commands.doctor import _print
from multimac.view.terminal import Console

TITLE, CLEAR, UP, C1 = "\x1b]0;owned\x07", "\x1b[2J", "\x1b[1A", "\x9b2J"
EVIL = f"a{TITLE}b{CLEAR}c{UP}\r\bd{C1}e"
SEEN = "a]0;ownedb[2Jc[1Ad2Je"


def table(text: str) -> Table:
    found = Table(title=text, caption=text)
    found.add_column(text)
    found.add_row(text)
    return found


@pytest.mark.parametrize("shape", [str, Text, table])
def test_nothing_that_is_printed_is_obeyed(shape):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=200, markup=False, highlight=False)
    console.print(shape(EVIL), soft_wrap=True)
    with Live(console=console, transient=True) as live:
        live.update(shape(EVIL), refresh=True)
    said = file.getvalue()
    assert SEEN in said and not [odd for odd in (TITLE, CLEAR, C1, "\b") if odd in said]


def test_an_error_is_no_more_obeyed_than_what_is_printed(capsys, tmp_path):
    main(["runs", "show", EVIL, "--runs-dir", str(tmp_path)])
    said = capsys.readouterr().err
    assert "owned" in said and not {"\x1b", "\x07", "\x9b"} & {*said}


def test_what_hosts_print_is_harmless_in_the_log_and_where_it_is_followed(capsys):
    PlainScreen().print(EVIL)
    assert capsys.readouterr().out == f"{SEEN}\n"
    program = f"from distributed.launcher.main import log; log({EVIL!r})"
    project = Path(__file__).parents[3]
    logged = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=True)
    assert logged.stdout == f"{SEEN}\n"


def test_a_name_in_brackets_is_shown_and_no_style():
    file = io.StringIO()
    finding = Finding(check="disk", what="[red]/Volumes/x[/]", remedy="[link=file:///]see[/link]")
    _print(Console(file=file, width=100, markup=False), [finding], deep=True)
    assert "[red]/Volumes/x[/]" in file.getvalue() and "[link=file:///]see[/link]" in file.getvalue()
