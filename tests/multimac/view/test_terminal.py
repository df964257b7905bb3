"""What a host, a file or a transcript is called does nothing to the terminal that shows it; and narrow terminals."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli_typer import main
from distributed.checkup.findings import Finding, Severity
from distributed.checkup.links import Pair
from distributed.checkup.look import HostFacts
from distributed.checkup.preflight import Report
from distributed.launcher.follow import PlainScreen
from distributed.ssh.host import Host
from multimac.commands.doctor import _print
from multimac.view.preflight_view import show
from multimac.view.terminal import Console, fitting

PROJECT = Path(__file__).parents[3]
TITLE, CLEAR, UP, C1 = "\x1b]0;owned\x07", "\x1b[2J", "\x1b[1A", "\x9b2J"
EVIL = f"a{TITLE}b{CLEAR}c{UP}\r\bd{C1}e"
SEEN = "a]0;ownedb[2Jc[1Ad2Je"


SENTENCE = "h2: still not reached: stop with Ctrl-C, write its name, such as mac-mini.local, into the hosts file."
PAIR = "Found in known_hosts. It is named as it was: multimac hosts pair 192.168.178.20 --port 2222, and then train."
COPIED = [
    "/Users/anna/My own recordings/multimac-whisper/runs/20261121-155542-mine-hosts/final",
    "multimac transcribe recording.wav --model 20261121-155542-mine-hosts --language fr",
    "ssh-keygen -R '[mac-mini-of-anna-in-the-office.local]:2222'",
]


def printed(text: str, **about) -> str:
    file = io.StringIO()
    Console(file=file, width=80, _environ={"TERM": "dumb"}, **about).print(text, soft_wrap=True)
    return file.getvalue()


def test_a_terminal_gets_lines_that_end_between_words_and_nothing_else_does():
    for text in (SENTENCE, f"error: {SENTENCE}\n  {SENTENCE}", PAIR):
        lines = printed(text, force_terminal=True).splitlines()
        assert len(lines) > text.count("\n") + 1 and max(map(len, lines)) <= 80
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())
        assert printed(text) == f"{text}\n"
    assert printed(f"  {SENTENCE}", force_terminal=True).splitlines()[1].startswith("  mac-mini.local")
    assert "\nmultimac hosts pair 192.168.178.20 --port 2222, and then" in printed(PAIR, force_terminal=True)
    assert printed("a:key:b \n\n x", force_terminal=True) == "a:key:b\n\n x\n"  # no emoji


@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("before", ["", "  ", "model: ", "It says why, and what can be done about it by hand: "])
def test_what_is_to_be_copied_is_not_broken(copied, before):
    if not before and copied[0] == "/":
        before = " 98.5 MB  "
    assert copied in printed(before + copied, force_terminal=True)
    assert f"`{copied}`" in printed(
        f"Name it, or say what is to be done with it: `{copied}` does it.", force_terminal=True
    )


def test_a_path_that_is_too_long_for_a_line_begins_here_or_at_home(tmp_path, monkeypatch):
    here = tmp_path / "clone-in-a-folder-with-a-long-name" / "below my other projects"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    run = "runs/20261121-155542-mine-hosts"
    for text in ("model: {}/final", "error: {}/001.wav: there is no such file.", "less '{}/my log'"):
        assert printed(text.format(here / run), force_terminal=True) == f"{text.format(run)}\n"
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir("/")
    assert f"~/{run}" in printed(f"report: {here / run}/report.html", force_terminal=True)
    for whole in (f"less '{here / run}/my log'", f"mac:{here / run} is there", f"model: /x{here / run}"):
        assert whole in printed(whole, force_terminal=True).replace("\n", " ")


def test_errors_end_between_words_too():
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "hosts", "check", "--hosts", "nothere.json"]
    subprocess.run(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    said = re.sub(r"\x1b\[[\d;]*m", "", os.read(leader, 4096).decode())
    os.close(leader)
    [_, remedy, *_] = said.splitlines()
    assert remedy == "  `multimac hosts pair` writes one. Or copy"


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
    _print(Console(file=file, width=100, markup=False), [finding], deep=True, hosts=True)
    assert "[red]/Volumes/x[/]" in file.getvalue() and "[link=file:///]see[/link]" in file.getvalue()


# ---- Tables on a terminal that is too narrow for them -----------------------------------------------------------


def rendered(width: int) -> list[str]:
    table = Table(title="hosts")
    for column in ("host", "state", "what"):
        table.add_column(column)
    table.add_row("mac-mini.local", "", "a remark that needs some room")
    table.add_row("mac-studio.local", "lost", "")
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(fitting(console, table))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_that_fits_stays_one():
    assert any("┃" in line for line in rendered(80))


def test_a_row_becomes_a_heading_with_its_cells_and_none_that_are_empty():
    found = rendered(30)
    assert found == [
        "hosts",
        "mac-mini.local",
        "  what a remark that needs",
        "  some room",
        "mac-studio.local",
        "  state lost",
    ]
    assert max(map(len, found)) <= 30


def test_cells_that_may_take_several_lines_have_their_own_where_a_word_would_be_broken():
    table = Table("", "a run", "another")
    table.add_row("test", long := f"recordings/{'x' * 40}", "some words, and others")
    console = Console(width=60)
    with console.capture() as capture:
        console.print(fitting(console, table, folds=True))
    assert capture.get().split() == f"test a run {long} another some words, and others".split()
    assert len(capture.get().splitlines()) == 3


@pytest.mark.parametrize("width", [60, 80])
def test_a_preflight_of_eight_hosts_names_all_of_them_and_their_links(width):
    names = [f"mac-mini-{number}-in-the-attic.local" for number in range(1, 9)]
    hosts = [HostFacts(host=Host(address=name), reached=True, clock_ahead_s=0.0, device="mps") for name in names]
    pairs = [
        Pair(source=a, target=b, mbit=940.0, latency_s=3e-4, failed=None) for a, b in itertools.permutations(names, 2)
    ]
    problems = [Finding(hosts=(names[7],), what="its disk is full", severity=Severity.WARNING, check="disk")]
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as capture:
        show(console, Report(hosts=hosts, pairs=pairs, problems=problems))
    said = capture.get()
    assert "…" not in said and max(map(len, said.splitlines())) <= width
    assert said.count("940 / 0.3") >= 40 and "-> 8" in said
    assert width > 60 or all(f"{number} {name}\n" in said for number, name in enumerate(names, 1))
